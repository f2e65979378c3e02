"""What a rank says when it fails: one sentence for a disk that cannot be written, nothing of its own for another's end.

Real ranks on a real full disk are in tests/faults.
"""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardvit.launch import train
from shardvit.launch.run.disk import disk_problem
from shardvit.pipeline.checkpoint.saver import SaveFailed
from shardvit.pipeline.ranks.group import PeerGone
from shardvit.pipeline.ranks.stopping import StopFlag, Stopped
from shardvit.pipeline.recipe.vocabulary import EXIT_USER_ERROR
from shardvit.pipeline.training.after_step import TrainingFailed

ARGUMENTS = ["digits", "--stage", "pretrain", "--runs", "some runs"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr(train, "time", SimpleNamespace(sleep=asked.append))  # other threads sleep, too
    return asked


def end(error: Exception, *, rank: int, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> int:
    """The exit code of a rank whose stage fails."""

    def fail(*arguments: object, **more: object) -> int:
        raise error

    monkeypatch.setattr(train, "_run", fail)
    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank), ("SHARDVIT_RENDEZVOUS", "x")):
        monkeypatch.setenv(name, str(value))
    return train.main(ARGUMENTS)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full: make room there"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only file system: mount it writable, or choose another folder with --runs"),
        (errno.EACCES, "permission denied: change its owner or mode"),
        (errno.EPERM, "does not permit it"),
    ],
)
def test_a_disk_that_cannot_be_written_is_named_in_one_sentence(
    number: int,
    words: str,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    error = OSError(number, os.strerror(number), "/runs/a/stage.json")
    assert end(error, rank=0, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardvit: /runs/a/stage.json cannot be written: ") and words in said
    assert said.count("\n") == 1 and waits == []


def test_a_write_whose_path_is_not_known_names_the_place_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    assert str(disk_problem(error, folder=tmp_path)).startswith(f"{tmp_path} cannot be written: the disk is full")
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr("shardvit.launch.run.disk.tempfile.gettempdir", lambda: str(elsewhere))
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        return os.statvfs_result((*real(tmp_path)[:4], 0, *real(tmp_path)[5:])) if path == elsewhere else real(path)

    monkeypatch.setattr("shardvit.launch.run.disk.os.statvfs", statvfs)
    assert str(disk_problem(error, folder=tmp_path)).startswith(f"{elsewhere} cannot be written")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "/runs/a"),  # a broken disk: somebody has to look at it
        FileNotFoundError(errno.ENOENT, "No such file", "/runs/a"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # of a signal to somebody's process
        ValueError("no space"),
    ],
)
def test_other_errors_keep_their_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert end(error, rank=0, monkeypatch=monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_the_disks_error_was_turned_into_is_told_too(tmp_path: Path):
    error = RuntimeError("the writer failed")
    error.__cause__ = OSError(errno.EROFS, "Read-only file system", "/runs/a/x")
    assert "/runs/a/x cannot be written" in str(disk_problem(error, folder=tmp_path))


def test_a_later_rank_lets_the_first_one_say_it(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert end(OSError(errno.ENOSPC, "full", "/runs/a/x"), rank=1, monkeypatch=monkeypatch) == 2
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # so the launcher's SIGTERM ends it in silence
    finally:
        signal.signal(signal.SIGTERM, before)
    assert waits == [train._COLLATERAL_WAIT_SECONDS]
    assert capsys.readouterr().err.count("/runs/a/x cannot be written") == 1


@pytest.mark.parametrize(
    "error", [PeerGone("rank 0 did not begin"), RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1")]
)
def test_a_rank_whose_peer_is_gone_adds_no_traceback(
    error: Exception, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("shardvit.pipeline.ranks.dead_ranks.LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("shardvit.pipeline.ranks.dead_ranks.first_word", threading.Lock())  # as in a process of its own
    assert end(error, rank=1, monkeypatch=monkeypatch) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.startswith("shardvit: ") and said.count("\n") == 1


@pytest.mark.parametrize("mark", ["SHARDVIT_RUN_ON_HOSTS", ""], ids=["one log", "a log for each host"])
def test_that_rank_0_never_came_is_said_by_two_ranks_of_a_host_where_all_write_to_one_log(
    mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if mark:
        monkeypatch.setenv(mark, "/runs/a")
    for rank in range(4):
        assert end(PeerGone("rank 0 did not begin"), rank=rank, ranks=4, monkeypatch=monkeypatch) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [f"shardvit: rank {rank}: rank 0 did not begin" for rank in range(2 if mark else 4)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (Stopped(), 75, ""),
        (TrainingFailed("a rank is slow"), 1, "shardvit: pretrain failed: a rank is slow\n"),
        (SaveFailed("a disk is away"), 1, "shardvit: pretrain failed: a disk is away\n"),
    ],
)
def test_what_ends_training_in_good_order_has_its_own_exit_code_and_no_traceback(
    error: Exception | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def run_stage(*arguments: object, **more: object) -> None:
        if error is not None:
            raise error

    def alone(place: object, *, timeout_seconds: float) -> SimpleNamespace:
        assert timeout_seconds == 7.0  # the recipe's
        return SimpleNamespace(leave=lambda: None, gather_objects=lambda value: [value])

    monkeypatch.setattr(
        "shardvit.pipeline.ranks.process.settle_threads", lambda **_: ""
    )  # this process's are the tests'
    monkeypatch.setattr("shardvit.pipeline.training.stages.run_stage", run_stage)
    monkeypatch.setattr("shardvit.pipeline.ranks.group.Ranks", alone)
    monkeypatch.setattr("shardvit.pipeline.ranks.stopping.StopFlag.listen", lambda flag: None)
    monkeypatch.setattr(train, "_watch_parents", lambda flag: None)
    monkeypatch.setattr(train.DrawAndSend, "close", lambda *_, **__: None)  # a busy machine would have it say something
    arguments = ["digits", "engine.collective_timeout_seconds=7", "--stage", "pretrain", "--runs", str(tmp_path)]
    assert train.main(arguments) == code
    assert capsys.readouterr().err == said


PATIENCE_SECONDS = 240.0


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says it is `shardvit run`; it is looked at all the time."""
    monkeypatch.setattr(train, "_WATCH_SECONDS", 0.01)
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setenv("SHARDVIT_SUPERVISOR_PID", str(process.pid))
        yield process
        process.kill()


def wait_for_stop(flag: StopFlag) -> str | None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while flag.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return flag.reason


def test_a_supervisor_that_is_dead_and_not_collected_is_dead(supervisor: subprocess.Popen[bytes]):
    flag = StopFlag()
    train._watch_parents(flag)
    time.sleep(0.2)
    assert flag.reason is None  # it lives
    supervisor.kill()  # and nobody waits for it: its number stays, as a zombie's
    assert wait_for_stop(flag) == "the death of shardvit run"
    assert Path(f"/proc/{supervisor.pid}").exists()


def test_another_process_with_the_supervisors_number_is_not_it(
    supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    flag = StopFlag()
    train._watch_parents(flag)
    monkeypatch.setattr(train, "process_started", lambda pid: 1.0)
    assert wait_for_stop(flag) == "the death of shardvit run"


def test_a_supervisor_that_died_before_anybody_looked_is_dead(supervisor: subprocess.Popen[bytes]):
    supervisor.kill()
    supervisor.wait()
    flag = StopFlag()
    train._watch_parents(flag)
    assert wait_for_stop(flag) == "the death of shardvit run"


def test_memory_that_runs_out_is_a_users_mistake_told_in_one_sentence_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], waits: list[float]
):
    """The exit code is one that no launcher tries again."""
    import torch

    for rank in (0, 1):
        for error in (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), MemoryError("no")):
            assert end(error, rank=rank, monkeypatch=monkeypatch) == EXIT_USER_ERROR
            said = capfd.readouterr().err
            assert "Traceback" not in said and said.count("out of memory") == 1
            assert "engine." in said and "micro-batch of" in said
