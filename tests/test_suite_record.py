"""`--suite-record` on made-up tests, `.ci/matrix` on results that it kept, and the first lines of records."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_unstable import Session

RECORDS = ROOT / "launch" / "bench" / "records"
TESTS = """
@pytest.fixture
def broken():
    raise RuntimeError
@pytest.mark.parametrize("number", range(5))
def test_passes(number):
    pass
def test_fails():
    assert False
def test_cannot_begin(broken):
    pass
def test_is_skipped():
    pytest.skip("not today")
def test_shaky():
    assert not first("shaky")
"""


def rows(record: str) -> dict[str, list[str]]:
    """First word of a line below the heading -> the others."""
    return {words[0]: words[1:] for words in map(str.split, record.splitlines()[3:])}


@pytest.mark.parametrize("processes", ["0", "2"])
def test_each_test_counts_once_in_its_room_and_in_all(processes: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    room = tmp_path / "tests" / "this" / "room" / "of_rooms"
    room.mkdir(parents=True)
    (room / "test_another.py").write_text("def test_it():\n    pass\n")
    record = tmp_path / "a" / "folder" / "record.txt"
    options = ("-n", processes, "-m", "not slow", f"--suite-record={record}")
    session = Session(tmp_path, TESTS, *options, plugins=("xdist", "tests.suite_record"))
    assert session.code == 1, session.output
    text = record.read_text()
    assert re.match(r"commit \w+( with changes)?, \d{4}-\d\d-\d\d, Python 3\.\S+, torch .*, \d+ cores", text)
    assert '-m "not slow"' in text
    found = {name: counts[:-1] for name, counts in rows(text).items()}
    assert found == {
        "room": ["passed", "failed", "unstable", "skipped"],
        "this/room": ["1", "0", "0", "0"],
        "tests": ["5", "2", "1", "1"],
        "all": ["6", "2", "1", "1"],
    }


@pytest.mark.parametrize("stop", ["raise KeyboardInterrupt", "pytest.exit('enough')"])
def test_a_session_that_was_stopped_leaves_no_record(stop: str, tmp_path: Path) -> None:
    record = tmp_path / "record.txt"
    tests = f"def test_stops():\n    {stop}\n"
    session = Session(tmp_path, tests, f"--suite-record={record}", plugins=("tests.suite_record",))
    assert session.code == 2 and not record.exists(), session.output


def matrix(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(folder / ".ci" / "matrix"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of the script alone, with a commit."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/matrix", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    for command in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "it"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_cell_that_has_ended_is_kept_and_one_that_cannot_run_stops_no_other(repository: Path) -> None:
    git = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout[:12]
    kept = repository / "build" / "matrix" / commit
    kept.mkdir(parents=True)
    for python, torch, failed in (("3.11", "2.15", 0), ("3.12", "2.11", 2)):
        (kept / f"{python}-{torch}.txt").write_text(
            f"commit {commit}, 2026-02-03, Python {python}.7, torch {torch}.0, torchvision 0.9, deepspeed 0.19.8, "
            f"2 cores (A (very) fast one, of two)\nwhat\n\nroom  passed\nmodel  9  9  9  9  9.9\n"
            f"all       90        {failed}         1         7      25.3\n"
        )
    done = matrix(repository, "3.11:2.15", "3.99:2.11", "3.12:2.11")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].split() == ["FAILED:", "3.99:2.11", "3.12:2.11"]
    assert "python3.99" in done.stdout
    table = (kept / "matrix.txt").read_text()
    assert table in done.stdout
    assert table.startswith(f"commit {commit}, 2026-02-03, 2 cores (A (very) fast one, of two)\n")
    assert [line.split() for line in table.splitlines() if line.startswith("3.")] == [
        ["3.11.7", "2.15.0", "0.9", "0.19.8", "90", "0", "1", "7", "25.3"],
        ["3.12.7", "2.11.0", "0.9", "0.19.8", "90", "2", "1", "7", "25.3"],
    ]
    assert matrix(repository, "3.11:2.15").returncode == 0


@pytest.mark.parametrize("cell", ["3.11", "2.15:3.11", "3.11:2.15:1", "all"])
def test_what_is_no_cell_is_a_mistake(cell: str, repository: Path) -> None:
    done = matrix(repository, cell)
    assert done.returncode == 2 and cell in done.stderr and len(done.stderr.splitlines()) == 1


def test_records_name_commits_without_changes() -> None:
    heads = ["\n".join(path.read_text(encoding="utf-8").splitlines()[:3]) for path in RECORDS.glob("*.txt")]
    named = [found for head in heads for found in re.findall(r"\bcommit (\w+)( with changes)?", head)]
    assert named
    assert [found for found in named if found[1] or not re.fullmatch("[0-9a-f]{7,40}", found[0])] == []
