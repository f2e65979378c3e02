"""Rank 0's report of a stage: metrics.jsonl, events.jsonl, facts for MLflow, and the progress bar.

Only on rank 0. Also measured here: how long the loop waited for data, and images/s without evaluation and saving.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch

from data_shards.errors import UserError
from data_shards.loading.batch import Fault
from data_shards.text import counted
from pipeline.checkpoint.train_state import RollBack, TrainState
from pipeline.ranks.dead_ranks import peer_is_gone
from pipeline.ranks.phases import Phases
from pipeline.ranks.process import WORTH_A_WORD
from pipeline.ranks.stopping import Stopped
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import EVENTS_FILE, METRICS_FILE, StageName
from pipeline.report.best import AVERAGES_SCORES, SCORES, show_score
from pipeline.report.gauges import Gauges, peak_flops, stage_work
from pipeline.report.losses import Spike
from pipeline.report.progress import TrainingProgress
from pipeline.runs.logs import EventKind, EventsLog, MetricsLog
from pipeline.stage.context import StageContext
from pipeline.stage.stage_data import StageData
from pipeline.tracking.describe import begin_attempt, end_attempt, plan_params, stage_datasets, try_writing
from pipeline.tracking.environment import gpu_tag
from pipeline.tracking.facts import DatasetInput, FinalStatus

Say = Callable[[str], None]

_NAMED_FAULTS = 10


@contextmanager
def stage_report(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    state: TrainState,
    phases: Phases,
    tags: Mapping[str, str],
) -> Iterator[Report]:
    """The report of one training stage, whose MLflow run has `tags`, too; closed as finished, killed (`Stopped`) or
    failed."""
    if not context.ranks.place.is_main:
        yield Report(None, None, None, None, phases=phases, plan=plan, training_seconds=state.training_seconds)
        return
    progress = TrainingProgress(
        stage,
        total_steps=plan.total_steps,
        start_step=state.step,
        images_per_step=plan.global_batch_images,
        limit=context.time_limit,
    )
    on_gpu = torch.cuda.is_available()
    gauges = Gauges(
        stage_work(context.recipe, stage=stage, plan=plan, num_classes=data.train.num_classes),
        processes=plan.world_size,
        peak=peak_flops(context.recipe.engine, gpu_name=torch.cuda.get_device_name() if on_gpu else None),
        on_gpu=on_gpu,
        process_seconds=state.process_seconds,
    )
    with (
        tracked_log(
            context,
            stage=stage,
            datasets=stage_datasets(data.train, data.eval, also_eval=data.also_eval),
            resume_step=state.step or -1,
            say=progress.note,
            params=plan_params(context.recipe, stage, plan=plan, classes=data.train.num_classes),
            tags=tags,
        ) as log,
        told_events(context, stage=stage, state=state, say=progress.note) as events,
    ):
        report = Report(
            log, progress, events, gauges, phases=phases, plan=plan, training_seconds=state.training_seconds
        )
        report.at(state)
        try:
            yield report
        finally:
            report.close()


@contextmanager
def told_events(context: StageContext, *, stage: StageName, state: TrainState, say: Say) -> Iterator[EventsLog]:
    """A stage's events.jsonl, with this attempt's start and end; `state`: where it stands."""
    place = context.ranks.place
    hosts = math.ceil(place.world_size / place.local_world_size)
    with EventsLog(context.folder.stage(stage) / EVENTS_FILE, say=say) as events:

        def tell(kind: EventKind, text: str) -> None:
            events.append(kind, text, step=state.step, images_seen=state.images_seen)

        where = f"{counted(place.world_size, 'process')} on {counted(hosts, 'host')}"
        job = context.job_tags.get("shardvit.slurm_job_id")
        tell("start", f"from step {state.step:,}, {where}" + (f", SLURM job {job}" if job else ""))
        try:
            yield events
        except Stopped:
            tell("stopped", f"by {context.stop.reason or 'a signal to another process'}, after saving")
            raise
        except RollBack as back:
            tell("rollback", f"{back.trouble.why}: going back to before it, and past its batches")
            raise
        except BaseException as error:
            tell("failed", _why(error))
            raise
        tell("done", f"after {state.step:,} steps" if state.step else "")


@contextmanager
def tracked_log(
    context: StageContext,
    *,
    stage: StageName,
    datasets: tuple[DatasetInput, ...] = (),
    resume_step: int = -1,
    say: Say = lambda text: print(text, file=sys.stderr, flush=True),
    params: Mapping[str, str] = MappingProxyType({}),
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[MetricsLog]:
    """A stage's metrics.jsonl from a step on (-1: anew), and what its MLflow run is to know of this attempt.
    OSError: the disk is full or fails."""
    recipe, folder = context.recipe, context.folder
    with MetricsLog(folder.stage(stage) / METRICS_FILE, resume_step=resume_step) as log:
        if log.dropped_broken_rows:
            print(f"{log.path}: {log.dropped_broken_rows} unreadable rows were dropped", file=sys.stderr)
        place = context.ranks.place
        all_tags = {"shardvit.world_size": str(place.world_size), **context.job_tags, **gpu_tag(), **tags}
        begin = partial(begin_attempt, folder, recipe, stage, from_step=max(0, resume_step), kept_rows=log.kept_rows)
        try_writing(lambda: begin(params=params, datasets=datasets, tags=all_tags), say=say)
        status: FinalStatus = "FAILED"
        try:
            yield log
            status = "FINISHED"
        except (Stopped, RollBack):  # it goes on later, or at once
            status = "KILLED"
            raise
        finally:
            try_writing(lambda: end_attempt(folder, stage, status), say=say)
            if recipe.tracking.mode == "offline" and (status != "FINISHED" or folder.is_complete(recipe)):
                say(f"MLflow: offline; `shardvit sync {folder.path}` sends the run")


class Report:
    """The training loop's reports.

    Args:
        log: takes the values; None on ranks above 0.
        progress: shows them; None: nobody.
        events: take what happens; None on ranks above 0.
        gauges: measure speed and cost; None on ranks above 0.
        training_seconds: spent before this attempt.
    """

    def __init__(
        self,
        log: MetricsLog | None,
        progress: TrainingProgress | None,
        events: EventsLog | None,
        gauges: Gauges | None,
        *,
        phases: Phases,
        plan: StagePlan,
        training_seconds: float,
    ) -> None:
        self.phases = phases
        self._log = log
        self._progress = progress
        self._events = events
        self._gauges = gauges
        self._plan = plan
        self._earlier_seconds = training_seconds
        self._start = self._window_start = time.perf_counter()
        self._images = self._named_faults = self._step = 0
        self._skipped: list[int] = []
        self._is_crowded = False

    @property
    def training_seconds(self) -> float:
        """Seconds of this stage in all attempts, including evaluation and saving."""
        return self._earlier_seconds + self.attempt_seconds

    @property
    def process_seconds(self) -> float:
        """The same times the processes of each attempt; 0 above rank 0."""
        return 0.0 if self._gauges is None else self._gauges.process_seconds

    @property
    def attempt_seconds(self) -> float:
        return time.perf_counter() - self._start

    def at(self, state: TrainState) -> None:
        """Where training stands, for what has no step of its own."""
        self._step = state.step

    def step(self, images: int) -> None:
        """A step over so many images, on all ranks together, is done."""
        self._images += images
        if self._gauges is not None:
            self._gauges.step_done(aside_seconds=self.phases.aside_seconds)

    def skipped(self, step: int) -> None:
        """The gradients of `step`, from 1, were not finite."""
        self._skipped.append(step)

    def curve(
        self,
        state: TrainState,
        *,
        loss: float,
        more: Mapping[str, float],
        lr: float,
        grad_norm: float,
        slowest_rank_ratio: float | None,
        stall_seconds: float,
    ) -> None:
        """A point of the training curve, with the mean `loss` since the last one; starts a new window of times. `more`:
        other values, by metric; `slowest_rank_ratio` None: nothing to compare; `stall_seconds`: of this attempt,
        waiting for checkpoints."""
        self._tell_skipped()
        now = time.perf_counter()
        spent = self.phases.take_seconds()
        seconds = max(1e-9, now - self._window_start - spent["evaluating"] - spent["saving"])
        values = {
            "train/loss": loss,
            "opt/lr": lr,
            "opt/grad_norm": grad_norm,
            **more,
            "opt/skipped_steps": float(state.skipped_steps),
            "opt/passed_over_steps": float(sum(step < state.step for step in state.passed_over)),
            "data/substituted_images": float(state.substituted_images),
            "train/epoch": state.images_seen / self._plan.samples_per_epoch,
            "perf/images_per_s": self._images / seconds,
            "perf/data_wait_frac": min(1.0, spent["reading"] / seconds),
            "perf/save_stall_frac": stall_seconds / max(1e-9, self.attempt_seconds),
        }
        if slowest_rank_ratio is not None:
            values["perf/slowest_rank_ratio"] = slowest_rank_ratio
        if self._gauges is not None:
            values |= self._gauges.read(step=state.step, images_per_second=values["perf/images_per_s"])
        self._window_start, self._images = now, 0
        self._record(state, values)
        waits = f"data wait {values['perf/data_wait_frac']:.1%}"
        share, threads = values.get("perf/core_wait_frac", 0.0), torch.get_num_threads()
        if threads > 1 and share > WORTH_A_WORD:  # one could not be fewer
            waits += f" | core wait {share:.0%}"
            if not self._is_crowded:
                self.note(
                    f"this process's threads wait {share:.0%} of their time for a core: fewer than torch's {threads} "
                    "(OMP_NUM_THREADS), or fewer other programs on this machine, may be faster"
                )
            self._is_crowded = True
        if self._progress is not None:
            speed = values["perf/images_per_s"]
            self._progress.update(state.step, loss=loss, lr=lr, images_per_second=speed, waits=waits)

    def evaluation(self, state: TrainState) -> None:
        found = state.evaluation
        self._record(state, found)
        own = next(key for key in found if key in SCORES)
        average = "".join(
            f"; moving average: loss {found['val/ema_loss']:.4f}, {show_score(found, key)}"
            for key in found
            if key in AVERAGES_SCORES
        )
        more = "".join(
            f"; {key.removeprefix('val_').partition('/')[0]}: {show_score(found, key)}"
            for key in found
            if key.startswith("val_") and f"val/{key.partition('/')[2]}" in SCORES
        )
        held_out = (
            f"held-out loss {found['val/loss']:.4f}, {show_score(found, own)} of {found['val/images']:,.0f} images"
        )
        self.note(f"step {state.step}: {held_out}{average}{more}", kind="evaluation")

    def spikes(self, found: Sequence[Spike]) -> None:
        for spike in found:
            self.note(spike.describe(), kind="spike", step=spike.step)

    def faults(self, state: TrainState, new: Sequence[tuple[str, Fault]]) -> None:
        """Newly found damaged images; the first few are named on the screen."""
        for use, fault in new[: max(0, _NAMED_FAULTS - self._named_faults)]:
            done = "another one takes its place" if use == "train" else "it is left out"
            self.note(
                f"step {state.step}: image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): {done}",
                kind="damaged_image",
                step=state.step,
            )
        if self._named_faults < _NAMED_FAULTS <= self._named_faults + len(new):
            self.note("more damaged images are listed in corrupt_samples.jsonl, and no longer here")
        self._named_faults += len(new)

    def note(self, text: str, *, kind: EventKind = "note", step: int | None = None) -> None:
        """A line on the screen and an event. Thread-safe."""
        if self._progress is not None:
            self._progress.note(text)
        self.event(kind, text, step=step)

    def event(self, kind: EventKind, text: str, *, step: int | None = None) -> None:
        """Record an event at a step, by default the last logged one; not on the screen. Thread-safe."""
        if self._events is not None:
            step = self._step if step is None else step
            self._events.append(kind, text, step=step, images_seen=step * self._plan.global_batch_images)

    def close(self) -> None:
        """Write what is pending. Closing twice is harmless."""
        self._tell_skipped()
        if self._progress is not None:
            self._progress.close()

    def _tell_skipped(self) -> None:
        if self._skipped:
            text = f"{_ranges(self._skipped)}: gradients that were not finite"
            self.event("skipped", text, step=self._skipped[-1])
            self._skipped.clear()

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        self.at(state)
        if self._log is not None:
            self._log.append(step=state.step, images_seen=state.images_seen, metrics=values)


def _why(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if peer_is_gone(error):
        return "another process is gone"
    return f"{type(error).__name__}: {error}"


def _ranges(steps: Sequence[int]) -> str:
    """Increasing steps: `step 3, steps 7 to 9`."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return ", ".join(f"step {first}" if first == last else f"steps {first} to {last}" for first, last in runs)
