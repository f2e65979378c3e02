"""The verdicts on GPUs, arithmetic, attention, decoding and imports, from facts that the test makes up."""

from typing import Any

import pytest

from launch.doctor.child import Answer
from launch.doctor.gpus import (
    LIBRARIES,
    Smi,
    check_arithmetic,
    check_attention,
    check_cuda,
    check_decoding,
    check_gpus,
    check_imports,
    gpu_checks,
    read_smi,
)
from launch.doctor.probing import Tried

ROW = ("NVIDIA H200", "143771", "580.95", "9.0")
TORCH = {
    "version": "2.15.0+cu132",
    "cuda_build": "13.2",
    "has_cuda": True,
    "complaint": "",
    "cudnn": 92600,
    "nccl": [2, 30, 7],
    "driver_cuda": "13.0",
}
NO_CUDA = {**TORCH, "has_cuda": False, "cudnn": None, "nccl": None, "driver_cuda": None}
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "capability": [9, 0], "free_bytes": 149 * 10**9}
ARITHMETIC = {"device": "cuda", "error": 0.012, "is_finite": True, "bf16_ms": 1.0, "fp32_ms": 4.0}
ATTENTION = {
    "device": "cuda",
    "shape": [32, 16, 197, 64],
    "chosen": "cuDNN",
    "kernel": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
    "times_ms": {"cuDNN": 0.2, "flash": 0.3, "efficient": 0.4, "math": 2.0},
}


def test_nvidia_smis_table():
    answer = Answer(0, "NVIDIA H200, 143771, 580.95, 9.0\nNVIDIA H200, 143771, 580.95, 9.0\n", "", 20)
    assert read_smi(lambda command, limit_seconds: answer).rows == (ROW, ROW)
    answer = Answer(9, "NVIDIA-SMI has failed\n", "", 20)
    assert read_smi(lambda command, limit_seconds: answer) == Smi(failure="NVIDIA-SMI has failed")
    answer = Answer(None, "", "", 20)
    assert "did not end within 20 seconds" in read_smi(lambda command, limit_seconds: answer).failure


@pytest.mark.parametrize(
    ("smi", "devices", "visible", "verdict", "words"),
    [
        (Smi(failure="no such command"), 0, 0, "absent", "CPU"),
        (Smi(failure="NVIDIA-SMI has failed"), 8, 8, "problem", "NVIDIA-SMI has failed"),
        (Smi(rows=(ROW,) * 8), 8, 8, "fine", "8 x NVIDIA H200, 151 GB each, driver 580.95, compute capability 9.0"),
        (Smi(rows=(ROW,) * 8), 8, 2, "note", "CUDA_VISIBLE_DEVICES leaves 2 of 8"),
        (Smi(rows=(ROW, ("NVIDIA A10", "24000", "580.95", "8.6"))), 2, 2, "note", "1 x NVIDIA A10, 25.2 GB"),
    ],
)
def test_gpus_without_torch(smi: Smi, devices: int, visible: int, verdict: str, words: str):
    check = check_gpus(smi, devices=devices, visible=visible)
    assert check.verdict == verdict and words in check.found


@pytest.mark.parametrize(
    ("tried", "devices", "visible", "verdict", "words"),
    [
        (Tried(facts=TORCH), 8, 8, "fine", "the driver serves CUDA 13.0, cuDNN 9.26.0, NCCL 2.30.7"),
        (Tried(facts=NO_CUDA), 0, 0, "absent", "on the CPU"),
        (Tried(facts=NO_CUDA), 8, 0, "note", "sees no GPU"),
        (Tried(facts={**NO_CUDA, "cuda_build": None}), 8, 8, "problem", "built without CUDA"),
        (
            Tried(facts={**NO_CUDA, "complaint": "too old", "driver_cuda": "11.4"}),
            8,
            8,
            "problem",
            "CUDA 11.4: too old",
        ),
        (Tried(failure="died of signal 11 (SIGSEGV)"), 8, 8, "problem", "signal 11"),
    ],
)
def test_torch_and_the_driver(tried: Tried, devices: int, visible: int, verdict: str, words: str):
    check = check_cuda(tried, devices=devices, visible=visible)
    assert check.verdict == verdict and words in check.found


def test_cudnn_before_version_9_was_numbered_otherwise():
    assert "cuDNN 8.9.7" in check_cuda(Tried(facts={**TORCH, "cudnn": 8907}), devices=1, visible=1).found


def verdicts(gpus: list[dict[str, Any]], *, has_bf16: bool = True, pairs: Any = ()) -> dict[str, str]:
    facts = {"gpus": gpus, "has_bf16": has_bf16, "cut_off_pairs": list(pairs)}
    return {check.name: check.verdict for check in gpu_checks(Tried(facts=facts))}


def test_each_gpus_memory_units_and_neighbours():
    assert verdicts([GPU, GPU]) == {"GPU memory": "fine", "bf16": "fine", "GPU to GPU": "fine"}
    assert verdicts([GPU, {**GPU, "free_bytes": 10**9}])["GPU memory"] == "note"
    assert verdicts([GPU, {**GPU, "capability": [7, 0]}], has_bf16=False)["bf16"] == "note"
    assert verdicts([GPU, GPU], pairs=[[0, 1], [1, 0]])["GPU to GPU"] == "note"
    assert "GPU to GPU" not in verdicts([GPU]) and verdicts([]) == {}
    assert [check.verdict for check in gpu_checks(Tried(failure="died"))] == ["problem"]


@pytest.mark.parametrize(
    ("change", "verdict", "remedy"),
    [
        ({}, "fine", ""),
        ({"error": 0.5}, "problem", "engine.precision=fp32"),
        ({"is_finite": False, "error": float("nan")}, "problem", "engine.precision=fp32"),
        ({"device": "cpu", "bf16_ms": 9.0}, "note", "engine.precision=fp32 is faster here"),
        ({"device": "cpu", "bf16_ms": 2.0}, "fine", ""),
    ],
)
def test_arithmetic(change: dict[str, Any], verdict: str, remedy: str):
    check = check_arithmetic(Tried(facts=ARITHMETIC | change))
    assert check.verdict == verdict and remedy in check.remedy


def test_arithmetic_that_kills_the_process():
    check = check_arithmetic(Tried(failure="died of signal 4 (SIGILL)"))
    assert check.verdict == "problem" and "signal 4" in check.found


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({}, "fine", "cuDNN is chosen (cudnn_generated_fort_native_sdpa_sm90_flash_fprop)"),
        ({"chosen": "flash"}, "note", "flash is chosen"),
        ({"chosen": "flash", "times_ms": {"cuDNN": 0.29, "flash": 0.3}}, "fine", "cuDNN 0.29 ms, flash 0.3 ms"),
        ({"chosen": "math"}, "note", "math is chosen"),
        ({"chosen": ""}, "note", "an unknown backend"),
        (
            {"device": "cpu", "chosen": "flash", "kernel": ""},
            "fine",
            "CPU: flash is chosen for 32 x 16 heads of 197 x 64",
        ),
    ],
)
def test_attention(change: dict[str, Any], verdict: str, words: str):
    check = check_attention(Tried(facts=ATTENTION | change))
    assert check.verdict == verdict and words in check.found


def test_decoding():
    facts = {"nvimgcodec": "", "gpu": "no JPEG could be decoded on the GPU", "simplejpeg": ""}
    fine = check_decoding(Tried(facts=facts), has_gpu=False)
    assert fine.verdict == "fine" and fine.found == "data.decoder can be nvimgcodec, simplejpeg, pillow"
    assert "gpu" not in check_decoding(Tried(facts=facts), has_gpu=True).found
    assert "gpu, pillow" in check_decoding(Tried(facts=facts | {"gpu": ""}), has_gpu=True).found
    note = check_decoding(Tried(facts=facts | {"nvimgcodec": "it is not installed"}), has_gpu=False)
    assert note.verdict == "note" and "it is not installed" in note.found
    assert check_decoding(Tried(failure="died"), has_gpu=False).verdict == "problem"


def test_imports():
    good = {f"import:{name}": Tried(facts={"seconds": 1.0, "version": "1"}) for name in LIBRARIES}
    assert [(check.verdict, check.found) for check in check_imports(good)] == [
        ("fine", f"{', '.join(LIBRARIES)} (in {len(LIBRARIES)}.0 s)")
    ]
    one = check_imports(good | {"import:deepspeed": Tried(failure="died of signal 11 (SIGSEGV)")})
    assert [(check.name, check.verdict) for check in one] == [("imports", "fine"), ("import deepspeed", "problem")]
    assert "deepspeed" not in one[0].found and "signal 11" in one[1].found
    none = check_imports({f"import:{name}": Tried(failure="no torch") for name in LIBRARIES})
    assert {check.verdict for check in none} == {"problem"} and len(none) == len(LIBRARIES)
