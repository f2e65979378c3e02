"""What comes one step late: the ranks' requests, and what became of a step; neither depends on when it is read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import step_numbers
from shardvit.pipeline.engine.late_metrics import LateMetrics
from shardvit.pipeline.ranks.stopping import Requests, StopFlag, Stopped
from shardvit.pipeline.training.train_loop import train
from tests.looping import STEPS, saving, stepping


def stopped_in(step: int, *, stage: tuple[Any, list[str]], passed_over: list[int]) -> TrainState:
    """Trains, and asks for a stop when the learning rate of `step` (from 1) is looked up."""
    (whole, _), stop = stage, StopFlag()

    def schedule(number: int) -> float:
        if number + 1 == step:
            stop.request("SIGTERM")
        return 1.0

    plan, requests = replace(whole.plan, schedule=schedule), Requests(stop, saved_step=0)
    state = TrainState(passed_over=passed_over)
    try:
        train(replace(whole, plan=plan, requests=requests), state)
    except Stopped:
        assert state.step < STEPS
    return state


@pytest.mark.parametrize("passed_over", [[], [1], [2], [1, 2, 3, 4]])
@pytest.mark.parametrize("log_steps", [0, 1, 2])  # the numbers are read earlier
def test_a_stop_asked_for_in_a_step_comes_after_the_next_one_whatever_is_read_when(
    passed_over: list[int], log_steps: int
) -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    whole = replace(whole, plan=replace(whole.plan, log_steps=log_steps, max_skipped_steps=9))
    assert stopped_in(2, stage=(whole, calls), passed_over=passed_over).step == 3
    assert calls == ["save 3", "finish"]


@pytest.mark.parametrize("asked_in", [STEPS - 1, STEPS])
def test_a_stop_that_is_agreed_at_the_last_step_stops_nothing(asked_in: int) -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    assert stopped_in(asked_in, stage=(whole, calls), passed_over=[]).step == STEPS
    assert calls == [f"save {STEPS}", "finish"]


@pytest.mark.parametrize("due", ["log_steps", "save_steps", "eval_steps"])
def test_the_counters_are_exact_wherever_they_are_read(due: str) -> None:
    whole, _ = saving(kind=Requests, save_steps=0)
    results = iter([True, False, False, True, True, False])
    whole.engine.step = lambda **how: stepping(applied=next(results))(**how)
    found: dict[int, tuple[int, int]] = {}

    def note(state: TrainState, **more: Any) -> None:
        found[state.step] = (state.skipped_steps, state.skipped_in_a_row)

    whole.report.curve = whole.report.evaluation = whole.saver.save = note
    train(replace(whole, plan=replace(whole.plan, **{due: 3}, max_skipped_steps=9)), TrainState())
    assert found == {3: (2, 2), 6: (3, 1)}


def test_a_step_is_waited_for_only_where_its_numbers_are_needed() -> None:
    """Of the steps before it alone the numbers are read, but where too many may have been skipped in a row."""
    whole, _ = saving(kind=Requests, save_steps=0)
    results = iter([True, False, False, True, True, True])
    drained: list[int] = []

    class Noting(LateMetrics):
        def drain(self) -> Any:
            outcomes = super().drain()
            drained.extend(outcome.step for outcome in outcomes)
            return outcomes

    whole.engine.step = lambda **how: stepping(applied=next(results))(**how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardvit.pipeline.training.after_step.LateMetrics", Noting)
        train(replace(whole, plan=replace(whole.plan, max_skipped_steps=3)), TrainState())
    assert drained == [4, 6]  # after step 3, two are known to be skipped: the third is looked at


def test_of_a_point_the_gradient_norm_is_that_of_its_step() -> None:
    whole, _ = saving(kind=Requests, save_steps=0)
    norms = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    whole.engine.step = lambda *, lr, flags, measure: step_numbers(
        grad_norm=next(norms), applied=True, flags=torch.zeros(2)
    )
    told: list[float] = []
    whole.report.curve = lambda state, *, grad_norm, **more: told.append(grad_norm)
    train(replace(whole, plan=replace(whole.plan, log_steps=2, max_skipped_steps=9)), TrainState())
    assert told == [2.0, 4.0, 6.0]
