"""THE loop. One optimizer step a turn, read from top to bottom: batch, forward, loss, backward, step, and what is due.

Everything it needs is handed in; it knows the engine only through its protocol and writes nothing itself. Position,
randomness and batches are functions of the step, so that to begin at step k is to go on as if never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from data_shards.errors import UserError
from data_shards.loader import TrainLoader
from model.vit import set_patch_dropout
from pipeline.engine import Engine
from pipeline.faults import FaultLedger
from pipeline.loss_window import LossWindow
from pipeline.plan import StagePlan
from pipeline.ranks import Ranks
from pipeline.report import Report
from pipeline.schedule import Schedule
from pipeline.state import TrainState, seed_step
from pipeline.stopping import StopFlag, Stopped
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
    evaluate: Callable[[], dict[str, float]]
    save: Callable[[TrainState], None]
    report: Report
    stop: StopFlag


def train(job: TrainJob, state: TrainState) -> TrainState:
    """Train from `state` to the end of the plan; collective.

    Raises:
        Stopped: a signal asked for it; everything up to the current step is saved.
        TrainingFailed: too many steps in a row had gradients that were not finite.
        UserError: more images are damaged than the recipe allows; everything up to here is saved.
    """
    engine, task, ranks, plan, report, faults = job.engine, job.task, job.ranks, job.plan, job.report, job.faults
    if faults.complaint:  # of an earlier attempt
        raise UserError(faults.complaint)
    window = LossWindow(state.losses_since_log)
    engine.module.train()

    while state.step < plan.total_steps:
        seed_step(job.seed, step=state.step, rank=ranks.place.rank)
        if job.patch_dropout:  # of the step alone; the finish sees whole images
            set_patch_dropout(engine.module, job.patch_dropout if state.step < plan.patch_dropout_steps else 0.0)
        for _ in range(plan.accumulation_steps):
            with report.waiting():
                batch = next(job.batches)
            faults.note(batch, use="train", rows=plan.micro_batch_size)
            example = task.example(batch, use="train")
            loss = task.loss(engine.forward(*example.inputs), example.targets)
            engine.backward(loss)
            window.add(loss)
        lr = job.schedule(state.step)
        result = engine.step(lr=lr)
        window.end_step()

        state.step += 1
        state.images_seen += plan.global_batch_images
        state.skipped_in_a_row = 0 if result.applied else state.skipped_in_a_row + 1
        state.skipped_steps += not result.applied
        report.step(plan.global_batch_images)

        last = state.step == plan.total_steps
        if last or _due(state.step, every=plan.log_steps):
            _settle_faults(job, state)
            report.curve(state, loss=window.take_mean(ranks), lr=lr, grad_norm=result.grad_norm)
        if last or _due(state.step, every=plan.eval_steps):
            with report.aside():
                state.evaluation = job.evaluate()
            _settle_faults(job, state)
            report.evaluation(state)

        stopping = job.stop.agreed(ranks)
        if last or stopping or faults.complaint or _due(state.step, every=plan.save_steps):
            with report.aside():
                _settle_faults(job, state)
                state.losses_since_log = window.reduce(ranks)
                state.training_seconds = report.training_seconds
                job.save(state)
        if faults.complaint:
            raise UserError(faults.complaint)
        if state.skipped_in_a_row >= job.max_skipped_steps:
            raise TrainingFailed(
                f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (last loss at step "
                f"{state.step}): lower the learning rate, or lengthen the warm-up"
            )
        if stopping and not last:
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
