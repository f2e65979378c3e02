"""A save in flight: each step's own message says whether a rank is busy with it, and nothing else is exchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardvit.pipeline.checkpoint.store import damage_of
from shardvit.pipeline.checkpoint.train_state import TrainState
from tests.saving import Gate, Steps, TinyEngine, names, on_ranks, one_rank, saver_of, state_at, steps
from tests.workers import run_ranks


def test_it_is_committed_after_the_same_step_when_the_slowest_rank_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch, path="rank1")
    seen: list[list[str]] = []

    def train(ranks: Any) -> int:
        committed: list[TrainState] = []
        engine = TinyEngine(value=5, rank=ranks.place.rank)
        one = saver_of(tmp_path, ranks=ranks, engine=engine, mode="background", committed=committed)
        assert not one.is_busy and not one.poll(5, others="done")
        one.save(state_at(5))
        step = Steps(one, ranks, after=5)
        assert all(step() for _ in range(10)) and not committed
        ranks.barrier()
        if ranks.place.is_main:
            seen.append(names(tmp_path))
            gate.opened.set()
        while step():
            pass
        assert committed == [state_at(5)] and not one.is_busy
        one.finish()
        return step.step

    results = on_ranks(2, train)
    assert isinstance(results[0], int) and results[0] == results[1] >= 15 + 3
    assert seen == [[".writing-step-00000005"]]
    assert names(tmp_path) == ["step-00000005"] and damage_of(tmp_path / "step-00000005") == ""


def test_what_a_step_said_before_a_phase_began_does_not_end_it(tmp_path: Path):
    """Its answer comes after the step in which the phase began, and was about what went before."""
    one = saver_of(tmp_path, ranks=one_rank(), engine=TinyEngine(1), mode="background")
    one.save(state_at(5))
    assert one.poll(6, others="done") and one._committing is None  # of step 5, before it was saved
    assert one.poll(7, others="busy") and one._committing is None
    assert one.poll(8, others="done") and one._committing is not None
    assert one.poll(9, others="done")  # of step 8, when all had written
    assert not one.poll(10, others="done") and steps(tmp_path) == [5]
    one.save(state_at(10))
    assert one.poll(11, others="done") and one._committing is None
    one.save(state_at(11))  # finishes the other
    assert steps(tmp_path) == [5, 10]
    assert one.poll(12, others="done") and one._committing is None
    one.finish()


def test_a_save_in_flight_exchanges_nothing_beside_the_steps_own_message(tmp_path: Path):
    """By two real processes. The writer is let on in step 8, so step 9 says "done", read after step 10, when the commit
    begins; step 11 or 12 says that it is over."""
    run_ranks(Path(__file__).with_name("saving_worker.py"), tmp_path, world_size=2)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and [saved for saved, _ in first] == [4, 20]
    assert first[0][1] in (12, 13) and first[1][1] == 20
    assert steps(tmp_path / "checkpoints") == [4, 20]
