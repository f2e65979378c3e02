"""The GPUs, and the arithmetic that training is made of: verdicts on what `probe` and nvidia-smi found.

On a machine without a GPU the GPU's checks say so, and what works all the same; arithmetic and attention are then the
CPU's. Which attention kernel runs is told by the profiler: asking what torch would allow is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data_shards.text import show_bytes
from launch.doctor.child import Answer, ask
from launch.doctor.probing import Tried
from launch.doctor.result import Check

PARTS = ("torch", "gpus", "arithmetic", "attention", "decoders")
LIBRARIES = ("torchvision", "timm", "accelerate", "deepspeed", "mlflow")
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
_SMI_SECONDS = 20.0  # without a persistence daemon the driver takes seconds for each GPU
_MOST_ERROR = 0.1  # of gradients in bfloat16, which has 8 bits: 0.01 to 0.02 is usual
_SLOWER = 1.2
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Smi:
    """nvidia-smi's word: a row (name, MiB, driver, capability) for each GPU; or why there is none."""

    rows: tuple[tuple[str, str, str, str], ...] = ()
    failure: str = ""


def read_smi(run: Callable[..., Answer] = ask) -> Smi:
    """Ask nvidia-smi, which hangs where the driver does."""
    answer = run(_SMI, limit_seconds=_SMI_SECONDS)
    if not answer.is_success:
        return Smi(failure=answer.output.strip().partition("\n")[0] or answer.ending)
    cells = [tuple(cell.strip() for cell in line.split(",")) for line in answer.output.splitlines() if line.strip()]
    return Smi(rows=tuple(row for row in cells if len(row) == 4))


def check_gpus(smi: Smi, *, devices: int, visible: int) -> Check:
    """The GPUs and their driver, without torch.

    Args:
        smi: nvidia-smi's word.
        devices: GPUs that /dev has.
        visible: those that CUDA_VISIBLE_DEVICES leaves.
    """
    if not devices and not smi.rows:
        return Check(
            "GPUs",
            "absent",
            "none: training runs on the CPU, in bf16 or fp32",
            "models as small as the demo's are well there; engine.precision fp16 and data.decoder gpu need a GPU",
        )
    if not smi.rows:
        return Check(
            "GPUs",
            "problem",
            f"/dev has {devices}, but nvidia-smi: {smi.failure or 'lists none'}",
            "the driver is not loaded, hangs, or is not the container's business: see `dmesg`, and start containers "
            "with --gpus all (docker) or --nv (apptainer)",
        )
    names = {name: sum(row[0] == name for row in smi.rows) for name, *_ in smi.rows}
    memory = min(float(row[1]) if row[1].replace(".", "").isdigit() else 0 for row in smi.rows) * 2**20
    found = (
        f"{', '.join(f'{count} x {name}' for name, count in names.items())}, {show_bytes(memory)} each, driver "
        f"{smi.rows[0][2]}, compute capability {smi.rows[0][3]}"
    )
    if visible < devices:
        return Check(
            "GPUs",
            "note",
            f"{found}; CUDA_VISIBLE_DEVICES leaves {visible} of {devices}",
            "unset it to train on all of them; a batch system sets it to those that the job was given",
        )
    if len(names) > 1:
        return Check("GPUs", "note", found, "they differ, and the slowest sets the pace: CUDA_VISIBLE_DEVICES chooses")
    return Check("GPUs", "fine", found)


def check_cuda(tried: Tried, *, devices: int, visible: int) -> Check:
    """Whether torch reaches the GPUs."""
    name = "torch and CUDA"
    if tried.facts is None:
        return Check(name, "problem", f"torch: {tried.failure}", "install it anew: pip install --force-reinstall torch")
    facts = tried.facts
    build = f"torch {facts['version']}"
    if facts["has_cuda"]:
        parts = [
            build,
            f"the driver serves CUDA {facts['driver_cuda']}",
            f"cuDNN {_cudnn(facts['cudnn'])}",
            f"NCCL {'.'.join(map(str, facts['nccl'] or ('unknown',)))}",
        ]
        return Check(name, "fine", ", ".join(parts))
    if not devices:
        return Check(name, "absent", f"{build}, on the CPU")
    if not visible:
        return Check(name, "note", f"{build} sees no GPU", "CUDA_VISIBLE_DEVICES hides them all: unset it")
    if not facts["cuda_build"]:
        return Check(
            name,
            "problem",
            f"{build} was built without CUDA",
            "install a torch that was built for CUDA: pip install torch",
        )
    served = f", which serves CUDA {facts['driver_cuda']}" if facts["driver_cuda"] else ""
    return Check(
        name,
        "problem",
        f"{build} (CUDA {facts['cuda_build']}) cannot use the driver{served}: {facts['complaint']}",
        "install a newer driver, or a torch that was built for an older CUDA",
    )


def gpu_checks(tried: Tried) -> list[Check]:
    """What torch says of each GPU and of the ways between them."""
    if tried.facts is None:
        return [Check("GPU details", "problem", tried.failure, "see the driver's messages in `dmesg`")]
    gpus: list[Mapping[str, Any]] = list(tried.facts["gpus"])
    if not gpus:
        return []
    return [
        _check_room(gpus),
        _check_bf16(gpus, has_bf16=tried.facts["has_bf16"]),
        *_check_peers(gpus, pairs=tried.facts["cut_off_pairs"]),
    ]


def check_arithmetic(tried: Tried) -> Check:
    """Whether bfloat16 computes what float32 does, and how fast."""
    name = "arithmetic"
    if tried.facts is None:
        return Check(
            name,
            "problem",
            f"a small backward pass in bf16: {tried.failure}",
            "try a torch that is built for this device",
        )
    facts = tried.facts
    found = (
        f"{_device(facts)}: gradients in bf16 within {facts['error']:.1%} of fp32's; "
        f"bf16 {facts['bf16_ms']:.3g} ms, fp32 {facts['fp32_ms']:.3g} ms"
    )
    if not facts["is_finite"] or facts["error"] > _MOST_ERROR:
        return Check(
            name,
            "problem",
            found if facts["is_finite"] else f"{_device(facts)}: bf16 gives numbers that are not finite",
            "the device, or torch's build for it, computes wrongly: try engine.precision=fp32, another GPU or torch",
        )
    if facts["device"] == "cpu" and facts["bf16_ms"] > _SLOWER * facts["fp32_ms"]:
        return Check(name, "note", found, "this CPU emulates bf16: engine.precision=fp32 is faster here")
    return Check(name, "fine", found)


def check_attention(tried: Tried) -> Check:
    """Which attention kernel runs, and whether another one would be faster."""
    name = "attention"
    if tried.facts is None:
        return Check(name, "problem", tried.failure, "try another version of torch, or of the driver")
    facts = tried.facts
    times: Mapping[str, float] = facts["times_ms"]
    images, heads, tokens, width = facts["shape"]
    kernel = f" ({facts['kernel']})" if facts["kernel"] else ""
    found = (
        f"{_device(facts)}: {facts['chosen'] or 'an unknown backend'} is chosen{kernel} for {images} x {heads} heads "
        f"of {tokens} x {width} in bf16; forward and backward: "
        + ", ".join(f"{backend} {time:.3g} ms" for backend, time in sorted(times.items(), key=lambda each: each[1]))
    )
    if facts["device"] == "cpu":
        return Check(name, "fine", found)
    fastest = min(times, key=lambda backend: times[backend], default="")
    if facts["chosen"] in ("math", ""):
        return Check(
            name, "note", found, "no fused kernel: slow, and memory grows with the square of the tokens; update torch"
        )
    if fastest and facts["chosen"] in times and times[facts["chosen"]] > _SLOWER * times[fastest]:
        return Check(
            name,
            "note",
            found,
            f"{fastest} is faster here: torch chooses by its own version and cuDNN's (a system CUDA on LD_LIBRARY_PATH "
            "can hide the newer cuDNN that came with torch)",
        )
    return Check(name, "fine", found)


def check_decoding(tried: Tried, *, has_gpu: bool) -> Check:
    """Which image decoders decode."""
    name = "decoding"
    if tried.facts is None:
        return Check(
            name,
            "problem",
            tried.failure,
            "a decoder takes the process along: data.decoder=simplejpeg or pillow does not",
        )
    complaints = {key: tried.facts[key] for key in ("nvimgcodec", "simplejpeg")}
    if has_gpu:
        complaints["gpu"] = tried.facts["gpu"]
    working = [key for key, complaint in complaints.items() if not complaint] + ["pillow"]
    found = f"data.decoder can be {', '.join(working)}"
    said = "; ".join(complaints[key] for key in ("nvimgcodec", "simplejpeg") if complaints[key])
    if said:
        return Check(name, "note", f"{found}: {said}", "reading is slower without: pip install -e . adds the decoders")
    return Check(name, "fine", found)


def check_imports(tried: Mapping[str, Tried]) -> list[Check]:
    """Whether the libraries can be imported: one line if all can, one for each that cannot."""
    failed = [
        Check(
            f"import {name}",
            "problem",
            tried[f"import:{name}"].failure,
            f"install it anew: pip install --force-reinstall --no-deps {name} -c constraints.txt",
        )
        for name in LIBRARIES
        if tried[f"import:{name}"].facts is None
    ]
    loaded = {name: facts["seconds"] for name in LIBRARIES if (facts := tried[f"import:{name}"].facts)}
    found = f"{', '.join(loaded)} (in {sum(loaded.values()):.1f} s)"
    return [*([Check("imports", "fine", found)] if loaded else []), *failed]


def _check_room(gpus: list[Mapping[str, Any]]) -> Check:
    taken = [1 - gpu["free_bytes"] / gpu["memory_bytes"] for gpu in gpus]
    found = f"{show_bytes(min(gpu['free_bytes'] for gpu in gpus))} free on the fullest of {len(gpus)}"
    if max(taken) > 0.2:
        return Check("GPU memory", "note", found, "another program holds the rest: see nvidia-smi")
    return Check("GPU memory", "fine", found)


def _check_bf16(gpus: list[Mapping[str, Any]], *, has_bf16: bool) -> Check:
    oldest = min(tuple(gpu["capability"]) for gpu in gpus)
    found = f"compute capability {oldest[0]}.{oldest[1]}"
    if has_bf16 and oldest >= _AMPERE:
        return Check("bf16", "fine", found)
    return Check(
        "bf16", "note", f"{found}, which has no bf16 units (8.0 has)", "engine.precision=fp16 is faster on these GPUs"
    )


def _check_peers(gpus: list[Mapping[str, Any]], *, pairs: list[list[int]]) -> list[Check]:
    if len(gpus) < 2:
        return []
    if not pairs:
        return [Check("GPU to GPU", "fine", f"all {len(gpus)} read one another's memory (NVLink or PCIe)")]
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4] if a < b) + (" ..." if len(pairs) > 4 else "")
    return [
        Check(
            "GPU to GPU",
            "note",
            f"some cannot read one another's memory ({shown})",
            "NCCL goes through the host instead, which is slower: see `nvidia-smi topo -m`; in a virtual machine or "
            "with PCIe access control that is its administrator's to change",
        )
    ]


def _device(facts: Mapping[str, Any]) -> str:
    return "GPU" if facts["device"] == "cuda" else "CPU"


def _cudnn(number: int | None) -> str:
    """92600 is 9.26.0; before version 9 it was 8907 for 8.9.7."""
    if number is None:
        return "absent"
    step = 10_000 if number >= 90_000 else 1_000
    return f"{number // step}.{number % step // 100}.{number % 100}"
