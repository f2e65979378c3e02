"""The GPUs that a plan can be made for: their peaks, memory and links, from NVIDIA's data sheets.

Plain data. Peaks are dense (no sparsity) and of matrix products with float32 accumulation; float32 is counted without
TF32, which torch leaves off. Nothing here is measured: what a program reaches of a peak is `speed`'s, and what NCCL
reaches of a link is `communication`'s.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from data_shards.errors import UserError

Precision = Literal["bf16", "fp16", "fp32"]

GB, TFLOPS = 10**9, 10**12

# Kept free of the data sheet's memory: CUDA's context, NCCL's buffers, cuBLAS' workspace, gaps of the allocator. The
# data sheet counts in powers of ten, which on most cards leaves some percent more than that.
RESERVE_SHARE = 0.04

_PCIE_4 = 64 * GB


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        key: what the user calls it.
        name: what NVIDIA calls it.
        memory_bytes: of the data sheet.
        bf16_tflops: dense peak; 0: it has no bf16 arithmetic.
        fp16_tflops: dense peak.
        fp32_tflops: peak without TF32.
        link_gb_per_second: between the GPUs of a node, both directions together: NVLink, or PCIe.
        link: what that is.
        node_gbps: Gbit/s of the network of a usual node of 8 of them.
        source: of these numbers.
        pattern: what the driver's name of it has in it.
    """

    key: str
    name: str
    memory_bytes: int
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    link_gb_per_second: float
    link: Literal["NVLink", "PCIe"]
    node_gbps: float
    source: str
    pattern: str

    @property
    def usable_bytes(self) -> int:
        """Memory less the reserve."""
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
    key: str,
    name: str,
    memory: int,
    tflops: tuple[float, float, float],
    link: float | None,
    gbps: float,
    source: str,
    pattern: str,
) -> Gpu:
    """Memory and links in GB and GB/s; peaks as (bf16, fp16, fp32); `link` None: PCIe 4.0 x16."""
    return Gpu(
        key=key,
        name=name,
        memory_bytes=memory * GB,
        bf16_tflops=tflops[0],
        fp16_tflops=tflops[1],
        fp32_tflops=tflops[2],
        link_gb_per_second=_PCIE_4 / GB if link is None else link,
        link="PCIe" if link is None else "NVLink",
        node_gbps=gbps,
        source=source,
        pattern=pattern,
    )


# In the order in which a driver's name is looked up: the more special ones first.
GPUS = (
    _gpu("b200", "B200 SXM", 180, (2250, 2250, 75), 1800, 3200, "NVIDIA HGX B200 data sheet", r"B200"),
    _gpu("gh200", "GH200 96 GB", 96, (990, 990, 67), 900, 3200, "NVIDIA GH200 data sheet", r"GH200"),
    _gpu("h200", "H200 SXM", 141, (989, 989, 67), 900, 3200, "NVIDIA H200 data sheet", r"H200"),
    _gpu("h100-pcie", "H100 PCIe", 80, (756, 756, 51), None, 400, "NVIDIA H100 data sheet", r"H100 PCIe"),
    _gpu("h100", "H100 SXM", 80, (989, 989, 67), 900, 3200, "NVIDIA H100 data sheet", r"H100"),
    _gpu("a100-40", "A100 40 GB", 40, (312, 312, 19.5), 600, 1600, "NVIDIA A100 data sheet", r"A100.*40GB"),
    _gpu("a100", "A100 80 GB", 80, (312, 312, 19.5), 600, 1600, "NVIDIA A100 data sheet", r"A100"),
    _gpu("v100", "V100 SXM2 32 GB", 32, (0, 125, 15.7), 300, 400, "NVIDIA V100 data sheet", r"V100"),
    _gpu("l40s", "L40S", 48, (362, 362, 91.6), None, 400, "NVIDIA L40S data sheet", r"L40S"),
    _gpu("l4", "L4", 24, (121, 121, 30.3), None, 100, "NVIDIA L4 data sheet", r"L4\b"),
    _gpu("a10", "A10", 24, (125, 125, 31.2), None, 100, "NVIDIA A10 data sheet", r"A10\b"),
    _gpu("t4", "T4", 16, (0, 65, 8.1), None, 100, "NVIDIA T4 data sheet", r"T4\b"),
    _gpu("rtx4090", "RTX 4090", 24, (165, 165, 82.6), None, 10, "NVIDIA Ada white paper", r"RTX 4090"),
    _gpu("rtx3090", "RTX 3090", 24, (71, 71, 35.6), None, 10, "NVIDIA Ampere GA102 white paper", r"RTX 3090"),
)
_BY_KEY = {gpu.key: gpu for gpu in GPUS}


def find_gpu(key: str) -> Gpu:
    """The GPU that a user means.

    Raises:
        UserError: there is none of that name in the table.
    """
    gpu = _BY_KEY.get(key.lower().replace("_", "-").replace(" ", ""))
    if gpu is None:
        close = difflib.get_close_matches(key.lower(), _BY_KEY, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--gpu: {key} is not in the table{hint}; give one of {', '.join(_BY_KEY)}")
    return gpu


def gpu_of_driver(name: str) -> Gpu | None:
    """The GPU that a driver calls `name` ("NVIDIA A100-SXM4-80GB"); None: not in the table."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name)), None)
