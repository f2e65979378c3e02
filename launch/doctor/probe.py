"""The child that tries the libraries and the GPUs: `python -m launch.doctor.probe PART...`.

It says when a part begins and what came of it, so that the doctor knows which part a crash belongs to; the parts after
it are then tried by another child (`try_parts` in `probing`). Parts, in the order in which they make sense:

    torch          versions, and what it says of CUDA
    gpus           each GPU; whether they reach one another's memory
    arithmetic     a forward and backward pass in bfloat16 against float32: do the numbers agree, how long do they take
    attention      which kernel scaled_dot_product_attention really runs at a ViT's shape, and the time of each
    decoders       whether the image decoders decode
    import:NAME    import of a library

On an idle machine with 2 cores all of them take some 20 seconds, nearly all of it imports.
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from launch.doctor.child import begin, say

_WARM_UPS, _REPEATS = 3, 10
# [images, heads, tokens, width of a head]: ViT-L/16 at 224 pixels on a GPU, a quarter of a ViT-Ti/16's batch on a CPU
GPU_ATTENTION, CPU_ATTENTION = (32, 16, 197, 64), (4, 3, 197, 64)
_WIDTH = {"cuda": 1024, "cpu": 256}
_TOKENS = {"cuda": 4096, "cpu": 512}
# aten's names as the profiler shows them, and what people call them
_BACKENDS = {
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_attention_math": "math",
}


def main(parts: list[str]) -> int:
    """Try the parts; exit code 0 however they end, as long as this process lives."""
    for part in parts:
        begin(part)
        try:
            facts = import_(part.removeprefix("import:")) if part.startswith("import:") else _PARTS[part]()
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
            lines = str(error).strip().splitlines()
            say(part=part, error=f"{type(error).__name__}: {lines[0] if lines else ''}")
        else:
            say(part=part, facts=facts)
    return 0


def torch_facts() -> dict[str, Any]:
    """What torch says of itself and of CUDA."""
    import torch
    from torch.cuda import nccl

    complaint = ""
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            complaint = str(error).strip().splitlines()[0]
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "has_cuda": torch.cuda.is_available(),
        "complaint": complaint,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": list(nccl.version()) if torch.cuda.is_available() else None,
        "driver_cuda": _driver_cuda(),
    }


def gpu_facts() -> dict[str, Any]:
    """Each GPU that this process sees."""
    import torch

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {
        "gpus": [
            {
                "name": each.name,
                "memory_bytes": each.total_memory,
                "capability": [each.major, each.minor],
                "free_bytes": torch.cuda.mem_get_info(index)[0],
            }
            for index, each in enumerate(properties)
        ],
        "has_bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        "cut_off_pairs": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    }


def arithmetic_facts() -> dict[str, Any]:
    """One block of an MLP, forward and backward."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, tokens = _WIDTH[device], _TOKENS[device]
    generator = torch.Generator(device="cpu").manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    ).to(device)
    with torch.no_grad():
        for parameter in layers.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
                parameter.copy_(noise.to(device))
    tokens_in = torch.randn(tokens, width, generator=generator).to(device)

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        model = layers.to(dtype)
        model.zero_grad(set_to_none=True)
        output = model(tokens_in.to(dtype))
        (output * output).mean().backward()
        return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]

    # bfloat16 first: the weights are rounded for both alike.
    low = gradients(torch.bfloat16)
    high = gradients(torch.float32)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(low, high, strict=True)]
    return {
        "device": device,
        "error": max(errors),
        "is_finite": all(bool(torch.isfinite(each).all()) for each in low),
        "bf16_ms": _milliseconds(lambda: gradients(torch.bfloat16), device=device),
        "fp32_ms": _milliseconds(lambda: gradients(torch.float32), device=device),
    }


def attention_facts() -> dict[str, Any]:
    """Forward and backward with no mask, as timm's blocks call it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from torch.profiler import ProfilerActivity, profile

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = GPU_ATTENTION if device == "cuda" else CPU_ATTENTION
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def once() -> None:
        scaled_dot_product_attention(q, k, v).sum().backward()

    for _ in range(_WARM_UPS):
        once()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiled:
        scaled_dot_product_attention(q, k, v)
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiled.events() or ()
    chosen = [_BACKENDS[event.name] for event in events if event.name in _BACKENDS]
    kernels = sorted(
        (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.device_time,
    )
    times: dict[str, float] = {}
    candidates = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if device == "cuda":
        candidates |= {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, backend in candidates.items():
        try:
            with sdpa_kernel([backend]):
                times[name] = _milliseconds(once, device=device)
        except RuntimeError:  # it does not take this shape on this device
            continue
    return {
        "device": device,
        "shape": list(shape),
        "chosen": chosen[0] if chosen else "",
        "kernel": kernels[-1].name if kernels else "",
        "times_ms": times,
    }


def decoder_facts() -> dict[str, Any]:
    """Complaints by decoder; an empty one: it decodes."""
    from data_shards.errors import UserError
    from data_shards.images import decode_nvimgcodec
    from data_shards.images.decode import require_decoder

    try:
        require_decoder("simplejpeg")
        simple = ""
    except UserError as error:
        simple = str(error)
    return {
        "nvimgcodec": decode_nvimgcodec.complaint("cpu") or "",
        "gpu": decode_nvimgcodec.complaint("gpu") or "",
        "simplejpeg": simple,
    }


def import_(name: str) -> dict[str, Any]:
    """How long it takes; torchvision's compiled operators are called, which is where a wrong build shows."""
    start = time.perf_counter()
    module = importlib.import_module(name)
    if name == "torchvision":
        import torch

        boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.0]])
        kept = module.ops.nms(boxes, torch.tensor([0.9, 0.8]), 0.5)
        assert kept.tolist() == [0]
    return {"seconds": time.perf_counter() - start, "version": str(getattr(module, "__version__", ""))}


def _milliseconds(call: Callable[[], object], *, device: str) -> float:
    """The median of some calls, after some that are not counted."""
    import torch

    times: list[float] = []
    for turn in range(_WARM_UPS + _REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn >= _WARM_UPS:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver serves, as "13.0"; None: no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "gpus": gpu_facts,
    "arithmetic": arithmetic_facts,
    "attention": attention_facts,
    "decoders": decoder_facts,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
