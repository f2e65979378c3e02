"""The GPUs that can be planned for: peaks, memory and links, from NVIDIA's data sheets.

Peaks are dense matrix products with float32 accumulation; float32 without TF32, which torch leaves off. Nothing here is
measured: the reached share of a peak is in `speed`, of a link in `communication`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from data_shards.errors import UserError

Precision = Literal["bf16", "fp16", "fp32"]

GB, TFLOPS = 10**9, 10**12

# Share of the memory kept free for CUDA's context, NCCL's buffers, cuBLAS' workspace and fragmentation. Data sheets
# count in powers of ten, which on most cards leaves a few percent more.
RESERVE_SHARE = 0.04

_PCIE_3, _PCIE_4, _PCIE_5 = 32.0, 64.0, 128.0  # GB/s, 16 lanes


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    key: str  # for `--gpu`
    name: str  # NVIDIA's
    memory_bytes: int  # of the data sheet
    bf16_tflops: float  # dense peak; 0: it has no bf16 arithmetic
    fp16_tflops: float  # dense peak
    fp32_tflops: float  # peak without TF32
    link_gb_per_second: float  # between the GPUs of a node, both directions together
    link: Literal["NVLink", "PCIe"]  # its kind
    host_gb_per_second: float  # between GPU and host, both directions together
    node_gbps: float  # Gbit/s of the network of a usual node of 8 of them
    source: str  # of these numbers
    pattern: str  # found in the driver's name of it

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - RESERVE_SHARE))

    def peak_flops(self, precision: Precision) -> float:
        """FLOP/s of matrix products; without bf16 arithmetic torch computes in float32."""
        match precision:
            case "bf16":
                return (self.bf16_tflops or self.fp32_tflops) * TFLOPS
            case "fp16":
                return self.fp16_tflops * TFLOPS
            case "fp32":
                return self.fp32_tflops * TFLOPS


def _gpu(
    key: str, name: str, memory_gb: int, bf16: float, fp16: float, fp32: float, link: float, host: float, net: float,
    source: str, pattern: str,
) -> Gpu:  # fmt: skip
    kind, paper = ("PCIe" if link == _PCIE_4 else "NVLink"), "" if source.endswith("paper") else " data sheet"
    where = f"NVIDIA {source}{paper}"
    return Gpu(key, name, memory_gb * GB, bf16, fp16, fp32, link, kind, host, net, where, pattern)


# key, name, memory, TFLOP/s in bf16, fp16 and fp32, link, host, network, source, pattern.
# In the order in which a driver's name is looked up: more specific names first.
GPUS = (
    _gpu("b200", "B200 SXM", 180, 2250, 2250, 75, 1800, _PCIE_5, 3200, "HGX B200", r"B200"),
    _gpu("gh200", "GH200 96 GB", 96, 990, 990, 67, 900, 900, 3200, "GH200", r"GH200"),
    _gpu("h200", "H200 SXM", 141, 989, 989, 67, 900, _PCIE_5, 3200, "H200", r"H200"),
    _gpu("h100-pcie", "H100 PCIe", 80, 756, 756, 51, _PCIE_4, _PCIE_5, 400, "H100", r"H100 PCIe"),
    _gpu("h100", "H100 SXM", 80, 989, 989, 67, 900, _PCIE_5, 3200, "H100", r"H100"),
    _gpu("a100-40", "A100 40 GB", 40, 312, 312, 19.5, 600, _PCIE_4, 1600, "A100", r"A100.*40GB"),
    _gpu("a100", "A100 80 GB", 80, 312, 312, 19.5, 600, _PCIE_4, 1600, "A100", r"A100"),
    _gpu("v100", "V100 SXM2 32 GB", 32, 0, 125, 15.7, 300, _PCIE_3, 400, "V100", r"V100"),
    _gpu("l40s", "L40S", 48, 362, 362, 91.6, _PCIE_4, _PCIE_4, 400, "L40S", r"L40S"),
    _gpu("l4", "L4", 24, 121, 121, 30.3, _PCIE_4, _PCIE_4, 100, "L4", r"L4\b"),
    _gpu("a10", "A10", 24, 125, 125, 31.2, _PCIE_4, _PCIE_4, 100, "A10", r"A10\b"),
    _gpu("t4", "T4", 16, 0, 65, 8.1, _PCIE_4, _PCIE_3, 100, "T4", r"T4\b"),
    _gpu("rtx4090", "RTX 4090", 24, 165, 165, 82.6, _PCIE_4, _PCIE_4, 10, "Ada white paper", r"RTX 4090"),
    _gpu("rtx3090", "RTX 3090", 24, 71, 71, 35.6, _PCIE_4, _PCIE_4, 10, "Ampere GA102 white paper", r"RTX 3090"),
)
_BY_KEY = {gpu.key: gpu for gpu in GPUS}


def find_gpu(key: str) -> Gpu:
    """The GPU that `--gpu` names; UserError if it is not in the table."""
    gpu = _BY_KEY.get(key.lower().replace("_", "-").replace(" ", ""))
    if gpu is None:
        close = difflib.get_close_matches(key.lower(), _BY_KEY, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--gpu: {key} is not in the table{hint}; give one of {', '.join(_BY_KEY)}")
    return gpu


def gpu_of_driver(name: str) -> Gpu | None:
    """The GPU with this driver name ("NVIDIA A100-SXM4-80GB"); None: not in the table."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name)), None)
