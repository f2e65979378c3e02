"""What is tried in real processes: whatever a part does to its child, the other parts are tried all the same."""

import os
import sys
from pathlib import Path

import pytest

from shardvit.launch.doctor import child
from shardvit.launch.doctor import trials as probe
from shardvit.launch.doctor.findings import Check
from shardvit.launch.doctor.trials import Part, judge_decoders, try_all_reduce, try_decoders, try_import, try_parts
from shardvit.launch.local.env import without_place
from shardvit.pipeline.ranks.start_clock import StartClock
from tests.launch.clock import Clock

STAND_IN = """
import os, sys, time
from shardvit.launch.doctor.findings import Check
from shardvit.launch.doctor.trials import PARTS, Part, main

def crash(): os.kill(os.getpid(), 11)
def warn(): print("noise", file=sys.stderr); return []
def abort(): print("assertion failed", file=sys.stderr, flush=True); os.abort()
def hang(): open("hangs", "w").close(); time.sleep(600)
def leave(): os._exit(5)
def wait():
    while not os.path.exists("told"): time.sleep(0.01)
    return []
def refuse(): raise RuntimeError("no such device\\nand more")
def good(): return [Check("it", "fine", "works")]

for each in (good, crash, hang, leave, wait, refuse, warn, abort):
    PARTS[each.__name__] = Part(each.__name__, each, "what to do")
sys.exit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).resolve().parents[3]


def tried(*parts: str, limit_seconds: float = 240) -> dict[str, list[Check]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STAND_IN]
    return try_parts(parts, environment=environment, command=command, limit_seconds=limit_seconds)


@pytest.fixture(autouse=True)
def parts_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "good",
        "crash",
        "hang",
        "leave",
        "wait",
        "refuse",
        "warn",
        "abort",
        "import:json",
        "import:no_such_module",
    ):
        monkeypatch.setitem(probe.PARTS, name, Part(name, list, "what to do"))


def failed(name: str, found: str) -> list[Check]:
    return [Check(name, "problem", found, "what to do")]


GOOD = [Check("it", "fine", "works")]


def test_what_is_tried_is_told_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    told: list[tuple[str, str]] = []

    class Clock(StartClock):
        def set_status(self, part: str, far: str = "") -> None:
            told.append((part, far))
            Path("told").touch()

    command = [sys.executable, "-c", STAND_IN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = try_parts(("wait", "good"), environment=environment, command=command, limit_seconds=240, clock=Clock())
    assert told[0] == ("trying wait", "1 of 2") and found["wait"] == []


def test_the_parts_after_one_that_crashes_get_a_child_of_their_own():
    found = tried("good", "crash", "refuse", "leave")
    assert found["good"] == GOOD
    assert found["crash"] == failed("crash", "died of signal 11 (SIGSEGV)")
    assert found["refuse"] == failed("refuse", "RuntimeError: no such device")
    assert found["leave"] == failed("leave", "ended with exit code 5")


def test_what_an_earlier_part_wrote_is_not_taken_for_the_reason():
    found = tried("warn", "crash", "abort")
    assert found["warn"] == []
    assert found["crash"] == failed("crash", "died of signal 11 (SIGSEGV)")
    assert found["abort"] == failed("abort", "died of signal 6 (SIGABRT): assertion failed")


def test_a_part_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "time", Clock(tmp_path / "hangs"))
    found = tried("hang", "good", limit_seconds=600)
    assert found == {"hang": failed("hang", "did not end within 600 seconds and was killed"), "good": GOOD}


def test_a_child_that_cannot_even_begin_is_not_tried_again_and_again():
    command = [sys.executable, "-c", "raise SystemExit('broken')"]
    found = try_parts(("good", "warn"), environment=os.environ, command=command)
    assert found == {name: failed(name, "ended with exit code 1: broken") for name in ("good", "warn")}


def test_an_import(monkeypatch: pytest.MonkeyPatch):
    assert list(try_import("json")) == []
    with pytest.raises(ModuleNotFoundError):
        try_import("no_such_module")


def test_decoders():
    fine = judge_decoders({"nvimgcodec": "", "simplejpeg": ""}, gpu=None)
    assert (fine.verdict, fine.found) == ("fine", "data.decoder can be nvimgcodec, simplejpeg, pillow")
    assert "gpu, pillow" in judge_decoders({"nvimgcodec": "", "simplejpeg": ""}, gpu="").found
    assert "gpu" not in judge_decoders({"nvimgcodec": "", "simplejpeg": ""}, gpu="none decoded").found
    note = judge_decoders({"nvimgcodec": "it is not installed", "simplejpeg": ""}, gpu=None)
    assert note.verdict == "note" and "it is not installed" in note.found and "can be simplejpeg" in note.found
    [here] = try_decoders()
    assert here.verdict == "fine"


def run_two(code: str, *, backend: probe.Backend = "gloo", limit_seconds: float = 240) -> Check:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "7", "WORLD_SIZE": "64", "SLURM_PROCID": "7"}
    command = [sys.executable, "-c", code]
    [check] = try_all_reduce(
        backend, environment=without_place(environment), command=command, limit_seconds=limit_seconds
    )
    return check


def test_two_real_processes():
    environment = {**without_place(), "PYTHONPATH": str(ROOT)}
    [check] = try_all_reduce("gloo", environment=environment, limit_seconds=240)
    assert check.verdict == "fine" and check.name == "2 processes, gloo", check
    assert "all-reduce of one number" in check.found and "B/s" in check.found


def test_they_are_told_their_place_as_shardvit_run_does_it():
    check = run_two(
        "import os; from shardvit.launch.local.env import read_place; place = read_place()\n"
        "assert place.world_size == place.local_world_size == 2 and place.rank == place.local_rank\n"
        "assert os.listdir(place.rendezvous) == [] or place.rank == 1\n"
        "from shardvit.launch.doctor.trials import _tell\n"
        "_tell('gloo', checks=[{'name': 'two', 'verdict': 'fine', 'found': 'fast', 'remedy': ''}])"
    )
    assert check == Check("two", "fine", "fast")


def test_a_process_that_crashes_is_named_and_not_the_one_that_waited():
    check = run_two("import os, time; os.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else time.sleep(600)")
    assert check.verdict == "problem" and "process 1: died of signal 11 (SIGSEGV)" in check.found
    assert "/etc/hosts" in check.remedy


def test_full_reports_are_what_the_tools_print_or_how_they_died(monkeypatch: pytest.MonkeyPatch):
    def run(commands: list[list[str]], **more: object) -> list[child.Answer]:
        crashed = commands[0][-1] == "deepspeed.env_report"
        return [child.Answer(-11 if crashed else 0, "PyTorch version: 2", "", 120)]

    monkeypatch.setattr(probe, "run_children", run)
    said = probe.full_reports(environment={})
    assert said["torch.utils.collect_env"] == "PyTorch version: 2" and "SIGSEGV" in said["ds_report"]


def test_processes_that_hang():
    check = run_two("import time; time.sleep(600)", backend="nccl", limit_seconds=3)
    assert check.verdict == "problem" and "did not end within 3 seconds" in check.found
    assert "NCCL_DEBUG=INFO" in check.remedy


def test_a_wrong_sum_is_a_problem():
    check = run_two(
        "import sys; from shardvit.launch.doctor.trials import _tell\n"
        "_tell('gloo', error='ArithmeticError: the sum came out as 2.0'); sys.exit(1)"
    )
    assert check.verdict == "problem" and "the sum came out as 2.0" in check.found
