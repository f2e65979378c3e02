"""The verdicts on GPUs, torch and arithmetic, from facts that the test makes up; and arithmetic on this device."""

from typing import Any

import pytest

from shardvit.launch.doctor.child import Answer
from shardvit.launch.doctor.gpus import (
    check_gpus,
    judge_arithmetic,
    judge_memory,
    judge_torch,
    try_arithmetic,
    try_torch,
)

ROW = "NVIDIA H200, 143771 MiB, 580.95, 9.0\n"


@pytest.mark.parametrize(
    ("answer", "devices", "visible", "verdict", "words"),
    [
        (Answer(127, "", "no such command", 20), 0, 0, "absent", "CPU"),
        (Answer(9, "NVIDIA-SMI has failed\n", "", 20), 8, 8, "problem", "NVIDIA-SMI has failed"),
        (Answer(None, "", "", 20), 8, 8, "problem", "did not end within 20 seconds"),
        (Answer(0, "No devices were found\n", "", 20), 8, 8, "problem", "/dev has 8"),
        (Answer(0, ROW * 8, "", 20), 8, 8, "fine", "8 x NVIDIA H200, 143771 MiB each, driver 580.95, compute cap"),
        (Answer(0, ROW * 8, "", 20), 8, 2, "note", "CUDA_VISIBLE_DEVICES leaves 2 of 8"),
        (Answer(0, ROW + "NVIDIA A10, 24000 MiB, 580.95, 8.6\n", "", 20), 2, 2, "note", "1 x NVIDIA A10"),
    ],
)
def test_gpus_without_torch(answer: Answer, devices: int, visible: int, verdict: str, words: str):
    check = check_gpus(devices=devices, visible=visible, run=lambda command, limit_seconds: answer)
    assert check.verdict == verdict and words in check.found


@pytest.mark.parametrize(
    ("has_cuda", "devices", "visible", "complaint", "verdict", "words"),
    [
        (True, 8, 8, "", "fine", "torch 2.15.0"),
        (False, 0, 0, "", "absent", "on the CPU"),
        (False, 8, 0, "", "note", "sees no GPU"),
        (False, 8, 8, "it was built without CUDA", "problem", "built without CUDA"),
        (False, 8, 8, "The NVIDIA driver is too old (found version 11040)", "problem", "11040"),
    ],
)
def test_torch_and_the_driver(has_cuda: bool, devices: int, visible: int, complaint: str, verdict: str, words: str):
    check = judge_torch("torch 2.15.0", complaint=complaint, has_cuda=has_cuda, devices=devices, visible=visible)
    assert check.verdict == verdict and words in check.found


def test_each_gpus_memory():
    assert judge_memory([(149, 150), (149, 150)]).verdict == "fine"
    assert judge_memory([(149, 150), (1, 150)]).verdict == "note"


@pytest.mark.parametrize(
    ("capability", "verdict"), [("7.5", "note"), ("8.0", "fine"), ("10.3", "fine"), ("[N/A]", "fine")]
)
def test_gpus_without_bf16_units(capability: str, verdict: str):
    answer = Answer(0, ROW.replace("9.0", capability), "", 20)
    check = check_gpus(devices=1, visible=1, run=lambda command, limit_seconds: answer)
    assert check.verdict == verdict and ("fp16" in check.remedy) == (verdict == "note")


@pytest.mark.parametrize(
    ("change", "verdict", "remedy"),
    [
        ({}, "fine", ""),
        ({"error": 0.5}, "problem", "engine.precision=fp32"),
        ({"error": float("nan")}, "problem", "engine.precision=fp32"),
        ({"device": "cpu", "bf16_ms": 9.0}, "note", "engine.precision=fp32 is faster here"),
        ({"device": "cpu", "bf16_ms": 2.0}, "fine", ""),
    ],
)
def test_arithmetic(change: dict[str, Any], verdict: str, remedy: str):
    check = judge_arithmetic(**{"device": "cuda", "error": 0.012, "bf16_ms": 1.0, "fp32_ms": 4.0, **change})
    assert check.verdict == verdict and remedy in check.remedy


def test_arithmetic_and_torch_on_this_device():
    [check] = try_arithmetic()
    assert check.verdict in ("fine", "note") and "gradients in bf16 within" in check.found
    assert try_torch()[0].verdict in ("fine", "absent")
