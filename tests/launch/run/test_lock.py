"""One run folder, one run: exclusive between processes and machines, named, and free again when its owner dies."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.run import lock
from shardvit.launch.run.lock import locked

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 240.0
# A stand-in for a machine: its name, the start of its kernel, and how its file system locks. "everywhere" is a good
# one; "machine" keeps locks to each machine, and each process here counts as one; "none" has no locks.
MACHINE = """
import errno, fcntl, os, sys, time
from dataclasses import replace
from pathlib import Path
from shardvit.launch.run import lock
from shardvit.launch.run.lock import locked
lock._BEAT_SECONDS, lock._POLL_SECONDS = 0.1, 0.02
def on(machine, locks):
    real = lock.this_process
    if machine != "here":
        lock.this_process = lambda: replace(real(), host=machine, machine=machine)
    def flock(descriptor, how):
        if locks == "none":
            raise OSError(errno.ENOLCK, "No locks available")
    if locks != "everywhere":
        lock.fcntl = type("fcntl", (), {"flock": staticmethod(flock), "LOCK_EX": 2, "LOCK_NB": 4})
"""
HOLD = (
    MACHINE
    + """
on(*sys.argv[2:4])
with locked(Path(sys.argv[1]), what="it"):
    print("held", flush=True)
    sys.stdin.readline()
"""
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a" / ".run.lock"


@contextlib.contextmanager
def held(path: Path, *, machine: str = "here", locks: str = "everywhere") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it reads a line."""
    command = [sys.executable, "-c", HOLD, str(path), machine, locks]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    with held(path) as process:
        yield process


@pytest.fixture
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the file system locks, for this process; see MACHINE."""

    def flock(descriptor: int, how: int) -> None:
        if request.param == "none":
            raise OSError(errno.ENOLCK, "No locks available")

    if request.param != "everywhere":
        monkeypatch.setattr(lock.fcntl, "flock", flock)
    for name, seconds in (("BEAT", 0.1), ("WATCH", 0.5), ("BEGIN", 0.5), ("POLL", 0.02)):
        monkeypatch.setattr(lock, f"_{name}_SECONDS", seconds)
    return request.param


@pytest.fixture
def _patient(locks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a living owner, which may be slow: it is watched until it counts on. A dead one would be watched for long."""
    monkeypatch.setattr(lock, "_WATCH_SECONDS", PATIENCE_SECONDS)


def test_a_hard_linked_copy_and_its_original_do_not_lock_one_another(path: Path):
    """Whoever waited for the file that they shared finds the new one."""
    with locked(path, what="the original"):
        pass
    copy = path.parents[1] / "copy" / path.name
    subprocess.run(["cp", "-rl", path.parent, copy.parent], check=True)
    with held(copy), locked(path, what="the original"):
        assert not copy.samefile(path)
        with pytest.raises(UserError, match="in use"), locked(copy, what="the copy"):
            pass
    waiting = os.open(path, os.O_RDWR)
    os.link(path, path.with_name("shared"))
    with locked(path, what="the original"):
        assert not os.path.samestat(os.fstat(waiting), path.stat())
        assert not lock._is_own(path, waiting)
    os.close(waiting)


every_file_system = pytest.mark.parametrize("locks", ["everywhere", "machine", "none"], indirect=True)
weak_file_system = pytest.mark.parametrize("locks", ["machine", "none"], indirect=True)


def test_waiting_for_the_owner(path: Path, owner: subprocess.Popen[str]):
    begin = time.monotonic()
    with pytest.raises(UserError), locked(path, what="run a", wait_seconds=0.5):
        pass
    assert time.monotonic() - begin >= 0.5
    assert owner.stdin
    owner.stdin.write("\n")
    owner.stdin.flush()
    with locked(path, what="run a", wait_seconds=PATIENCE_SECONDS):
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


def refused(path: Path) -> str:
    """Why the lock cannot be had."""
    with pytest.raises(UserError) as caught, locked(path, what="run a"):
        pytest.fail("two owners")
    return str(caught.value)


@weak_file_system
@pytest.mark.usefixtures("_patient")
def test_a_living_owner_on_another_machine_is_found_without_the_kernels_help(path: Path, locks: str):
    with held(path, machine="node7", locks=locks) as owner:
        assert f"run a is in use by process {owner.pid} on node7" in refused(path)
        assert owner.stdin
        owner.stdin.write("\n")
        owner.stdin.flush()
        owner.wait()
        with locked(path, what="run a", say=pytest.fail):  # it let go: nothing to watch for
            pass


@every_file_system
def test_a_dead_owner_on_another_machine_is_watched_and_followed(path: Path, locks: str):
    with held(path, machine="node7", locks=locks) as owner:
        owner.kill()
        owner.wait()
    said: list[str] = []
    with locked(path, what="run a", say=said.append):
        assert len(said) == 2 and f"process {owner.pid} on node7" in said[0] and "taking over" in said[1]
        if locks == "none":
            assert f"process {os.getpid()} on" in refused(path)
    with locked(path, what="run a", say=pytest.fail):
        pass
    assert len(list(path.parent.iterdir())) == 2  # the lock and one claim, however often


@every_file_system
def test_a_dead_owner_on_this_machine_is_followed_at_once(path: Path, locks: str):
    with held(path, locks=locks) as owner:
        owner.kill()
        owner.wait()
    with locked(path, what="run a", say=pytest.fail):
        pass


@pytest.mark.parametrize("locks", ["everywhere", "none"], indirect=True)
def test_a_living_owner_on_this_machine_is_found(path: Path, locks: str):
    with held(path, locks=locks) as owner:
        assert re.search(rf"run a is in use by process {owner.pid} on .*{path}.*wait for it", refused(path))


@pytest.mark.parametrize("locks", ["none"], indirect=True)
def test_another_process_with_the_dead_ones_number_is_not_taken_for_it(
    path: Path, locks: str, monkeypatch: pytest.MonkeyPatch
):
    with held(path, locks=locks) as owner:
        owner.kill()
        owner.wait()
    started = lock.highest_claim(path).owner
    assert started
    monkeypatch.setattr(lock, "process_started", lambda pid: started.started + 1)
    with locked(path, what="run a", say=pytest.fail):
        pass


@weak_file_system
def test_a_claim_that_nobody_filled_is_followed(path: Path, locks: str):
    """Of a process that was killed, or found the disk full, between making it and writing to it."""
    path.parent.mkdir(parents=True)
    path.with_name(".run.lock.7").touch()
    said: list[str] = []
    with locked(path, what="run a", say=said.append):
        assert "could not begin" in said[0]
    assert {file.name for file in path.parent.iterdir()} == {".run.lock", ".run.lock.8"}


@weak_file_system
@pytest.mark.usefixtures("_patient")
def test_a_newcomer_that_looked_long_ago_does_not_slip_in_below_the_owner(
    path: Path, locks: str, monkeypatch: pytest.MonkeyPatch
):
    """It looked when there was no claim; meanwhile two others came, and the first one's claim was cleared away."""
    with held(path, machine="node7", locks=locks) as first:
        assert first.stdin
        first.stdin.write("\n")
        first.stdin.flush()
        first.wait()
    with held(path, machine="node7", locks=locks):
        seen, real = [lock.Claim(0, "")], lock.highest_claim
        monkeypatch.setattr(lock, "highest_claim", lambda path: seen.pop() if seen else real(path))
        assert "on node7" in refused(path) and not seen
        assert {file.name for file in path.parent.iterdir()} == {".run.lock", ".run.lock.2"}


RACE = (
    MACHINE
    + """
folder, machine, locks = Path(sys.argv[1]), *sys.argv[2:4]
on(machine, locks)
watch, lock._BEGIN_SECONDS = lock._make_sure_it_is_dead, 240
def watch_by_machine(found, **more):
    # However slow the disk is, who is alive is not taken for dead; node0 alone is dead.
    lock._WATCH_SECONDS = 0.5 if found.owner and found.owner.machine == "node0" else 240
    watch(found, **more)
lock._make_sure_it_is_dead = watch_by_machine
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 400
while time.monotonic() < end:
    try:
        with locked(folder / "lock", what="it", say=lambda text: None):
            os.mkdir(folder / "inside")  # fails if somebody else is inside
            time.sleep(0.01)
            os.rmdir(folder / "inside")
            print("won", flush=True)
            break
    except lock.UserError:
        time.sleep(0.01)
"""
)


@pytest.mark.parametrize("before", ["nobody", "killed"])
@pytest.mark.parametrize("locks", ["machine", "none"])
def test_many_newcomers_at_once_go_in_one_at_a_time(tmp_path: Path, locks: str, before: str):
    if before == "killed":
        with held(tmp_path / "lock", machine="node0", locks=locks) as owner:
            owner.kill()
            owner.wait()
    newcomers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), f"node{number}", locks],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(1, 9)
    ]
    try:
        for newcomer in newcomers:
            assert newcomer.stdout and newcomer.stdout.readline() == "ready\n"
        for newcomer in newcomers:
            assert newcomer.stdin
            newcomer.stdin.write("\n")
            newcomer.stdin.flush()
        outputs = [newcomer.communicate(timeout=480)[0] for newcomer in newcomers]
    finally:
        for newcomer in newcomers:
            newcomer.kill()
    assert outputs == ["won\n"] * len(newcomers)
    assert not (tmp_path / "inside").exists() and len(list(tmp_path.glob("lock*"))) == 2


@pytest.mark.parametrize("locks", ["machine"], indirect=True)
def test_an_owner_that_stood_still_for_too_long_leaves_before_it_does_harm(path: Path, locks: str):
    with held(path, machine="node7", locks=locks) as owner:
        owner.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all_threads_stand_still(owner.pid):  # one may be writing to a disk that takes its time
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with locked(path, what="run a", say=lambda text: None):
            owner.send_signal(signal.SIGCONT)
            assert owner.wait(timeout=PATIENCE_SECONDS) == 1  # as soon as it looks
        with locked(path, what="run a", say=pytest.fail):
            pass


def all_threads_stand_still(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def test_a_full_disk_is_not_hidden_and_the_next_start_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "_BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"), locked(path, what="it"):
            pytest.fail("no owner was written down")
    with locked(path, what="it", say=lambda text: None):
        pass


def test_a_beat_that_the_disk_holds_up_does_not_come_after_the_release(path: Path, monkeypatch: pytest.MonkeyPatch):
    written, begun = [], threading.Event()
    beat, release = lock.OwnClaim.beat, lock.OwnClaim.release

    def slow_beat(claim: lock.OwnClaim) -> None:
        if threading.current_thread().name == "lock-beat":
            begun.set()
            time.sleep(0.5)
            written.append("beat")
        beat(claim)

    monkeypatch.setattr(lock.OwnClaim, "beat", slow_beat)
    monkeypatch.setattr(lock.OwnClaim, "release", lambda claim: (written.append("release"), release(claim)))
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)
    with locked(path, what="run a"):
        assert begun.wait(240)
    assert written[-2:] == ["beat", "release"]
