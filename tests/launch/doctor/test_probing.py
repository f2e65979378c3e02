"""Whatever a part does to the child, it is that part's finding, and the others are tried all the same."""

import os
import sys
from pathlib import Path

import pytest

from launch.doctor import child
from launch.doctor.probing import Tried, try_parts
from tests.launch.clock import Clock

STAND_IN = """
import os, sys, time
from launch.doctor.probe import _PARTS, main

def crash(): os.kill(os.getpid(), 11)
def warn(): print("noise", file=sys.stderr); return {}
def abort(): print("assertion failed", file=sys.stderr, flush=True); os.abort()
def hang(): open("hangs", "w").close(); time.sleep(600)
def leave(): os._exit(5)
def refuse(): raise RuntimeError("no such device\\nand more")

_PARTS.update(good=lambda: {"x": 1}, crash=crash, hang=hang, leave=leave, refuse=refuse, warn=warn, abort=abort)
sys.exit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).resolve().parents[3]


def tried(*parts: str, limit_seconds: float = 240) -> dict[str, Tried]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STAND_IN]
    return try_parts(parts, environment=environment, command=command, limit_seconds=limit_seconds)


def test_the_parts_after_one_that_crashes_get_a_child_of_their_own():
    found = tried("good", "crash", "refuse", "leave", "import:json", "import:no_such_module")
    assert found["good"] == Tried(facts={"x": 1})
    assert found["crash"].failure.startswith("died of signal 11 (SIGSEGV)")
    assert found["refuse"].failure == "RuntimeError: no such device"
    assert found["leave"].failure == "ended with exit code 5"
    assert found["import:json"].facts is not None and found["import:json"].facts["seconds"] >= 0
    assert found["import:no_such_module"].failure.startswith("ModuleNotFoundError")


def test_what_an_earlier_part_wrote_is_not_taken_for_the_reason():
    found = tried("warn", "crash", "abort")
    assert found["warn"].facts == {}
    assert found["crash"].failure == "died of signal 11 (SIGSEGV)"
    assert found["abort"].failure == "died of signal 6 (SIGABRT): assertion failed"


def test_a_part_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "time", Clock(tmp_path / "hangs"))
    found = tried("hang", "good", limit_seconds=600)
    assert found["hang"].failure == "did not end within 600 seconds and was killed"
    assert found["good"].facts == {"x": 1}


def test_a_child_that_cannot_even_begin_is_not_tried_again_and_again():
    found = try_parts(("a", "b"), environment=os.environ, command=[sys.executable, "-c", "raise SystemExit('broken')"])
    assert found == dict.fromkeys(("a", "b"), Tried(failure="ended with exit code 1: broken"))


@pytest.mark.parametrize("part", ["torch", "gpus", "decoders"])
def test_the_real_parts_on_this_machine(part: str):
    from launch.doctor.probe import _PARTS

    import_free_keys = {
        "torch": {"version", "cuda_build", "has_cuda", "complaint", "cudnn", "nccl", "driver_cuda"},
        "gpus": {"gpus", "has_bf16", "cut_off_pairs"},
        "decoders": {"nvimgcodec", "gpu", "simplejpeg"},
    }
    assert set(_PARTS[part]()) == import_free_keys[part]


def test_arithmetic_and_attention_on_this_device():
    from launch.doctor.gpus import check_arithmetic, check_attention
    from launch.doctor.probe import arithmetic_facts, attention_facts

    arithmetic, attention = arithmetic_facts(), attention_facts()
    assert 0 < arithmetic["error"] < 0.1 and arithmetic["is_finite"]
    assert check_arithmetic(Tried(facts=arithmetic)).verdict in ("fine", "note")
    # A fused kernel has been torch's choice at this shape on CPUs and on all GPUs that have bf16.
    assert attention["chosen"] in ("flash", "cuDNN", "efficient") and "math" in attention["times_ms"]
    assert "197 x 64" in check_attention(Tried(facts=attention)).found
