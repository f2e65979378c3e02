"""`shardvit doctor` as a whole: text, JSON, exit code; and that nothing ends it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App

from shardvit.launch.commands.training import doctor as command
from shardvit.launch.commands.training.doctor import doctor, examine
from shardvit.launch.doctor.findings import Check, Diagnosis
from shardvit.pipeline.ranks.start_clock import StartClock

ROOT = Path(__file__).resolve().parents[3]


def report(*checks: Check, left_out: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis({"machine": checks[:1], "network": checks[1:]}, left_out=left_out, seconds=12.0)


FINE = Check("Python", "fine", "3.12.4")
NOTE = Check("limits", "note", "open files 1,024", "raise the open files (ulimit -n 4096)")
PROBLEM = Check("2 processes, gloo", "problem", "died of signal 11", "put the name into /etc/hosts")
ABSENT = Check("SLURM", "absent", "not on PATH")


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [
        ([FINE, ABSENT], 0, "doctor: all is well (12.0 s)"),
        ([FINE, NOTE, NOTE], 0, "doctor: 2 notes (12.0 s)"),
        ([FINE, NOTE, PROBLEM], 1, "doctor: 1 problem, 1 note (12.0 s)"),
    ],
)
def test_a_problem_alone_is_exit_code_1(checks: list[Check], code: int, last: str):
    made = report(*checks)
    assert made.exit_code == code and made.as_text().splitlines()[-1] == last
    assert made.as_json()["ok"] == (code == 0)


def test_the_text_shows_each_finding_with_its_remedy_below_it():
    assert report(FINE, PROBLEM).as_text().splitlines() == [
        "machine",
        "  fine     Python  3.12.4",
        "",
        "network",
        "  PROBLEM  2 processes, gloo  died of signal 11",
        "                              -> put the name into /etc/hosts",
        "",
        "doctor: 1 problem (12.0 s)",
    ]


def test_long_findings_are_wrapped():
    long = Check("GPUs", "note", "word " * 60, "word " * 60)
    assert max(map(len, report(FINE, long).as_text().splitlines())) <= 116


def test_what_was_left_out_is_said():
    made = report(FINE, left_out=("imports", "attention"))
    assert made.as_text().endswith("; --quick left out imports, attention")
    assert made.as_json()["left_out"] == ["imports", "attention"]


def test_json():
    content = report(FINE, PROBLEM, NOTE).as_json()
    assert (content["version"], content["problems"], content["notes"]) == (1, 1, 1)
    assert content["checks"][1] == {
        "subject": "network",
        "name": "2 processes, gloo",
        "verdict": "problem",
        "found": "died of signal 11",
        "remedy": "put the name into /etc/hosts",
    }


@pytest.mark.parametrize("verdict", ["note", "problem"])
def test_a_finding_that_says_nothing_of_what_to_do_is_our_own_mistake(verdict):
    with pytest.raises(AssertionError):
        Check("x", verdict, "found")


def test_quick_on_this_machine(tmp_path: Path):
    code = "import sys; from shardvit.launch.commands.training.doctor import doctor; from pathlib import Path\n"
    code += f"code = doctor(quick=True, runs=Path({str(tmp_path)!r}), as_json_text=True)\n"
    code += "assert not {'torch', 'deepspeed', 'mlflow'} & set(sys.modules); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    content = json.loads(done.stdout)
    assert done.returncode == (0 if content["ok"] else 1), done.stderr
    checks = {check["name"]: check for check in content["checks"]}
    assert {"Python", "cores", "/dev/shm", "packages", "GPUs", "MLflow"} <= set(checks)
    # What must be right wherever these tests run.
    for name in ("Python", "packages", "MLflow"):
        assert checks[name]["verdict"] == "fine", checks[name]
    assert not any("the doctor failed" in check["found"] for check in content["checks"])
    assert content["left_out"] and "arithmetic" not in checks and not list(tmp_path.iterdir())


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    asked: list[dict[str, object]] = []

    def look(**options: object) -> Diagnosis:
        asked.append(options)
        return report(FINE, PROBLEM)

    monkeypatch.setattr(command, "examine", look)
    app = App(name="shardvit", result_action="return_value")
    app.command(doctor)
    assert app(["doctor", "--json", "--runs", str(tmp_path)], exit_on_error=False) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == 1
    assert app(["doctor", "--quick"], exit_on_error=False) == 1
    assert capsys.readouterr().out.endswith("doctor: 1 problem (12.0 s)\n")
    assert [(each["depth"], each["runs"]) for each in asked] == [("all", tmp_path), ("quick", Path("runs"))]


def test_a_look_that_fails_is_a_finding_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def broken(**_: object) -> None:
        raise OSError("a file of /proc is odd")

    monkeypatch.setattr("shardvit.launch.doctor.machine.machine_checks", broken)
    made = examine(runs=tmp_path, depth="quick", clock=StartClock())
    assert list(made.checks) == ["machine", "libraries", "GPUs and arithmetic", "network"]
    [check] = made.checks["machine"]
    assert check.verdict == "problem" and check.found.endswith("OSError: a file of /proc is odd")
    assert made.exit_code == 1 and made.checks["libraries"]


def stand_in_for_children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every part fails; returns the backends as they are tried."""
    from shardvit.launch.doctor.trials import PARTS

    tried: list[str] = []
    monkeypatch.setattr(
        "shardvit.launch.doctor.trials.try_parts",
        lambda parts, environment, clock: {name: PARTS[name].failed("gone") for name in parts},
    )
    monkeypatch.setattr(
        "shardvit.launch.doctor.trials.try_all_reduce", lambda backend, environment: tried.append(backend) or [PROBLEM]
    )
    monkeypatch.setattr(
        "shardvit.launch.doctor.trials.full_reports", lambda environment: {"ds_report": "torch version .. 2.15"}
    )
    return tried


@pytest.mark.parametrize(("visible", "backends"), [(0, ["gloo"]), (1, ["gloo"]), (2, ["gloo", "nccl"])])
def test_gpus_are_counted_with_and_without_what_hides_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: int, backends: list[str]
):
    asked: list[tuple[int, int]] = []
    tried = stand_in_for_children(monkeypatch)
    monkeypatch.setattr(command, "num_gpus", lambda environ=None: visible if environ is None else 8)
    monkeypatch.setattr(
        "shardvit.launch.doctor.gpus.check_gpus", lambda devices, visible: asked.append((devices, visible)) or FINE
    )
    examine(runs=tmp_path, depth="all", clock=StartClock())
    assert asked == [(8, visible)] and tried == backends


def test_all_parts_are_tried_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without the children: whatever part is missing is told as a problem, never left out."""
    stand_in_for_children(monkeypatch)
    made = examine(runs=tmp_path, depth="all", clock=StartClock())
    problems = {check.name for checks in made.checks.values() for check in checks if check.found == "gone"}
    assert {"torch and CUDA", "arithmetic", "decoding", "import deepspeed", "import torchvision"} <= problems
    assert PROBLEM in made.checks["network"] and made.left_out == ()
    assert made.as_text().startswith("ds_report\n  torch version .. 2.15\n\nmachine")
    assert made.as_json()["reports"] == {"ds_report": "torch version .. 2.15"}


def test_what_can_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    stand_in_for_children(monkeypatch)
    results = {"import:timm": [], "import:mlflow": [], "import:deepspeed": [PROBLEM]}
    monkeypatch.setattr("shardvit.launch.doctor.trials.try_parts", lambda parts, environment, clock: results)
    made = examine(runs=tmp_path, depth="all", clock=StartClock())
    assert Check("imports", "fine", "timm, mlflow") in made.checks["libraries"]
    assert PROBLEM in made.checks["libraries"]
