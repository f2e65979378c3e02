"""GPUs to plan for: peak FLOP/s, memory and links from NVIDIA's data sheets, not measured.

Peaks: dense matrix products, float32 accumulation; float32 without TF32 (torch's default). `speed` has the share of the
peak that training reaches, `communication` that of links.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from shardvit.data_shards.errors import UserError

Precision = Literal["bf16", "fp16", "fp32"]

GB, TFLOPS = 10**9, 10**12

# Share of memory for CUDA's context, NCCL's buffers, cuBLAS' workspace and fragmentation. Data sheets count in
# powers of ten, which on most cards leaves a few percent more.
RESERVE_SHARE = 0.04

_PCIE_3, _PCIE_4, _PCIE_5 = 32.0, 64.0, 128.0  # GB/s, 16 lanes


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    key: str  # for `--gpu`
    name: str  # NVIDIA's
    memory_bytes: int
    bf16_tflops: float  # dense peak; 0: no bf16 arithmetic
    fp16_tflops: float  # dense peak
    fp32_tflops: float  # peak without TF32
    link_gb_per_second: float  # between GPUs of a node, sum of both directions
    link: Literal["NVLink", "PCIe"]
    host_gb_per_second: float  # between GPU and host, sum of both directions
    node_gbps: float  # network of a typical node with 8 GPUs, Gbit/s
    source: str
    pattern: str  # matches the driver's name

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - RESERVE_SHARE))

    def peak_flops(self, precision: Precision) -> float:
        """Peak FLOP/s of matrix products; without bf16 arithmetic, torch computes in float32."""
        peaks = {"bf16": self.bf16_tflops or self.fp32_tflops, "fp16": self.fp16_tflops, "fp32": self.fp32_tflops}
        return peaks[precision] * TFLOPS


_sheet = "NVIDIA {} data sheet".format
_ADA, _AMPERE = "NVIDIA Ada white paper", "NVIDIA Ampere GA102 white paper"
# Driver names match in this order: specific names first.
GPUS = (
    Gpu("b200", "B200 SXM", 180 * GB, 2250, 2250, 75, 1800, "NVLink", _PCIE_5, 3200, _sheet("HGX B200"), "B200"),
    Gpu("gh200", "GH200 96 GB", 96 * GB, 990, 990, 67, 900, "NVLink", 900, 3200, _sheet("GH200"), "GH200"),
    Gpu("h200", "H200 SXM", 141 * GB, 989, 989, 67, 900, "NVLink", _PCIE_5, 3200, _sheet("H200"), "H200"),
    Gpu("h100-pcie", "H100 PCIe", 80 * GB, 756, 756, 51, _PCIE_4, "PCIe", _PCIE_5, 400, _sheet("H100"), "H100 PCIe"),
    Gpu("h100", "H100 SXM", 80 * GB, 989, 989, 67, 900, "NVLink", _PCIE_5, 3200, _sheet("H100"), "H100"),
    Gpu("a100-40", "A100 40 GB", 40 * GB, 312, 312, 19.5, 600, "NVLink", _PCIE_4, 1600, _sheet("A100"), "A100.*40GB"),
    Gpu("a100", "A100 80 GB", 80 * GB, 312, 312, 19.5, 600, "NVLink", _PCIE_4, 1600, _sheet("A100"), "A100"),
    Gpu("v100", "V100 SXM2 32 GB", 32 * GB, 0, 125, 15.7, 300, "NVLink", _PCIE_3, 400, _sheet("V100"), "V100"),
    Gpu("l40s", "L40S", 48 * GB, 362, 362, 91.6, _PCIE_4, "PCIe", _PCIE_4, 400, _sheet("L40S"), "L40S"),
    Gpu("l4", "L4", 24 * GB, 121, 121, 30.3, _PCIE_4, "PCIe", _PCIE_4, 100, _sheet("L4"), r"L4\b"),
    Gpu("a10", "A10", 24 * GB, 125, 125, 31.2, _PCIE_4, "PCIe", _PCIE_4, 100, _sheet("A10"), r"A10\b"),
    Gpu("t4", "T4", 16 * GB, 0, 65, 8.1, _PCIE_4, "PCIe", _PCIE_3, 100, _sheet("T4"), r"T4\b"),
    Gpu("rtx4090", "RTX 4090", 24 * GB, 165, 165, 82.6, _PCIE_4, "PCIe", _PCIE_4, 10, _ADA, "RTX 4090"),
    Gpu("rtx3090", "RTX 3090", 24 * GB, 71, 71, 35.6, _PCIE_4, "PCIe", _PCIE_4, 10, _AMPERE, "RTX 3090"),
)
_BY_KEY = {gpu.key: gpu for gpu in GPUS}


def find_gpu(key: str) -> Gpu:
    """Get the GPU named by `--gpu`; UserError if it is not in the table."""
    gpu = _BY_KEY.get(key.lower().replace("_", "-").replace(" ", ""))
    if gpu is None:
        close = difflib.get_close_matches(key.lower(), _BY_KEY, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--gpu: {key} is not in the table{hint}; give one of {', '.join(_BY_KEY)}")
    return gpu


def gpu_of_driver(name: str) -> Gpu | None:
    """Get the GPU with this driver name ("NVIDIA A100-SXM4-80GB"); None: not in the table."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name)), None)
