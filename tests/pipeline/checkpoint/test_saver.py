"""Saving in the background and standing still: what is written, and when it is visible."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardvit.pipeline.checkpoint import saver
from shardvit.pipeline.checkpoint import store as checkpoint
from shardvit.pipeline.checkpoint.saver import SaveFailed
from shardvit.pipeline.checkpoint.store import Retention, damage_of
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.saved_state.host_copy import HostBuffer, HostCopy, copy_bytes
from shardvit.pipeline.engine.saved_state.state_files import StateFile, write_file
from tests.saving import (
    Gate,
    Steps,
    TensorEngine,
    TinyEngine,
    names,
    on_ranks,
    one_rank,
    save,
    saver_of,
    state_at,
    steps,
)

MODES = ("background", "blocking")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_both_modes_write_the_same_bytes_and_what_is_read_equals_the_state(tmp_path: Path):
    written = {}
    for mode in MODES:
        engine, committed = TensorEngine(1.5), []
        one = saver_of(tmp_path / mode, ranks=one_rank(), engine=engine, mode=mode, committed=committed)
        one.save(state_at(3))
        one.finish()
        assert committed == [state_at(3)] and one.stall_seconds > 0
        written[mode] = contents(tmp_path / mode / "step-00000003")
    assert written["background"] == written["blocking"] and len(written["blocking"]) == 5
    folder = tmp_path / "blocking" / "step-00000003" / "deepspeed"
    weights = torch.load(folder / "weights0.pt", weights_only=True)
    assert torch.equal(weights["module"]["kernel"], torch.full((100, 10), 1.5))
    assert weights["module"]["bias"].shape == (10,) and weights["module"]["none"].shape == (0,)
    assert weights["counters"] == {"step": 1, "scale": [1.5]}
    assert (folder / "weights0.pt").stat().st_size < 4 * 1010 + 3000  # not the flat buffer of 8000 bytes
    optimizer = torch.load(folder / "optimizer0.pt", weights_only=True)
    assert torch.equal(optimizer["state"]["average"], torch.full((8, 64), 1.5))
    assert optimizer["rows"][0].data_ptr() == optimizer["rows"][1].data_ptr()  # stored once


def test_training_on_does_not_change_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The writer is held back until everything has changed that training changes."""
    still = TensorEngine(1.5)
    reference = saver_of(tmp_path / "still", ranks=one_rank(), engine=still)
    reference.save(state_at(3))
    gate = Gate(monkeypatch)
    engine, state, committed = TensorEngine(1.5), state_at(3), []
    one = saver_of(tmp_path / "moving", ranks=one_rank(), engine=engine, mode="background", committed=committed)
    one.save(state)
    assert gate.reached.wait(240) and committed == []
    for value in (2.0, float("nan")):
        engine.change(value)
        state.step += 1
        state.losses_since_log.append(value)
    gate.opened.set()
    one.finish()
    assert contents(tmp_path / "moving" / "step-00000003") == contents(tmp_path / "still" / "step-00000003")
    assert committed == [state_at(3)] and steps(tmp_path / "moving") == [3]


def test_only_a_change_of_the_state_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The copy is held back: saving returns at once, and the next change does not begin before the copy ends."""
    begun, let_on, events = threading.Event(), threading.Event(), list[str]()
    run = HostCopy.run

    def late(one: HostCopy, **more: Any) -> Any:
        begun.set()
        assert let_on.wait(240)
        events.append("copied")
        return run(one, **more)

    monkeypatch.setattr(HostCopy, "run", late)
    engine = TensorEngine(1.5)
    one = saver_of(tmp_path / "moving", ranks=one_rank(), engine=engine, mode="background")
    one.save(state_at(3))
    assert begun.wait(240)
    step = Steps(one, one_rank(), after=3)
    assert all(step() for _ in range(3))
    events.append("trained on")
    stood_before = one.stall_seconds
    threading.Timer(0.2, let_on.set).start()
    engine.change(7.0)
    events.append("changed")
    assert one.stall_seconds >= stood_before + 0.1
    one.finish()
    assert not step()
    assert events == ["trained on", "copied", "changed"]
    monkeypatch.setattr(HostCopy, "run", run)
    saver_of(tmp_path / "still", ranks=one_rank(), engine=TensorEngine(1.5)).save(state_at(3))
    assert contents(tmp_path / "moving" / "step-00000003") == contents(tmp_path / "still" / "step-00000003")


@pytest.mark.parametrize("error", [MemoryError("no memory"), ZeroDivisionError("of ours")])
def test_a_copy_that_fails_ends_the_save_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    save(tmp_path, 1, ranks=one_rank())

    def fail(one: HostCopy) -> Any:
        raise error

    monkeypatch.setattr(HostCopy, "_plan", fail)
    engine = TensorEngine(1.5)
    one = saver_of(tmp_path, ranks=one_rank(), engine=engine, mode="background")
    one.save(state_at(3))
    engine.change(2.0)
    with pytest.raises(SaveFailed, match=rf"{error}.*step-00000001 is kept"):
        one.finish()
    one.close()
    assert names(tmp_path) == ["step-00000001"]


def test_old_checkpoints_go_while_training_goes_on_and_before_the_next_one_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prune, begun, let_on, events = saver.prune_checkpoints, threading.Event(), threading.Event(), list[str]()
    open_beside = checkpoint.open_beside

    def slow(root: Path, **keywords: Any) -> None:
        begun.set()
        assert let_on.wait(240)
        prune(root, **keywords)
        events.append("pruned")

    def note(root: Path, *, step: int) -> None:
        events.append(f"begun {step}")
        open_beside(root, step=step)

    monkeypatch.setattr(saver, "prune_checkpoints", slow)
    monkeypatch.setattr(saver, "open_beside", note)
    one = saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(1), mode="background", retention=Retention(last=1))
    one.save(state_at(1))
    step = Steps(one, one_rank(), after=1)
    while step():
        pass
    assert begun.wait(240) and events == ["begun 1"] and steps(tmp_path) == [1]
    threading.Timer(0.2, let_on.set).start()
    one.save(state_at(2))
    one.finish()  # the end of a run waits for it, too
    assert events == ["begun 1", "pruned", "begun 2", "pruned"] and names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("disk", ["slow", "failing"])
def test_training_goes_on_beside_the_commit_and_its_failure_is_every_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
):
    """The commit is held back on rank 0: all ranks poll on, and know nothing yet."""
    commit, begun, let_on, threads = saver.commit_checkpoint, threading.Event(), threading.Event(), list[str]()

    def held(root: Path, **keywords: Any) -> Path:
        threads.append(threading.current_thread().name)
        begun.set()
        assert let_on.wait(240)
        if disk == "failing":
            raise OSError(errno.EIO, "gone bad")
        return commit(root, **keywords)

    monkeypatch.setattr(saver, "commit_checkpoint", held)

    def train(ranks: Any) -> list[TrainState]:
        committed: list[TrainState] = []
        engine = TinyEngine(value=5, rank=ranks.place.rank)
        one = saver_of(tmp_path, ranks=ranks, engine=engine, mode="background", committed=committed)
        one.save(state_at(5))
        step = Steps(one, ranks, after=5)
        while one._committing is None:
            step()
        assert begun.wait(240)
        for _ in range(5):
            step()
        assert committed == [] and one._writing is not None
        ranks.barrier()
        if ranks.place.is_main:
            assert names(tmp_path) == [".writing-step-00000005"]
            let_on.set()
        while step():
            pass
        return committed

    results = on_ranks(2, train)
    assert threads == ["commit"]
    if disk == "slow":
        assert results == [[state_at(5)]] * 2 and names(tmp_path) == ["step-00000005"]
        assert damage_of(tmp_path / "step-00000005") == ""
    else:
        assert [type(error) for error in results] == [SaveFailed] * 2 and str(results[0]) == str(results[1])
        assert "gone bad" in str(results[0]) and names(tmp_path) == []


def test_leaving_during_a_commit_waits_for_it_and_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit, begun = saver.commit_checkpoint, threading.Event()

    def slow(root: Path, **keywords: Any) -> Path:
        begun.set()
        time.sleep(0.2)
        return commit(root, **keywords)

    monkeypatch.setattr(saver, "commit_checkpoint", slow)
    one = saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(1), mode="background")
    one.save(state_at(1))
    step = Steps(one, one_rank(), after=1)
    while one._committing is None:
        step()
    assert begun.wait(240)
    one.close()
    assert names(tmp_path) == ["step-00000001"] and damage_of(tmp_path / "step-00000001") == ""


def test_there_are_never_two_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    at_begin: list[list[str]] = []
    open_beside = checkpoint.open_beside

    def note(root: Path, *, step: int) -> None:
        at_begin.append(names(root) if root.exists() else [])
        open_beside(root, step=step)

    monkeypatch.setattr(saver, "open_beside", note)
    one = saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(1), mode="background")
    one.save(state_at(1))
    threading.Timer(0.2, gate.opened.set).start()
    one.save(state_at(2))  # waits for the first
    one.finish()
    assert at_begin == [[], ["step-00000001"]] and steps(tmp_path) == [1, 2]


def test_without_memory_for_the_copies_of_all_ranks_of_a_host_it_stands_still_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    single = copy_bytes(TensorEngine(0).snapshot())
    for num_ranks, spare, expected in ((1, single, 0), (2, single, 1), (2, 2 * single, 0), (3, 2 * single, 1)):
        monkeypatch.setattr(saver, "spare_host_bytes", lambda spare=spare: spare)
        copied: list[str] = []
        run = HostCopy.run
        monkeypatch.setattr(HostCopy, "run", lambda one, **more: (copied.append("once"), run(one, **more))[1])  # noqa: B023
        said: list[str] = []
        root = tmp_path / f"{num_ranks}-{spare}"

        def train(ranks: Any, root: Path = root, said: list[str] = said) -> None:
            engine = TensorEngine(1, rank=ranks.place.rank)
            one = saver_of(root, ranks=ranks, engine=engine, mode="background", said=said)
            for step in (1, 2):
                one.save(state_at(step))
            one.finish()

        assert on_ranks(num_ranks, train) == [None] * num_ranks
        assert len(said) == expected and bool(copied) == (not expected)
        assert all("written while training stands still" in line and "memory" in line for line in said)
        assert steps(root) == [1, 2] and damage_of(root / "step-00000002") == ""
        monkeypatch.setattr(HostCopy, "run", run)


def test_memory_is_prepared_once_and_a_hosts_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for CUDA refuses rank 1; the first save finds the memory as it is."""
    said: list[str] = []

    def lock(buffer: HostBuffer, num_bytes: int) -> None:
        buffer.is_refused = threading.current_thread().name == "1"

    monkeypatch.setattr(HostBuffer, "_page_lock", lock)

    def prepare(ranks: Any) -> bool:
        threading.current_thread().name = str(ranks.place.rank)
        engine, mine = TensorEngine(1.5, rank=ranks.place.rank), list[str]()
        one = saver_of(tmp_path, ranks=ranks, engine=engine, mode="background", said=mine)
        one._buffer.device = torch.device("cuda")
        one.prepare(copy_bytes(engine.snapshot()))
        said.extend(mine)
        place = one._buffer._bytes.data_ptr()
        one._buffer.device = engine.device
        one.save(state_at(3))
        one.finish()
        return one._buffer._bytes.data_ptr() == place and one._buffer.is_refused == (ranks.place.rank == 1)

    assert on_ranks(2, prepare) == [True, True] and steps(tmp_path) == [3]
    assert len(said) == 2 and all("page-lock" in line for line in said)  # a line goes to rank 0's screen only


@pytest.mark.parametrize("lacking", ["memory", "background"])
def test_nothing_is_prepared_where_nothing_will_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
):
    monkeypatch.setattr(saver, "spare_host_bytes", lambda: 10 if lacking == "memory" else 1 << 40)
    mode = "blocking" if lacking == "background" else "background"
    one = saver_of(tmp_path, ranks=one_rank(), engine=TensorEngine(1.5), mode=mode)
    one.prepare(1 << 20)
    assert one._buffer.num_bytes == 0


def test_what_is_safe_is_told_before_old_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pruning may take long enough for a launcher to lose its patience."""
    committed: list[TrainState] = []
    known: list[int] = []
    monkeypatch.setattr(saver, "prune_checkpoints", lambda root, **keywords: known.append(committed[-1].step))
    one = saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(), committed=committed)
    one.save(state_at(4))
    assert known == [4]


def test_while_training_stands_still_it_says_that_it_gets_on_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told: list[int] = []
    at_the_standstill: list[int] = []

    def slow(folder: Path, file: StateFile, *, abandoned: threading.Event, on_bytes: Callable[[int], None]) -> Any:
        for _ in range(3):
            before, deadline = len(told), time.monotonic() + 240
            on_bytes(1)
            while len(told) == before and time.monotonic() < deadline:
                time.sleep(0.01)
        at_the_standstill.append(len(told))
        time.sleep(0.5)  # the disk takes nothing: a hang, if it lasts
        at_the_standstill.append(len(told))
        return write_file(folder, file, abandoned=abandoned)

    monkeypatch.setattr(saver, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(saver, "write_file", slow)
    saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(), progress=told.append).save(state_at(4))
    assert told and set(told) == {4}
    stuck = zip(at_the_standstill[::2], at_the_standstill[1::2], strict=True)
    assert all(after - before <= 1 for before, after in stuck)
