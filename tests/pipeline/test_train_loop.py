"""What the loop decides itself: which steps leave out patches. It follows from the step alone, so a resume repeats it.

The rest of the loop is tested where it runs, by tests/integration.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_shards.errors import UserError
from model.build import build_model
from model.config import ModelConfig
from model.regularisation import Regularisation
from pipeline.engine.late_metrics import LateMetrics
from pipeline.engine.protocol import StepResult
from pipeline.evaluate import evaluate
from pipeline.ranks.pace import Slowest
from pipeline.ranks.phases import Phases
from pipeline.ranks.stopping import Requests, StopFlag, StopOrSave, Stopped
from pipeline.recipe.schedule import Schedule
from pipeline.recipe.stage import RollbackConfig
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.losses import Spike
from pipeline.rollback import GoBack
from pipeline.state import TrainState
from pipeline.task import Example
from pipeline.train_loop import TrainingFailed, TrainJob, train

STEPS, MASKED = 6, 4
ALL, HALF = 1 + 16, 1 + 8  # tokens


def quiet(*names: str) -> dict[str, Any]:
    """Methods that do nothing."""
    return dict.fromkeys(names, lambda *args, **more: None)


def stepping(*, applied: bool, noted: list[float] | None = None) -> Callable[..., StepResult]:
    """An engine's `step` of a single rank."""

    def step(*, lr: float, requests: StopOrSave) -> StepResult:
        if noted is not None:
            noted.append(lr)
        flags = torch.tensor(requests).float()
        return StepResult.known(grad_norm=1.0 if applied else math.nan, applied=applied, requests=flags)

    return step


def job(*, patch_dropout: float, first_step: int) -> tuple[Any, list[tuple[str, int]]]:
    """A job on stand-ins around a real model, and the list in which the tokens of each forward pass are noted."""
    seen: list[tuple[str, int]] = []
    module = build_model(
        ModelConfig(width=8, depth=1, heads=2, patch_size=4),
        image_size=16,
        num_classes=2,
        head="linear",
        regularisation=Regularisation(patch_dropout=patch_dropout),
    )
    module.get_submodule("blocks.0").register_forward_pre_hook(
        lambda block, inputs: seen.append(("train" if block.training else "eval", inputs[0].shape[1]))
    )
    engine: Any = SimpleNamespace(
        module=module,
        device=torch.device("cpu"),
        forward=module,
        predict=module,
        backward=lambda loss: loss.backward(),
        step=stepping(applied=True),
        pass_over=lambda requests: StepResult.passed_over(torch.tensor(requests).float()),
    )
    ranks: Any = SimpleNamespace(
        place=SimpleNamespace(rank=0),
        gather=lambda values: values.double()[None],
    )
    faults: Any = SimpleNamespace(
        complaint="",
        note=lambda batch, *, use, rows: None,
        settle=lambda ranks: SimpleNamespace(substituted_images=0, new=()),
    )
    phases = Phases(
        watch=SimpleNamespace(**quiet("beat")),  # pyright: ignore[reportArgumentType]
        pace=SimpleNamespace(  # pyright: ignore[reportArgumentType]
            measuring=lambda phase: contextlib.nullcontext(), **quiet("compare")
        ),
    )
    report: Any = SimpleNamespace(
        phases=phases,
        training_seconds=0.0,
        **quiet("step", "curve", "spikes", "evaluation", "faults", "note"),
    )
    task: Any = SimpleNamespace(
        score="top1",
        example=lambda batch, *, use: Example((batch.images,), torch.zeros(4, dtype=torch.int64)),
        loss=torch.nn.functional.cross_entropy,
        tally=lambda outputs, targets: torch.ones(3, dtype=torch.float64),
    )
    batch: Any = SimpleNamespace(images=torch.randn(4, 3, 16, 16), counted=torch.ones(4, dtype=torch.bool))
    plan = StagePlan(
        world_size=1,
        global_batch_images=8,
        micro_batch_size=4,
        accumulation_steps=2,
        lanes=8,
        total_steps=STEPS,
        schedule=Schedule(),
        log_steps=2,
        eval_steps=2,
        save_steps=0,
        samples_per_epoch=100,
        patch_dropout=patch_dropout,
        patch_dropout_steps=MASKED if patch_dropout else 0,
        seed=1,
    )
    whole: Any = TrainJob(
        plan=plan,
        batches=iter([batch] * (STEPS - first_step) * 2),  # pyright: ignore[reportArgumentType]
        task=task,
        engine=engine,
        evaluate=lambda step: evaluate([batch], task=task, engine=engine, ranks=ranks, faults=faults),
        saver=SimpleNamespace(stall_seconds=0.0, **quiet("save", "poll", "finish")),  # pyright: ignore[reportArgumentType]
        faults=faults,
        report=report,
        ranks=ranks,
        requests=Requests(StopFlag(), saved_step=first_step),
    )
    return whole, seen


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


def saving(*, kind: type[Requests], save_steps: int) -> tuple[Any, list[str]]:
    """A job whose ranks agree as they do in earnest, and the list of what is asked of its saver."""
    calls: list[str] = []
    whole, _ = job(patch_dropout=0.0, first_step=0)
    saver: Any = SimpleNamespace(
        stall_seconds=0.0,
        poll=lambda: None,
        save=lambda state: calls.append(f"save {state.step}"),
        finish=lambda: calls.append("finish"),
    )
    plan = replace(whole.plan, log_steps=0, eval_steps=0, save_steps=save_steps)
    requests = kind(StopFlag(), saved_step=0)
    return replace(whole, plan=plan, saver=saver, requests=requests), calls


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


def test_a_save_in_flight_is_looked_after_in_every_step() -> None:
    whole, calls = saving(kind=Requests, save_steps=4)
    whole.saver.poll = lambda: calls.append("poll")
    train(whole, TrainState())
    assert calls == [*["poll"] * 4, "save 4", *["poll"] * 2, "save 6", "finish"]


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


SLOW = Slowest(rank=1, host="far", seconds=0.6, usual_seconds=0.2, ratio=3.0, windows=2, is_news=True)


@pytest.mark.parametrize("on_slow_rank", ["report", "stop"])
def test_a_slow_rank_is_told_once_and_ends_the_run_if_that_is_wished_when_all_is_saved(on_slow_rank: Any) -> None:
    whole, calls = saving(kind=Requests, save_steps=0)
    verdicts = iter([None, SLOW, replace(SLOW, is_news=False)])
    notes: list[str] = []
    ratios: list[float | None] = []
    whole.report.phases.slowest = lambda ranks: next(verdicts)
    whole.report.note = notes.append
    whole.report.curve = lambda state, *, slowest_rank_ratio, **more: ratios.append(slowest_rank_ratio)
    whole = replace(whole, plan=replace(whole.plan, log_steps=2, slow_rank=on_slow_rank))
    if on_slow_rank == "stop":
        with pytest.raises(TrainingFailed, match=r"rank 1 \(host far\) is slow.*everything up to step 4 is saved"):
            train(whole, TrainState())
        assert calls == ["save 4", "finish"] and ratios == [None, 3.0]
    else:
        train(whole, TrainState())
        assert calls == ["save 6", "finish"] and ratios == [None, 3.0, 3.0]
    assert notes == [f"step 4: {SLOW.describe()}"]


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
    with pytest.raises(GoBack) as back:
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
    with pytest.raises(GoBack) as back:
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
        patch.setattr("pipeline.train_loop.LateMetrics", Noting)
        train(replace(whole, plan=replace(whole.plan, max_skipped_steps=3)), TrainState())
    assert drained == [4, 6]  # after step 3, two are known to be skipped: the third is looked at


def test_of_a_point_the_gradient_norm_is_that_of_its_step() -> None:
    whole, _ = saving(kind=Requests, save_steps=0)
    norms = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    whole.engine.step = lambda *, lr, requests: StepResult.known(
        grad_norm=next(norms), applied=True, requests=torch.zeros(2)
    )
    told: list[float] = []
    whole.report.curve = lambda state, *, grad_norm, **more: told.append(grad_norm)
    train(replace(whole, plan=replace(whole.plan, log_steps=2, max_skipped_steps=9)), TrainState())
    assert told == [2.0, 4.0, 6.0]
