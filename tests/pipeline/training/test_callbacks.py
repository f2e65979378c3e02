"""The user's callbacks: called where the loop decides, asked through what the ranks agree on, their states exact."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.ranks.stopping import Requests, Stopped
from shardvit.pipeline.training.callbacks import Callbacks, Moment
from shardvit.pipeline.training.train_loop import train
from tests.looping import STEPS, saving


class Noting:
    """Notes what it is told, and asks for what it is given."""

    def __init__(self, **asks: Any) -> None:
        self.told: list[tuple[str, int]] = []
        self.asks = asks

    def after_step(self, at: Moment) -> None:
        self.told.append(("step", at.step))
        if at.step == self.asks.get("save"):
            at.save()
        if at.step == self.asks.get("stop"):
            at.stop("it is good enough")
        at.log("mine/step", at.step)

    def after_evaluation(self, at: Moment) -> None:
        self.told.append(("evaluation", at.step))
        assert at.evaluation["val/loss"] > 0

    def before_saving(self, at: Moment) -> None:
        self.told.append(("saving", at.step))

    def state_dict(self) -> dict[str, int]:
        return {"told": len(self.told)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.told = [("before", 0)] * state["told"]


def trained(callback: Any, *, save_steps: int = 0, **plan: Any) -> tuple[Any, TrainState, list[str], list[Any]]:
    """Trains with it; the job, the state, what was asked of the saver, and the rows that were logged."""
    whole, calls = saving(kind=Requests, save_steps=save_steps)
    rows: list[Any] = []
    whole.report.own = lambda state, values: rows.append((state.step, values))
    callbacks = Callbacks({"Noting": callback}, {"Noting": callback} if hasattr(callback, "state_dict") else {})
    whole, state = replace(whole, plan=replace(whole.plan, **plan), callbacks=callbacks), TrainState()
    try:
        train(whole, state)
    except Stopped:
        calls.append("stopped")
    return whole, state, calls, rows


def test_they_are_told_after_each_step_and_evaluation_and_before_each_checkpoint():
    noting = Noting()
    _, state, calls, rows = trained(noting, save_steps=4, eval_steps=3)
    expected = []
    for step in range(1, STEPS + 1):
        expected += [("step", step)]
        expected += [("evaluation", step)] * (step % 3 == 0)
        expected += [("saving", step)] * (step in (4, STEPS))
    assert noting.told == expected
    assert rows == [(step, {"mine/step": float(step)}) for step in range(1, STEPS + 1)]
    assert calls == ["save 4", f"save {STEPS}", "finish"]
    assert state.own == {"Noting": {"told": len(expected)}}  # as of the last checkpoint, with what came before it


def test_weights_that_are_on_their_way_have_arrived_when_they_are_told():
    whole, _ = saving(kind=Requests, save_steps=0)
    order: list[str] = []
    whole.engine.settle = lambda: order.append("arrived")
    whole.report.own = lambda state, values: order.append("told")
    train(replace(whole, callbacks=Callbacks({"Noting": Noting()}, {})), TrainState())
    assert order.count("told") == STEPS
    assert all(before == "arrived" for before, each in pairwise(order) if each == "told")


def test_a_checkpoint_that_is_asked_for_comes_once_two_steps_later():
    _, _, calls, _ = trained(Noting(save=2))
    assert calls == ["save 4", f"save {STEPS}", "finish"]


def test_a_stop_saves_and_ends_the_run_as_a_signal_does():
    whole, state, calls, _ = trained(Noting(stop=2))
    assert (state.step, calls) == (4, ["save 4", "finish", "stopped"])
    assert whole.requests._stop.reason == "Noting: it is good enough"


def test_a_state_comes_back_and_what_has_none_is_left_alone():
    noting, plain = Noting(), SimpleNamespace()
    Callbacks({}, {"Noting": noting}).load({"Noting": {"told": 2}, "another": {}})
    assert noting.told == [("before", 0)] * 2
    assert Callbacks({"plain": plain}).states() == {}


@pytest.mark.parametrize("state", [{1: "a number as key"}, {"a": (1, 2)}, {"a": object()}, {"a": {1, 2}}])
def test_a_state_that_would_come_back_as_another_is_refused(state: Any):
    holder = SimpleNamespace(state_dict=lambda: state)
    with pytest.raises(UserError, match=r"mine: what state_dict returns is kept as JSON"):
        Callbacks({}, {"mine": holder}).states()


def test_floats_come_back_to_the_bit():
    state = {"third": 1 / 3, "nan": math.nan, "many": [1e300, -0.0], "text": "ä", "nothing": None, "yes": True}
    kept = Callbacks({}, {"mine": SimpleNamespace(state_dict=lambda: state)}).states()
    assert repr(kept["mine"]) == repr(state)


@pytest.mark.parametrize("name", ["train/loss", "val/mine", "has space", "", "/a"])
def test_a_name_that_is_taken_or_no_metrics_is_refused(name: str):
    at: Any = Moment("pretrain", 1, 2, 3, 0, {}, {"val/mine": 1.0}, model=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="give a name"):
        at.log(name, 1.0)
