"""The driver of `make gpu` on made-up tests that fail, crash and hang in processes of their own; and its report."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardvit.launch.bench import acceptance
from shardvit.launch.bench.acceptance_processes import LineGroup, environment_for, lines_of
from shardvit.launch.bench.acceptance_report import AcceptanceLine, AcceptanceReport, read_report
from shardvit.launch.bench.gpu_report import GpuResults, Machine
from tests.test_repository import ROOT

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device")
"""
BEFORE = """
import ctypes, os, time, pytest
def test_before(record_property):
    record_property("difference", "1e-6")
"""
FAULTS = {
    "fails": "assert 1 == 2, 'one is not two'",
    "crashes": "ctypes.string_at(0)",
    "exits": "os._exit(9)",
    "hangs": "time.sleep(10**6)",
    "hangs_again": "time.sleep(10**6)",
}
AFTER = """
def test_skipped():
    pytest.skip("no decoder here")
def test_after():
    pass
"""
HANG_SECONDS = 40.0  # of which a paused machine may take some


def ran(folder: Path, *faults: str, **more: float) -> dict[str, AcceptanceLine]:
    """The lines by the names of the tests."""
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    file = folder / "test_made_up.py"
    bodies = [f"def test_{name}():\n    {FAULTS[name]}\n" for name in faults]
    file.write_text(BEFORE + "".join(bodies) + AFTER, encoding="utf-8")
    group = LineGroup("suite", "Made up", (file.name,), options=(), root=folder)
    limits = {"line_seconds": HANG_SECONDS if "hangs" in faults else 240.0, **more}
    found = list(lines_of(group, device="cpu", environment=environment_for("cpu"), **limits))
    names = [line.name.rpartition("::test_")[2] for line in found]
    assert len({*names}) == len(names), "a line came twice"
    return dict(zip(names, found, strict=True))


def assert_others_stand(lines: dict[str, AcceptanceLine]) -> None:
    assert lines["before"].status == lines["after"].status == "pass"
    assert (lines["skipped"].status, lines["skipped"].reason) == ("not run", "no decoder here")
    assert "1e-6" in lines["before"].shown


def test_a_line_that_fails_or_crashes_leaves_the_others(tmp_path: Path):
    lines = ran(tmp_path, "fails", "crashes", "exits")
    assert_others_stand(lines)
    assert len(lines) == 6 and [lines[name].status for name in ("fails", "crashes", "exits")] == ["fail"] * 3
    assert "one is not two" in lines["fails"].reason and "SIGSEGV" in lines["crashes"].reason
    assert "test_crashes" in lines["crashes"].details, "where it crashed"
    assert "exit code 9" in lines["exits"].reason


@pytest.mark.slow  # it waits for what hangs
def test_a_line_that_hangs_is_killed_with_its_stack_and_leaves_the_others(tmp_path: Path):
    lines = ran(tmp_path, "hangs")
    assert_others_stand(lines)
    assert lines["hangs"].status == "fail" and "hang" in lines["hangs"].reason
    assert "test_hangs" in lines["hangs"].details, "where it hung"


@pytest.mark.slow
def test_after_a_second_hang_other_groups_have_their_time(tmp_path: Path):
    lines = ran(tmp_path, "hangs", "hangs_again", "fails")
    assert [lines[name].status for name in ("before", "hangs", "hangs_again")] == ["pass", "fail", "fail"]
    assert [lines[name].status for name in ("fails", "skipped", "after")] == ["not run"] * 3


def test_after_the_deadline_nothing_runs_and_nothing_fails(tmp_path: Path):
    lines = ran(tmp_path, "fails", deadline=time.monotonic())
    assert [line.status for line in lines.values()] == ["not run"]


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path):
    (tmp_path / "test_broken.py").write_text("import no_such_module\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_whole.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    group = LineGroup("suite", "Made up", ("test_broken.py", "test_whole.py"), options=(), root=tmp_path)
    found = list(lines_of(group, device="cpu", environment=environment_for("cpu"), line_seconds=240))
    assert sorted(line.status for line in found) == ["fail", "pass"]
    assert any("no_such_module" in line.reason for line in found)


def test_what_has_passed_is_not_run_again(tmp_path: Path):
    first = ran(tmp_path, "fails")
    group = LineGroup("suite", "Made up", ("test_made_up.py",), options=(), root=tmp_path)
    passed = [line.name for line in first.values() if line.status == "pass"]
    again = list(lines_of(group, device="cpu", environment=environment_for("cpu"), line_seconds=240, without=passed))
    assert sorted(line.status for line in again) == ["fail", "not run"]


def test_it_starts_without_a_torch_that_does():
    script = "import sys; sys.modules['torch'] = None; import shardvit.launch.bench.acceptance"
    subprocess.run([sys.executable, "-c", script], env=environment_for("cpu"), check=True)


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("fail", 1)])
def test_the_exit_code_is_of_the_parts_that_ran(status, code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    earlier = AcceptanceReport("cpu", "2026-01-01", "abc", {})
    earlier.put(AcceptanceLine("suite", "Engines", "f.py::test_c", "fail", "one is not two"))
    earlier.write(tmp_path / "r.json")
    monkeypatch.setattr(acceptance, "ROOT", ROOT)  # an installed package has no tests beside it
    monkeypatch.setattr(acceptance, "_facts", lambda device: {})
    monkeypatch.setattr(acceptance.signal, "signal", lambda *arguments: None)
    monkeypatch.setitem(acceptance._RUN, "demo", lambda setting: iter([AcceptanceLine("demo", "Demo", "it", status)]))
    options = ["--device", "cpu", "--only", "demo", "--out", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", ["acceptance", *options])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    assert ended.value.code == code
    lines = read_report(tmp_path / "r.json").lines
    assert {line.part: line.status for line in lines} == {"suite": "fail", "demo": status}


def test_a_missing_compiler_or_header_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(acceptance.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "cc")
    assert not acceptance.compiles_launchers()
    (tmp_path / "Python.h").touch()
    assert acceptance.compiles_launchers()
    monkeypatch.delenv("CC")
    assert not acceptance.compiles_launchers()


def test_every_file_of_the_suite_has_a_group():
    named = {path for group in acceptance.GROUPS for path in group.paths}
    files = {path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text("utf-8")}
    names = {str(path.relative_to(ROOT)) for path in files} - {"tests/launch/bench/test_acceptance.py"}
    assert named == names and len(names) > 10


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("group", acceptance.GROUPS, ids=lambda group: group.title)
def test_the_suite_passes_on_the_cpu(group: LineGroup):
    lines = list(lines_of(group, device="cpu", environment=environment_for("cpu"), line_seconds=900))
    assert {line.words: line.reason for line in lines if line.status == "fail"} == {}
    needs_a_gpu = "tests/gpu/test_memory.py" in group.paths or len(group.paths) > 1
    assert any(line.status == "pass" for line in lines) != needs_a_gpu


def test_the_report_keeps_other_parts_and_the_page_shows_every_reason(tmp_path: Path):
    report = AcceptanceReport("cpu", "2026-01-01", "abc", {"Python": "3.11"}, tables={"bench": "a <table>"})
    report.put(AcceptanceLine("suite", "Engines", "f.py::test_a_b[ZeRO 1]", "pass", shown="difference 1e-7"))
    report.put(AcceptanceLine("suite", "Engines", "f.py::test_c", "fail", "one is not two", details="line 3 <of> it"))
    report.put(AcceptanceLine("nccl", "Two", "two GPUs", "not run", "there is one GPU"))
    report.put(AcceptanceLine("suite", "Engines", "f.py::test_c", "fail", "two is not three", details="line 4"))
    report.write(tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == report and len(report.lines) == 3
    report.write_page(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    for shown in (
        "a b: ZeRO 1",
        "difference 1e-7",
        "two is not three",
        "line 4",
        "there is one GPU",
        "a &lt;table&gt;",
    ):
        assert shown in page, shown
    assert "one is not two" not in page


def contender(name: str, *, loss: float = 7.0, failure: str | None = None) -> dict[str, object]:
    measured = {"block_ms": [100.0], "losses": {"1": loss, "10": loss - 1}, "peak_allocated_bytes": 1}
    row = {"contender": name, "size": "L/16@224 b256", "failure": failure}
    return {**row, "measured": None if failure else measured}


def test_contenders_and_bounds_are_lines():
    outcomes = [
        contender("bar"),
        contender("ours"),
        contender("timm", loss=9.0),
        contender("trainer", failure="not installed: transformers"),  # as `gpu_contenders.measure` says it
        contender("deepspeed", failure="not run: the time was over"),
        contender("ours-2", failure="ended after 40 s"),
    ]
    ceilings = {"failure": "ended after 60 s"}
    first, *lines = acceptance.bench_lines(GpuResults(Machine("NVIDIA H200", {}), ceilings, outcomes))
    assert (first.name, first.status, first.reason) == ("ceilings", "fail", "ended after 60 s")
    by_contender = {line.name.split()[1].rstrip(","): line for line in lines if line.group == "Contenders"}
    statuses = {name: line.status for name, line in by_contender.items()}
    assert statuses == {
        **{"bar": "pass", "ours": "pass", "timm": "fail"},
        **{"trainer": "not run", "deepspeed": "not run", "ours-2": "fail"},
    }
    bounds = {line.name: line.status for line in lines if line.group == "Our bounds"}
    assert bounds["L/16@224 b256: images/s to bar's"] == "pass"
    json.dumps([line.__dict__ for line in lines])
