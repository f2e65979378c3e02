"""Check the GPUs and a Transformer's arithmetic (on the CPU without a GPU). `try_...` runs in a child process."""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from shardvit.data_shards.text import show_bytes
from shardvit.launch.doctor.child import Answer, ask
from shardvit.launch.doctor.findings import Check, judge
from shardvit.launch.local.env import num_gpus

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader")
_SMI_SECONDS = 20.0  # seconds per GPU without a persistence daemon
_MOST_ERROR = 0.1  # of gradients in bfloat16 (8 bits); 0.01 to 0.02 is usual
_SLOWER = 1.2
_MOST_TAKEN = 0.2  # of a GPU's memory, by other programs
_AMPERE = (8, 0)
_WARM_UPS, _REPEATS = 3, 10
_SHAPE = {"cuda": (32, 197, 1024), "cpu": (4, 197, 192)}  # images, tokens, width: ViT-L/16 and ViT-Ti/16 at 224 pixels
_HEAD_WIDTH = 64


def check_gpus(*, devices: int, visible: int, run: Callable[..., Answer] = ask) -> Check:
    """Ask nvidia-smi, which hangs if the driver does. `devices`: in /dev; `visible`: left by CUDA_VISIBLE_DEVICES."""
    answer = run(_SMI, limit_seconds=_SMI_SECONDS)
    cells = [tuple(cell.strip() for cell in line.split(",")) for line in answer.output.splitlines()]
    rows = [row for row in cells if len(row) == 4] if answer.code == 0 else []
    if not devices and not rows:
        return Check(
            "GPUs",
            "absent",
            "none: training runs on the CPU, in bf16 or fp32",
            "enough for models as small as the demo's; engine.precision fp16 and data.decoder gpu need a GPU",
        )
    if not rows:
        said = answer.output.strip().partition("\n")[0] if answer.code else ""
        return Check(
            "GPUs",
            "problem",
            f"/dev has {devices}, but nvidia-smi: {said or answer.ending}",
            "the driver is not loaded, hangs, or is not passed into the container: see `dmesg`, and start containers "
            "with --gpus all (docker) or --nv (apptainer)",
        )
    names = Counter(row[0] for row in rows)
    _, memory, driver, capability = rows[0]
    is_old = any(tuple(map(int, row[3].split("."))) < _AMPERE for row in rows if re.fullmatch(r"\d+\.\d+", row[3]))
    hidden = f"; CUDA_VISIBLE_DEVICES leaves {visible} of {devices}" if visible < devices else ""
    return judge(
        "GPUs",
        f"{', '.join(f'{count} x {name}' for name, count in names.items())}, {memory} each, driver {driver}, "
        f"compute capability {capability}{hidden}",
        (
            visible < devices,
            "note",
            "unset it to train on all of them; a batch system sets it to those that the job was given",
        ),
        (is_old, "note", "no bf16 units, which 8.0 and newer have: engine.precision=fp16 is faster on these GPUs"),
        (len(names) > 1, "note", "they differ, and the slowest sets the pace: CUDA_VISIBLE_DEVICES chooses"),
    )


def try_torch() -> list[Check]:
    """Check that torch can use the GPUs, and how much of their memory is free."""
    import torch
    from torch.cuda import nccl

    complaint, libraries = "", ""
    if torch.cuda.is_available():
        libraries = f", cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, nccl.version()))}"
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            complaint = str(error).strip().splitlines()[0]
    check = judge_torch(
        f"torch {torch.__version__}{libraries}",
        complaint="it was built without CUDA" if torch.version.cuda is None else complaint,
        has_cuda=torch.cuda.is_available(),
        devices=num_gpus({}),
        visible=num_gpus(),
    )
    memory = [torch.cuda.mem_get_info(gpu) for gpu in range(torch.cuda.device_count())]
    return [check, judge_memory(memory)] if memory else [check]


def judge_torch(build: str, *, complaint: str, has_cuda: bool, devices: int, visible: int) -> Check:
    """Judge torch and the driver; `complaint` says why CUDA is unusable."""
    name = "torch and CUDA"
    if has_cuda:
        return Check(name, "fine", build)
    if not devices:
        return Check(name, "absent", f"{build}, on the CPU")
    if not visible:
        return Check(name, "note", f"{build} sees no GPU", "CUDA_VISIBLE_DEVICES hides them all: unset it")
    return Check(
        name,
        "problem",
        f"{build} cannot use the GPUs: {complaint}",
        "install a newer driver, or a torch that is built for CUDA and for this driver (pip install torch)",
    )


def judge_memory(free_and_total_bytes: Sequence[tuple[int, int]]) -> Check:
    """Judge the GPUs' free memory."""
    found = f"{show_bytes(min(free for free, _ in free_and_total_bytes))} free on the fullest GPU"
    is_taken = any(free < (1 - _MOST_TAKEN) * total for free, total in free_and_total_bytes)
    return judge("GPU memory", found, (is_taken, "note", "another program holds the rest: see nvidia-smi"))


def try_arithmetic() -> list[Check]:
    """Compare a Transformer block's gradients and times in bfloat16 and float32."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, tokens, width = _SHAPE[device]
    torch.manual_seed(0)
    qkv = nn.Linear(width, 3 * width)
    mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    parts = nn.ModuleList([qkv, mlp]).to(device)
    inputs = torch.randn(images, tokens, width).to(device)

    def gradients(dtype: torch.dtype) -> torch.Tensor:
        parts.to(dtype).zero_grad(set_to_none=True)
        q, k, v = qkv(inputs.to(dtype)).unflatten(-1, (3, -1, _HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        output = mlp(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        output.square().mean().backward()
        found = [each.grad.flatten().float() for each in parts.parameters() if each.grad is not None]
        return torch.cat(found)

    def milliseconds(dtype: torch.dtype) -> float:
        times: list[float] = []
        for _ in range(_WARM_UPS + _REPEATS):
            start = time.perf_counter()
            float(gradients(dtype)[0])  # waits for the GPU
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times[_WARM_UPS:])

    low, high = gradients(torch.bfloat16), gradients(torch.float32)  # bf16 first, so that both use rounded weights
    error = float((low - high).norm() / high.norm())
    bf16_ms, fp32_ms = milliseconds(torch.bfloat16), milliseconds(torch.float32)
    return [judge_arithmetic(device, error=error, bf16_ms=bf16_ms, fp32_ms=fp32_ms)]


def judge_arithmetic(device: str, *, error: float, bf16_ms: float, fp32_ms: float) -> Check:
    """Judge bf16 against fp32. `error`: relative difference of the gradients, nan if not finite."""
    return judge(
        "arithmetic",
        f"{device.upper()}: gradients in bf16 within {error:.1%} of fp32's; bf16 {bf16_ms:.3g} ms, "
        f"fp32 {fp32_ms:.3g} ms",
        (
            not error <= _MOST_ERROR,
            "problem",
            "the device, or torch's build for it, computes wrongly: try engine.precision=fp32, another GPU or torch",
        ),
        (
            device == "cpu" and bf16_ms > _SLOWER * fp32_ms,
            "note",
            "this CPU emulates bf16: engine.precision=fp32 is faster here",
        ),
    )
