"""One run folder, one run: exclusive between processes, named, and free again when its owner dies."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_shards.errors import UserError
from launch.lock import locked

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from launch.lock import locked
with locked(Path(sys.argv[1]), what="it"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a" / ".run.lock"


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it reads a line."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_process_is_refused_and_told_who_holds_it(path: Path, owner: subprocess.Popen[str]):
    said = rf"run a is in use by process {owner.pid} on .*{path}.*wait for it"
    with pytest.raises(UserError, match=said), locked(path, what="run a"):
        pytest.fail("two owners")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_free_as_soon_as_its_owner_is_dead(path: Path, owner: subprocess.Popen[str], number: signal.Signals):
    owner.send_signal(number)
    owner.wait()
    with locked(path, what="run a"):
        pass


def test_waiting_for_the_owner(path: Path, owner: subprocess.Popen[str]):
    begin = time.monotonic()
    with pytest.raises(UserError), locked(path, what="run a", wait_seconds=0.5):
        pass
    assert time.monotonic() - begin >= 0.5
    assert owner.stdin
    owner.stdin.write("\n")
    owner.stdin.flush()
    with locked(path, what="run a", wait_seconds=20):
        pass


def test_it_is_let_go_after_an_error_and_the_file_stays(path: Path):
    with contextlib.suppress(KeyError), locked(path, what="it"):
        raise KeyError
    assert path.exists()  # removing it would let two owners in
    with locked(path, what="it"), pytest.raises(UserError), locked(path, what="it"):
        pytest.fail("two owners in one process")
    with locked(path, what="it"):
        pass


def test_children_do_not_inherit_it(path: Path):
    """A launcher that outlives `shardvit run` must not keep the run folder locked."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with locked(path, what="it"):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
        assert child.stdout and child.stdout.readline() == b"\n"  # it runs, so what it does not inherit is closed
    with child, locked(path, what="it"):
        child.kill()
