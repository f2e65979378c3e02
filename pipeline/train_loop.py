"""THE loop. One optimizer step a turn, read from top to bottom: batch, forward, loss, backward, step, and what is due.

Everything it needs is handed in; it knows the engine only through its protocol and writes nothing itself. Position,
randomness and batches are functions of the step, so that to begin at step k is to go on as if never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from data_shards.errors import UserError
from data_shards.loading.loader import TrainLoader
from model.vit import set_patch_dropout
from pipeline.checkpoint.saver import CheckpointSaver
from pipeline.engine.protocol import Engine
from pipeline.faults import FaultLedger
from pipeline.ranks.group import Ranks
from pipeline.ranks.pace import Pace
from pipeline.ranks.stopping import SaveClock, StopFlag, Stopped
from pipeline.ranks.watch import Watch
from pipeline.recipe.schedule import Schedule
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.losses import LossWindow, SpikeFinder
from pipeline.report.reporter import Report
from pipeline.state import TrainState, seed_step
from pipeline.task import Task


class TrainingFailed(Exception):
    """Training cannot go on; the message says why and what was saved."""


@dataclass(frozen=True)
class TrainJob:
    """The parts of one stage's training, ready to run."""

    engine: Engine
    ranks: Ranks
    plan: StagePlan
    schedule: Schedule
    seed: int
    max_skipped_steps: int
    patch_dropout: float
    batches: TrainLoader  # micro-batches from the state's step on
    faults: FaultLedger
    task: Task
    evaluate: Callable[[int], dict[str, float]]  # at a step
    saver: CheckpointSaver
    save_clock: SaveClock
    save_after: Literal["steps", "steps and evaluations"]
    pace: Pace
    on_slow_rank: Literal["report", "stop"]
    watch: Watch
    report: Report
    stop: StopFlag


def train(job: TrainJob, state: TrainState) -> TrainState:
    """Train from `state` to the end of the plan; collective.

    Raises:
        Stopped: a signal asked for it; everything up to the current step is saved.
        TrainingFailed: too many steps in a row had gradients that were not finite, or a rank is too slow and the
            recipe says to stop then (everything up to the current step is saved).
        UserError: more images are damaged than the recipe allows (everything up to here is saved), or a checkpoint
            cannot be written.
        SaveFailed: the disk failed while a checkpoint was written, which may pass.
    """
    engine, task, ranks, plan, report, faults = job.engine, job.task, job.ranks, job.plan, job.report, job.faults
    watch = job.watch
    if faults.complaint:  # of an earlier attempt
        raise UserError(faults.complaint)
    window, spikes = LossWindow(state.losses_since_log), SpikeFinder(state.recent_losses)
    engine.module.train()
    saved_step = state.step

    while state.step < plan.total_steps:
        seed_step(job.seed, step=state.step, rank=ranks.place.rank)
        if job.patch_dropout:  # of the step alone; the finish sees whole images
            set_patch_dropout(engine.module, job.patch_dropout if state.step < plan.patch_dropout_steps else 0.0)
        for _ in range(plan.accumulation_steps):
            watch.beat(state.step, doing="reading a batch")
            with job.pace.reading(), report.waiting():
                batch = next(job.batches)
            faults.note(batch, use="train", rows=plan.micro_batch_size)
            example = task.example(batch, use="train")
            watch.beat(state.step, doing="the forward pass")
            with job.pace.computing():
                outputs = engine.forward(*example.inputs)
            loss = task.loss(outputs, example.targets)
            watch.beat(state.step, doing="the backward pass")
            engine.backward(loss)
            window.add(loss)
        lr = job.schedule(state.step)
        watch.beat(state.step, doing="the optimizer's step")
        result = engine.step(lr=lr)
        window.end_step()

        state.step += 1
        state.images_seen += plan.global_batch_images
        state.skipped_in_a_row = 0 if result.applied else state.skipped_in_a_row + 1
        state.skipped_steps += not result.applied
        report.step(plan.global_batch_images)
        job.saver.poll()

        last = state.step == plan.total_steps
        too_slow = ""
        if last or _due(state.step, every=plan.log_steps):
            _settle_faults(job, state)
            losses = window.take(ranks)
            slowest = job.pace.judge(ranks)
            report.curve(
                state,
                loss=sum(losses) / len(losses),
                lr=lr,
                grad_norm=result.grad_norm,
                slowest_rank_ratio=slowest.ratio if slowest else None,
                stall_seconds=job.saver.stall_seconds,
            )
            report.spikes(spikes.look(losses, last_step=state.step))
            state.recent_losses = spikes.recent_losses
            if slowest and slowest.is_news:
                report.note(f"step {state.step}: {slowest.describe()}")
                too_slow = slowest.describe() if job.on_slow_rank == "stop" else ""
        evaluated = plan.evaluates_after(state.step)
        if evaluated:
            with report.aside():
                state.evaluation, state.evaluation_step = job.evaluate(state.step), state.step
            _settle_faults(job, state)
            report.evaluation(state)

        agreed = job.stop.agreed(ranks, save=job.save_clock.due())
        ending = bool(last or agreed.stop or faults.complaint or too_slow)
        # What the clock asked for a step ago is done if that step saved.
        due = agreed.save and saved_step < state.step - 1
        due = due or _due(state.step, every=plan.save_steps) or _due(state.step, every=plan.keep_steps)
        if ending or due or (evaluated and job.save_after == "steps and evaluations"):
            watch.beat(state.step, doing="saving a checkpoint")
            with report.aside():
                _settle_faults(job, state)
                state.losses_since_log = window.reduce(ranks)
                state.training_seconds = report.training_seconds
                job.saver.save(state)
            job.save_clock.restart()
            saved_step = state.step
        given_up = state.skipped_in_a_row >= job.max_skipped_steps
        if ending or given_up or faults.complaint:  # which may have come up while saving
            with report.aside():
                job.saver.finish()
        if faults.complaint:
            raise UserError(faults.complaint)
        if given_up:
            saved = f"step {saved_step} is saved" if saved_step else "nothing is saved"
            raise TrainingFailed(
                f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (the last is {state.step}, "
                f"{saved}): lower the stage's optimizer.lr or lengthen schedule.warmup, and begin it with --restart"
            )
        if too_slow:
            raise TrainingFailed(f"{too_slow}; everything up to step {state.step} is saved (engine.slow_rank: stop)")
        if agreed.stop and not last:
            raise Stopped
    job.stop.settle()
    return state


def _settle_faults(job: TrainJob, state: TrainState) -> None:
    settled = job.faults.settle(job.ranks)
    state.substituted_images += settled.substituted_images
    job.report.faults(state, settled.new)


def _due(step: int, *, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0
