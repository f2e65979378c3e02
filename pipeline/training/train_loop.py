"""THE loop. One optimizer step per turn, read from top to bottom: batch, forward, loss, backward, step, what is due.

All it needs is in the `TrainJob`; it knows the engine only through its protocol and writes nothing itself. Batches and
randomness are functions of the step, so resuming at step k is the same as never having stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from data_shards.errors import UserError
from data_shards.loading.device_prefetch import Batches
from model.vit import set_patch_dropout
from pipeline.checkpoint.saver import CheckpointSaver
from pipeline.checkpoint.train_state import TrainState, seed_step
from pipeline.engine.late_metrics import LateMetrics, StepOutcome
from pipeline.engine.protocol import Engine
from pipeline.ranks.group import Ranks
from pipeline.ranks.phases import Phase
from pipeline.ranks.stopping import Requests, StopOrSave, Stopped
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.losses import LossWindow, Spike, SpikeFinder
from pipeline.report.reporter import Report
from pipeline.stage.damage import FaultLedger
from pipeline.stage.dropout_masks import draw_masks
from pipeline.stage.rollback import GoBack, Trouble
from pipeline.stage.task import Task


class TrainingFailed(Exception):
    """Training cannot go on, or was in vain; the message says why and what was saved."""


@dataclass(frozen=True)
class TrainJob:
    """The parts of one stage's training, ready to run."""

    plan: StagePlan  # steps, batch sizes, learning rates, what is due when, and when to give up
    batches: Batches  # this rank's micro-batches, from the state's step on
    task: Task  # micro-batch -> inputs and targets -> loss
    engine: Engine  # forward, backward, step
    evaluate: Callable[[int], dict[str, float]]  # step (for the heartbeat) -> held-out metrics by name; collective
    saver: CheckpointSaver  # writes checkpoints, perhaps in the background
    faults: FaultLedger  # damaged images so far, and their limit
    report: Report  # metrics.jsonl, MLflow, the screen; silent above rank 0
    ranks: Ranks  # the process group
    requests: Requests  # of any rank: stop, or save

    def phase(self, name: Phase, step: int) -> AbstractContextManager[None]:
        """Runs its block as that phase of a step: timed, and told to the watch that looks for hangs."""
        return self.report.phases(name, step=step)


def train(job: TrainJob, state: TrainState) -> TrainState:
    """Train from `state` to the end of the plan; collective.

    Raises:
        Stopped: by a signal, after saving.
        GoBack: the recipe says to go back to a checkpoint before these steps, and past their batches.
        TrainingFailed: too many steps in a row had gradients that were not finite, or too many rollbacks; or, after
            saving, a rank is too slow and the recipe says to stop then.
        UserError: more images are damaged than the recipe allows (after saving), or a checkpoint cannot be written.
        SaveFailed: the disk failed while a checkpoint was written; retrying may help.
    """
    plan, task, engine, rank = job.plan, job.task, job.engine, job.ranks.place.rank
    if job.faults.complaint:  # of an earlier attempt
        raise UserError(job.faults.complaint)
    if state.step == plan.total_steps and (failure := _failure(job, state)):  # it had failed at its last step
        raise failure
    losses, spikes = LossWindow(state.losses_since_log, state.scores_since_log), _spike_finder(plan, state)
    passed_over, late = frozenset(state.passed_over), LateMetrics(device=engine.device)
    engine.module.train()

    while state.step < plan.total_steps:
        step, lr = state.step, plan.schedule(state.step)
        seed_step(plan.seed, step=step, rank=rank)
        if plan.patch_dropout:
            set_patch_dropout(engine.module, plan.patch_dropout if step < plan.patch_dropout_steps else 0.0)

        if step in passed_over:  # after a rollback; the batches come without it
            losses.pass_over(device=engine.device)
            result = engine.pass_over(flags=job.requests.mine)
        else:
            for micro_step in range(plan.accumulation_steps):
                with job.phase("reading", step):
                    batch = next(job.batches)
                job.faults.note(batch, use="train", rows=plan.micro_batch_size)
                example = task.example(batch, use="train")
                draw_masks(engine, plan=plan, step=step, place=plan.first_place(rank=rank, micro_step=micro_step))
                with job.phase("forward", step):
                    outputs = engine.forward(*example.inputs)
                loss = task.loss(outputs, example.targets)
                with job.phase("backward", step):
                    engine.backward(loss)
                losses.add(loss, task.train_score(outputs, example.targets))
            with job.phase("step", step):
                measure = "norms" if plan.logs_after(step + 1) else "nothing"
                result = engine.step(lr=lr, flags=job.requests.mine, measure=measure)
            losses.end_step()
            job.report.step(plan.global_batch_images)
        state.advance(images=plan.global_batch_images)
        late.put(state.step, result)
        if job.saver.poll():
            job.report.phases.pace.disturbed()

        _settle(job, state, late.ready())  # of the steps before: no step waits for its own numbers
        agreed, is_last = job.requests.agreed(state.step), state.step == plan.total_steps
        if is_last or any(agreed) or plan.reads_after(state.step) or _skips_may_be_too_many(plan, state, late=late):
            _settle(job, state, late.drain())  # now the state is exact
        slow_rank, spiked = "", list[Spike]()
        if plan.logs_after(state.step) or _skips_too_long(plan, state):
            slow_rank, spiked = _log(job, state, losses=losses, spikes=spikes, lr=lr, grad_norm=late.grad_norm)
        if trouble := _trouble(job, state, spiked=spiked):
            with job.phase("saving", state.step):
                job.saver.finish()
            raise trouble
        if plan.evaluates_after(state.step):
            _evaluate(job, state)

        is_end = bool(is_last or agreed.stop or slow_rank or job.faults.complaint)
        if is_end or agreed.save or plan.saves_after(state.step):
            _save(job, state, losses=losses)
        # Skipped steps alone ask for no checkpoint: an earlier one is to be gone back to.
        failure = _failure(job, state, slow_rank="" if is_last else slow_rank)
        if is_end or failure:
            with job.phase("saving", state.step):
                job.saver.finish()
        if failure:
            raise failure
        if agreed.stop and not is_last:
            raise Stopped
    return state


def _settle(job: TrainJob, state: TrainState, outcomes: Sequence[StepOutcome]) -> None:
    """Take in what has become of steps: applied or skipped, and what the ranks requested in them."""
    for outcome in outcomes:
        if outcome.step - 1 not in state.passed_over:
            state.settle(applied=outcome.applied)
            if not outcome.applied:
                job.report.skipped(outcome.step)
        job.requests.heard(outcome.step, StopOrSave(*outcome.flags))


def _skips_may_be_too_many(plan: StagePlan, state: TrainState, *, late: LateMetrics) -> bool:
    """Whether training would have to end, or go back, if the steps still to be settled were skipped."""
    most = min(plan.max_skipped_steps, plan.rollback.after_skipped_steps if plan.rollback else plan.max_skipped_steps)
    return state.skipped_in_a_row + late.pending >= most


def _log(
    job: TrainJob, state: TrainState, *, losses: LossWindow, spikes: SpikeFinder, lr: float, grad_norm: float
) -> tuple[str, list[Spike]]:
    """Report a point of the training curve; returns a sentence if training must stop for a slow rank, and spikes."""
    _settle_faults(job, state)
    new, measured = losses.take(job.ranks), job.engine.measured()
    passed_over, first = set(state.passed_over), state.step - len(new.losses) + 1
    by_step = {step: loss for step, loss in enumerate(new.losses, start=first) if step - 1 not in passed_over}
    if scores := [score for score in new.scores if not math.isnan(score)]:
        measured[job.task.train_metric] = sum(scores) / len(scores)
    slowest = job.report.phases.slowest(job.ranks)
    if by_step:
        job.report.curve(
            state,
            loss=sum(by_step.values()) / len(by_step),
            more=measured,
            lr=lr,
            grad_norm=grad_norm,
            slowest_rank_ratio=slowest.ratio if slowest else None,
            stall_seconds=job.saver.stall_seconds,
        )
    spiked = spikes.look(by_step)
    job.report.spikes(spiked)
    state.recent_losses = spikes.recent_losses
    if slowest is None:
        return "", spiked
    if slowest.is_news:
        job.report.note(f"step {state.step}: {slowest.describe()}", kind="slow_rank", step=state.step)
    return slowest.describe() if slowest.may_stop and job.plan.slow_rank == "stop" else "", spiked


def _spike_finder(plan: StagePlan, state: TrainState) -> SpikeFinder:
    if plan.rollback and plan.rollback.spike_sigmas:
        return SpikeFinder(state.recent_losses, sigmas=plan.rollback.spike_sigmas)
    return SpikeFinder(state.recent_losses)


def _skips_too_long(plan: StagePlan, state: TrainState) -> bool:
    return plan.rollback is not None and state.skipped_in_a_row >= plan.rollback.after_skipped_steps


def _trouble(job: TrainJob, state: TrainState, *, spiked: Sequence[Spike]) -> Exception | None:
    """Why the run must go back, if the recipe says so: at the first of the steps found, so that the result does not
    depend on how often the curve is logged."""
    rollback = job.plan.rollback
    if rollback is None:
        return None
    found: list[Trouble] = []
    if rollback.spike_sigmas:  # of a loss that is not finite the step was skipped
        found += [Trouble(each.step - 1, each.step - 1, each.describe()) for each in spiked if math.isfinite(each.loss)]
    if _skips_too_long(job.plan, state):
        why = f"step {state.step}: {state.skipped_in_a_row} steps in a row had gradients that are not finite"
        found.append(Trouble(state.step - state.skipped_in_a_row, state.step - 1, why))
    if not found:
        return None
    first = min(found, key=lambda trouble: trouble.first)
    if state.rollbacks < rollback.times:
        return GoBack(first)
    saved = f"step {job.requests.saved_step}" if job.requests.saved_step else "nothing"
    return TrainingFailed(
        f"{first.why}, after {state.rollbacks} rollbacks (rollback.times; {saved} is saved): lower the stage's "
        "optimizer.lr or lengthen its schedule.warmup, then use --restart"
    )


def _evaluate(job: TrainJob, state: TrainState) -> None:
    with job.phase("evaluating", state.step):
        state.evaluation, state.evaluation_step = job.evaluate(state.step), state.step
    _settle_faults(job, state)
    job.report.evaluation(state)


def _save(job: TrainJob, state: TrainState, *, losses: LossWindow) -> None:
    """Save a checkpoint, or begin to; `saver` decides which."""
    with job.phase("saving", state.step):
        _settle_faults(job, state)
        means = losses.reduce(job.ranks)
        state.losses_since_log, state.scores_since_log = means.losses, means.scores
        state.training_seconds, state.process_seconds = job.report.training_seconds, job.report.process_seconds
        job.saver.save(state)
    job.requests.saved(state.step)


def _failure(job: TrainJob, state: TrainState, *, slow_rank: str = "") -> Exception | None:
    """Why training must stop, if it must; the damage limit may have been exceeded while saving."""
    if job.faults.complaint:
        return UserError(job.faults.complaint)
    if state.skipped_in_a_row >= job.plan.max_skipped_steps:
        saved = f"step {job.requests.saved_step}" if job.requests.saved_step else "nothing"
        return TrainingFailed(
            f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (the last is {state.step}, "
            f"{saved} is saved): lower the stage's optimizer.lr or lengthen its schedule.warmup, then use --restart"
        )
    if slow_rank:
        return TrainingFailed(f"{slow_rank}; everything up to step {state.step} is saved (engine.slow_rank: stop)")
    return None


def _settle_faults(job: TrainJob, state: TrainState) -> None:
    settled = job.faults.settle(job.ranks)
    state.substituted_images += settled.substituted_images
    job.report.faults(state, settled.new)
