"""Decide what follows an optimizer step, one decision per method: settle, log, roll back, evaluate, save, stop.

A step's numbers arrive one step late (`late_metrics`), so no step waits for them. Whatever reads the state (a log, a
checkpoint, a decision to end) waits until it is exact.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.device_prefetch import Batches
from shardvit.pipeline.checkpoint.saver import CheckpointSaver
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState, Trouble
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.late_metrics import LateMetrics, StepOutcome
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.phases import Phase
from shardvit.pipeline.ranks.stopping import Requests, StopOrSave, Stopped
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.report.losses import SIGMAS, LossWindow, Spike, SpikeFinder
from shardvit.pipeline.report.reporter import Report
from shardvit.pipeline.stage.damage import FaultLedger
from shardvit.pipeline.stage.task import Task
from shardvit.pipeline.training.callbacks import Callbacks, When


class TrainingFailed(Exception):
    """Training cannot continue, or its result is worthless; says why and what was saved."""


@dataclass(frozen=True)
class TrainJob:
    """Parts of one stage's training."""

    plan: StagePlan  # steps, batch sizes, learning rates, what is due when, and when to give up
    batches: Batches  # this rank's micro-batches, from the state's step on
    task: Task  # micro-batch -> inputs and targets -> loss
    engine: Engine  # forward, backward, step
    evaluate: Callable[[int], dict[str, float]]  # step -> held-out metrics by name; collective
    saver: CheckpointSaver  # writes checkpoints, in the background if asked to
    faults: FaultLedger  # damaged images so far, and their limit
    report: Report  # metrics.jsonl, events and the screen; silent above rank 0
    ranks: Ranks  # the process group
    requests: Requests  # of any rank: stop, or save
    evaluates_first: bool = False  # also before the first step: loaded weights
    callbacks: Callbacks = field(default_factory=Callbacks)  # the user's own

    @property
    def flags(self) -> StopOrSave:
        """This rank's, to send with a step."""
        return self.requests.mine._replace(is_saving=self.saver.is_busy)

    def phase(self, name: Phase, step: int) -> AbstractContextManager[None]:
        """Time a block as a phase of a step, and report it to the hang watch."""
        return self.report.phases(name, step=step)


class AfterStep:
    """Called after each step of a training; collective. `losses`: since the last point of the curve.

    Raises:
        Stopped: by a signal, after saving.
        RollBack: resume from before these steps and skip their batches.
        TrainingFailed: too many skipped steps in a row, too many rollbacks, or (after saving) a rank is too slow.
        UserError: too many damaged images (after saving), or a checkpoint cannot be written.
        SaveFailed: the disk failed while writing a checkpoint; retrying may help.
    """

    def __init__(self, job: TrainJob, state: TrainState) -> None:
        self._job, self._state, self._plan = job, state, job.plan
        self._slow_rank = ""  # why a slow rank ends the run
        if job.faults.complaint:  # of an earlier attempt
            raise UserError(job.faults.complaint)
        if state.step == job.plan.total_steps and (failure := self._failure()):  # failed at the last step
            raise failure
        # A task may have more than `train_metric`.
        self._scores: tuple[str, ...] = (job.task.train_metric, *getattr(job.task, "more_train_metrics", ()))
        self.losses = LossWindow(state.losses_since_log, state.scores_since_log, scores_per_step=len(self._scores))
        rollback = job.plan.rollback
        self._spikes = SpikeFinder(state.recent_losses, sigmas=(rollback and rollback.spike_sigmas) or SIGMAS)
        self._late = LateMetrics(device=job.engine.device)

    def __call__(self, numbers: Tensor, *, lr: float) -> None:
        job, state, plan = self._job, self._state, self._plan
        state.advance(images=plan.global_batch_images)
        self._late.put(state.step, numbers)
        self._settle(self._late.ready())  # of the steps before
        agreed, is_last = job.requests.agreed(state.step), state.step == plan.total_steps
        if job.saver.poll(state.step, others="busy" if agreed.is_saving else "done"):
            job.report.phases.disturbed()

        if is_last or agreed.stop or agreed.save or plan.reads_after(state.step) or self._skips_may_be_too_many:
            self._settle(self._late.drain())  # now the state is exact
        spiked = self._log(lr=lr) if plan.logs_after(state.step) or self._skips_too_long else []
        self._roll_back_after(spiked)
        self._tell("after_step")
        if plan.evaluates_after(state.step):
            self.evaluate()
        if is_last:
            self._slow_rank = ""  # a slow rank must not end a finished stage
        is_end = bool(is_last or agreed.stop or self._slow_rank or job.faults.complaint)
        if is_end or agreed.save or plan.saves_after(state.step):
            self._save()
        # Skipped steps alone save no checkpoint: we roll back to an earlier one instead.
        failure = self._failure()
        if is_end or failure:
            self._finish_saving()
        if failure:
            raise failure
        if agreed.stop and not is_last:
            raise Stopped

    def _settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count applied and skipped steps, and read the ranks' requests."""
        for outcome in outcomes:
            if outcome.step - 1 not in self._state.passed_over:
                self._state.settle(applied=outcome.applied)
                if not outcome.applied:
                    self._job.report.skipped(outcome.step)
            self._job.requests.heard(outcome.step, StopOrSave(*outcome.flags))

    @property
    def _skips_may_be_too_many(self) -> bool:
        """True if skipping all unsettled steps would make us give up or roll back."""
        plan, most = self._plan, self._plan.max_skipped_steps
        if plan.rollback:
            most = min(most, plan.rollback.after_skipped_steps)
        return self._state.skipped_in_a_row + self._late.pending >= most

    @property
    def _skips_too_long(self) -> bool:
        rollback = self._plan.rollback
        return rollback is not None and self._state.skipped_in_a_row >= rollback.after_skipped_steps

    def _log(self, *, lr: float) -> list[Spike]:
        """Report a point of the training curve, compare the ranks' speed, and return spikes since the last point."""
        job, state = self._job, self._state
        self._settle_faults()
        new, measured = self.losses.take(job.ranks), job.engine.measured()
        passed_over, first = set(state.passed_over), state.step - len(new.losses) + 1
        by_step = {step: loss for step, loss in enumerate(new.losses, start=first) if step - 1 not in passed_over}
        for number, name in enumerate(self._scores):
            if scores := [score for score in new.scores[number :: len(self._scores)] if not math.isnan(score)]:
                measured[name] = sum(scores) / len(scores)
        slowest = job.report.phases.slowest(job.ranks)
        if by_step:
            loss = sum(by_step.values()) / len(by_step)
            state.curve = {"train/loss": loss, "opt/lr": lr, "opt/grad_norm": self._late.grad_norm, **measured}
            job.report.curve(
                state,
                loss=loss,
                more=measured,
                lr=lr,
                grad_norm=self._late.grad_norm,
                slowest_rank_ratio=slowest.ratio if slowest else None,
                stall_seconds=job.saver.stall_seconds,
            )
        spiked = self._spikes.look(by_step)
        job.report.spikes(spiked)
        state.recent_losses = self._spikes.recent_losses
        if slowest and slowest.is_news:
            job.report.note(f"step {state.step}: {slowest.describe()}", kind="slow_rank", step=state.step)
        stops = slowest and slowest.may_stop and self._plan.slow_rank == "stop"
        self._slow_rank = slowest.describe() if slowest and stops else ""
        return spiked

    def _roll_back_after(self, spiked: Sequence[Spike]) -> None:
        """Roll back if asked to, to before the first trouble, so that the result does not depend on log_every."""
        state, rollback = self._state, self._plan.rollback
        if rollback is None:
            return
        found: list[Trouble] = []
        if rollback.spike_sigmas:  # steps with a loss that is not finite were skipped
            found = [
                Trouble(each.step - 1, each.step - 1, each.describe()) for each in spiked if math.isfinite(each.loss)
            ]
        if self._skips_too_long:
            why = f"step {state.step}: {state.skipped_in_a_row} steps in a row had gradients that are not finite"
            found.append(Trouble(state.step - state.skipped_in_a_row, state.step - 1, why))
        if not found:
            return
        self._finish_saving()
        first = min(found, key=lambda trouble: trouble.first)
        if state.rollbacks < rollback.times:
            raise RollBack(first)
        raise TrainingFailed(
            f"{first.why}, after {state.rollbacks} rollbacks (rollback.times; {self._saved} is saved): lower the "
            "stage's optimizer.lr or lengthen its schedule.warmup, then use --restart"
        )

    def evaluate(self) -> None:
        """Measure the held-out sets at the state's step."""
        job, state = self._job, self._state
        with job.phase("evaluating", state.step):
            state.evaluation, state.evaluation_step = job.evaluate(state.step), state.step
        self._settle_faults()
        job.report.evaluation(state)
        self._tell("after_evaluation")

    def _save(self) -> None:
        job, state = self._job, self._state
        self._tell("before_saving")
        with job.phase("saving", state.step):
            self._settle_faults()
            state.own = job.callbacks.states()
            means = self.losses.reduce(job.ranks)
            state.losses_since_log, state.scores_since_log = means.losses, means.scores
            state.training_seconds, state.process_seconds = job.report.training_seconds, job.report.process_seconds
            job.saver.save(state)
        job.requests.saved(state.step)

    def _tell(self, when: When) -> None:
        job, state = self._job, self._state
        if job.callbacks.called:
            job.engine.settle()
            job.callbacks.tell(
                when,
                log=lambda values: job.report.own(state, values),
                ask=job.requests.ask,
                step=state.step,
                total_steps=self._plan.total_steps,
                images_seen=state.images_seen,
                rank=job.ranks.place.rank,
                curve=dict(state.curve),
                evaluation=dict(state.evaluation),
                model=job.engine.module,
            )

    def _finish_saving(self) -> None:
        with self._job.phase("saving", self._state.step):
            self._job.saver.finish()

    def _failure(self) -> Exception | None:
        """Why training must stop, if it must; saving may have found more damage."""
        job, state = self._job, self._state
        if job.faults.complaint:
            return UserError(job.faults.complaint)
        if state.skipped_in_a_row >= self._plan.max_skipped_steps:
            return TrainingFailed(
                f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (the last is {state.step}, "
                f"{self._saved} is saved): lower the stage's optimizer.lr or lengthen its schedule.warmup, then use "
                "--restart"
            )
        if self._slow_rank:
            return TrainingFailed(
                f"{self._slow_rank}; everything up to step {state.step} is saved (engine.slow_rank: stop)"
            )
        return None

    @property
    def _saved(self) -> str:
        step = self._job.requests.saved_step
        return f"step {step}" if step else "nothing"

    def _settle_faults(self) -> None:
        settled = self._job.faults.settle(self._job.ranks)
        self._state.substituted_images += settled.substituted_images
        self._job.report.faults(self._state, settled.new)
