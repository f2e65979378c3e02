"""What the loop decides itself: which steps leave out patches. It follows from the step alone, so a resume repeats it.

The rest of the loop is tested where it runs, by tests/integration.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState
from shardvit.pipeline.ranks.slow_rank import Slowest
from shardvit.pipeline.ranks.stopping import Requests, StopOrSave
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.stages.train_stage import RollbackConfig
from shardvit.pipeline.report.losses import Spike
from shardvit.pipeline.training.after_step import TrainingFailed
from shardvit.pipeline.training.train_loop import train
from tests.looping import ALL, HALF, MASKED, STEPS, job, saving, stepping


@pytest.mark.parametrize("first_step", [0, 3, 5])
def test_patches_are_left_out_until_the_finish_and_never_in_an_evaluation(first_step: int) -> None:
    whole, seen = job(patch_dropout=0.5, first_step=first_step)
    state = train(whole, TrainState(step=first_step))
    assert state.step == STEPS
    expected = []
    for step in range(first_step, STEPS):
        expected += [("train", HALF if step < MASKED else ALL)] * 2  # micro-batches
        expected += [("eval", ALL)] * ((step + 1) % 2 == 0)
    assert seen == expected


def test_without_it_all_patches_are_seen() -> None:
    whole, seen = job(patch_dropout=0.0, first_step=0)
    train(whole, TrainState())
    assert {tokens for _, tokens in seen} == {ALL}


class DueOnce(Requests):
    """Requests a checkpoint from the second step on, until one was saved."""

    asked, done = 0, False

    @property
    def mine(self) -> StopOrSave:
        self.asked += 1
        return StopOrSave(save=self.asked >= 2 and not self.done)

    def saved(self, step: int) -> None:
        super().saved(step)
        self.done = True


@pytest.mark.parametrize(("save_steps", "saves"), [(0, ["save 3", "save 6"]), (2, ["save 2", "save 4", "save 6"])])
def test_the_clocks_wish_is_granted_once_and_not_at_all_if_a_checkpoint_came_before_the_answer(
    save_steps: int, saves: list[str]
) -> None:
    whole, calls = saving(kind=DueOnce, save_steps=save_steps)
    train(whole, TrainState())
    assert calls == [*saves, "finish"]


def test_too_many_damaged_images_found_while_saving_end_the_run_when_the_checkpoint_is_committed() -> None:
    whole, calls = saving(kind=Requests, save_steps=3)

    def settle(ranks: Any) -> Any:
        whole.faults.complaint = "too many"
        return SimpleNamespace(substituted_images=0, new=())

    whole.faults.settle = settle
    with pytest.raises(UserError, match="too many"):
        train(whole, TrainState())
    assert calls == ["save 3", "finish"]


def test_a_save_in_flight_is_looked_after_in_every_step_and_told_what_the_step_before_said() -> None:
    """However early it is read: points of the curve read it in its own step."""
    whole, calls = saving(kind=Requests, save_steps=4)
    whole = replace(whole, plan=replace(whole.plan, log_steps=2))
    sent = iter([True, False, True, True, False, True])
    send, polled = whole.engine.step, list[tuple[int, str]]()

    def step(*, flags: Any, **how: Any) -> Any:
        return send(flags=(*flags[:2], next(sent)), **how)  # what all ranks said

    whole.engine.step = step
    whole.saver.poll = lambda step, *, others: polled.append((step, others))
    train(whole, TrainState())
    expected = ["done", "busy", "done", "busy", "busy", "done"]  # none before the first
    assert polled == list(enumerate(expected, start=1)) and calls == ["save 4", "save 6", "finish"]


def test_a_step_says_whether_this_ranks_save_is_unfinished() -> None:
    whole, _ = saving(kind=Requests, save_steps=0)
    said, send = list[tuple[bool, ...]](), whole.engine.step
    whole.engine.step = lambda *, flags, **how: (said.append(tuple(flags)), send(flags=flags, **how))[1]

    def poll(step: int, *, others: str) -> None:
        whole.saver.is_busy = step in (2, 3)

    whole.saver.poll = poll
    train(whole, TrainState())
    assert [flags[2] for flags in said] == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("keep_steps", "after_evaluations", "saves"),
    [
        (4, False, ["save 4", "save 6"]),
        (0, False, ["save 6"]),
        (0, True, ["save 2", "save 4", "save 6"]),
    ],
)
def test_what_stays_for_good_is_saved_at_its_steps_and_what_may_be_best_after_each_evaluation(
    keep_steps: int, after_evaluations: bool, saves: list[str]
) -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    plan = replace(whole.plan, keep_steps=keep_steps, eval_steps=2, save_after_evaluations=after_evaluations)
    train(replace(whole, plan=plan), TrainState())
    assert calls == [*saves, "finish"]


def test_a_checkpoint_after_an_evaluation_has_its_values() -> None:
    whole, _ = saving(kind=Requests, save_steps=0)
    saved: list[tuple[int, int, bool]] = []
    whole.saver.save = lambda state: saved.append((state.step, state.evaluation_step, "val/loss" in state.evaluation))
    train(replace(whole, plan=replace(whole.plan, eval_steps=3, save_after_evaluations=True)), TrainState())
    assert saved == [(3, 3, True), (6, 6, True)]


SLOW = Slowest(*(1, "far", 0.75, 0.25), waited_seconds=30.0, waited_share=0.5, is_news=True, may_stop=True)


@pytest.mark.parametrize("on_slow_rank", ["report", "stop"])
def test_a_slow_rank_is_told_once_and_ends_the_run_later_if_that_is_wished_when_all_is_saved(on_slow_rank: Any) -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    verdicts = iter([replace(SLOW, may_stop=False), replace(SLOW, is_news=False), replace(SLOW, is_news=False)])
    notes: list[str] = []
    ratios: list[float | None] = []
    whole.report.phases.slowest = lambda ranks: next(verdicts)
    whole.report.note = lambda text, **more: notes.append(text)
    whole.report.curve = lambda state, *, slowest_rank_ratio, **more: ratios.append(slowest_rank_ratio)
    whole = replace(whole, plan=replace(whole.plan, log_steps=2, slow_rank=on_slow_rank))
    if on_slow_rank == "stop":
        with pytest.raises(TrainingFailed, match=r"rank 1 \(host far\) is slow.*everything up to step 4 is saved"):
            train(whole, TrainState())
        assert calls == ["save 4", "finish"] and ratios == [3.0, 3.0]
    else:
        train(whole, TrainState())
        assert calls == ["save 6", "finish"] and ratios == [3.0, 3.0, 3.0]
    assert notes == [f"step 2: {SLOW.describe()}"]


def test_steps_beside_which_a_checkpoint_is_written_tell_nothing_of_the_pace() -> None:
    whole, _ = saving(kind=Requests, save_steps=2)
    writing, told = iter([False, True, True, False, True, False]), list[str]()
    whole.saver.poll = lambda step, *, others: next(writing)
    whole.report.phases.disturbed = lambda: told.append("disturbed")
    train(whole, TrainState())
    assert told == ["disturbed"] * 3


def test_losses_are_held_against_those_before_the_checkpoint_and_go_into_the_next_one() -> None:
    before = [0.010, 0.011] * 40
    for earlier, spiking in ((before, True), ([], False)):
        whole, _ = saving(kind=Requests, save_steps=0)
        told: list[Spike] = []
        saved: list[float] = []
        whole.report.spikes = told.extend
        whole.saver.save = lambda state, saved=saved: saved.extend(state.recent_losses)
        whole = replace(whole, plan=replace(whole.plan, log_steps=2))
        train(whole, TrainState(recent_losses=earlier))
        assert [spike.step for spike in told[:1]] == ([1] if spiking else [])
        assert saved[: len(earlier)] == earlier and len(saved) == len(earlier) + STEPS


def test_every_point_of_the_curve_is_told_how_long_training_stood_still_so_far() -> None:
    whole, _ = saving(kind=Requests, save_steps=1)
    told: list[float] = []
    whole.report.curve = lambda state, *, stall_seconds, **more: told.append(stall_seconds)

    def save(state: TrainState) -> None:
        whole.saver.stall_seconds += 1.0

    whole.saver.save = save
    train(replace(whole, plan=replace(whole.plan, log_steps=2)), TrainState())
    assert told == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (TrainState(), "3 steps in a row .*the last is 3, nothing is saved"),
        (TrainState(step=2, skipped_in_a_row=2), "3 steps in a row .*the last is 3, step 2 is saved"),
        (TrainState(step=3, skipped_in_a_row=0), "3 steps in a row .*the last is 6, step 4 is saved"),
    ],
)
def test_too_many_steps_without_a_finite_gradient_end_the_run_also_across_a_resume(
    state: TrainState, words: str
) -> None:
    whole, calls = saving(kind=Requests, save_steps=4)
    whole.engine.step = stepping(applied=False)
    whole.requests.saved_step = state.step
    plan = replace(whole.plan, total_steps=STEPS + 1, max_skipped_steps=3)
    with pytest.raises(TrainingFailed, match=words):
        train(replace(whole, plan=plan), replace(state))
    assert calls[-1] == "finish"


def rolling(**keys: Any) -> tuple[Any, list[str]]:
    """A job that goes back to a checkpoint."""
    whole, calls = saving(kind=Requests, save_steps=0)
    plan = replace(whole.plan, rollback=RollbackConfig(steps_before=0, **keys), max_skipped_steps=10)
    return replace(whole, plan=plan), calls


def test_so_many_skipped_steps_in_a_row_make_it_go_back_and_save_nothing() -> None:
    whole, calls = rolling(after_skipped_steps=2)
    results = iter([True, False, True, False, False])
    whole.engine.step = lambda **how: stepping(applied=next(results))(**how)
    with pytest.raises(RollBack) as back:
        train(whole, TrainState())
    assert (back.value.trouble.first, back.value.trouble.last) == (3, 4)
    assert calls == ["finish"]


def test_steps_that_are_passed_over_move_the_position_and_nothing_else() -> None:
    whole, seen = job(patch_dropout=0.0, first_step=2)  # micro-batches of four steps
    stepped: list[float] = []
    whole.engine.step = stepping(applied=True, noted=stepped)
    points: list[tuple[int, bool]] = []
    whole.report.curve = lambda state, *, loss, **more: points.append((state.step, math.isfinite(loss)))
    schedule = Schedule(peak_lr=1.0, total_steps=STEPS, warmup_steps=STEPS)
    whole = replace(whole, plan=replace(whole.plan, eval_steps=0, schedule=schedule))
    state = train(whole, TrainState(passed_over=[0, 1], rollbacks=1))
    assert stepped == [schedule(step) for step in (2, 3, 4, 5)]
    assert (state.step, state.images_seen, state.skipped_steps) == (STEPS, STEPS * 8, 0)
    assert points == [(4, True), (6, True)]  # the window of steps 1 and 2 is empty
    assert len(seen) == 2 * 4 + 1  # and the evaluation at the end


def test_a_spike_makes_it_go_back_if_the_recipe_says_so_at_the_first_one_found() -> None:
    before = [0.010, 0.011] * 40
    whole, _ = rolling(spike_sigmas=6.0)
    with pytest.raises(RollBack) as back:
        train(replace(whole, plan=replace(whole.plan, log_steps=3)), TrainState(recent_losses=before))
    assert (back.value.trouble.first, back.value.trouble.last) == (0, 0)
    whole, _ = rolling()
    assert train(replace(whole, plan=replace(whole.plan, log_steps=3)), TrainState(recent_losses=before)).step == STEPS


def test_too_many_rollbacks_end_the_run() -> None:
    whole, calls = rolling(after_skipped_steps=2, times=3)
    whole.engine.step = stepping(applied=False)
    with pytest.raises(TrainingFailed, match=r"3 rollbacks.*optimizer\.lr"):
        train(whole, TrainState(rollbacks=3))
    assert calls == ["finish"]


def test_a_stage_that_gave_up_at_its_last_step_is_not_done_at_the_next_attempt() -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    state = TrainState(step=STEPS, skipped_in_a_row=whole.plan.max_skipped_steps)
    with pytest.raises(TrainingFailed, match="in a row"):
        train(whole, state)
    assert calls == []


def test_a_slow_rank_does_not_undo_the_last_step() -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    whole.report.phases.slowest = lambda ranks: SLOW
    train(replace(whole, plan=replace(whole.plan, slow_rank="stop")), TrainState())
    assert calls == [f"save {STEPS}", "finish"]


def test_too_many_damaged_images_of_an_earlier_attempt_end_it_before_a_step() -> None:
    whole, calls = saving(kind=Requests, save_steps=1)
    whole.faults.complaint = "too many"
    with pytest.raises(UserError, match="too many"):
        train(whole, TrainState())
    assert calls == []
