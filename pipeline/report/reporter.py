"""Report a stage on rank 0: metrics.jsonl, events.jsonl, facts for MLflow, the progress bar, speed, data wait."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Fault
from shardvit.data_shards.text import counted
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState
from shardvit.pipeline.ranks.dead_ranks import peer_is_gone
from shardvit.pipeline.ranks.phases import Phases
from shardvit.pipeline.ranks.process import WORTH_A_WORD
from shardvit.pipeline.ranks.stopping import Stopped
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.vocabulary import EVENTS_FILE, METRICS, METRICS_FILE, StageName
from shardvit.pipeline.report.best import AVERAGES_SCORES, SCORES, show_score
from shardvit.pipeline.report.gauges import Gauges, peak_flops, stage_work
from shardvit.pipeline.report.losses import Spike
from shardvit.pipeline.report.progress import TrainingProgress
from shardvit.pipeline.runs.logs import EventKind, EventsLog, MetricsLog
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.stage_data import StageData
from shardvit.pipeline.tracking.describe import begin_attempt, end_attempt, plan_params, stage_datasets, try_writing
from shardvit.pipeline.tracking.environment import gpu_tag
from shardvit.pipeline.tracking.facts import DatasetInput, FinalStatus

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
    teacher_flops: int = 0,
) -> Iterator[Report]:
    """Open the report of a training stage; `tags` go to its MLflow run, `teacher_flops` are per image."""
    common: Any = {"phases": phases, "plan": plan, "earlier_seconds": state.training_seconds}
    if not context.ranks.place.is_main:
        yield Report(None, None, None, None, **common)
        return
    progress = TrainingProgress(
        stage,
        total_steps=plan.total_steps,
        start_step=state.step,
        images_per_step=plan.global_batch_images,
        limit=context.time_limit,
    )
    classes, on_gpu = data.train.num_classes, torch.cuda.is_available()
    gauges = Gauges(
        stage_work(context.recipe, stage=stage, plan=plan, num_classes=classes, teacher_flops=teacher_flops),
        processes=plan.world_size,
        peak=peak_flops(context.recipe.engine, gpu_name=torch.cuda.get_device_name() if on_gpu else None),
        on_gpu=on_gpu,
        process_seconds=state.process_seconds,
    )
    with (
        attempt_log(
            context,
            stage=stage,
            datasets=stage_datasets(data.train, data.eval, also_eval=data.also_eval),
            resume_step=state.step or -1,
            say=progress.note,
            params=plan_params(context.recipe, stage, plan=plan, classes=classes),
            tags=tags,
        ) as log,
        attempt_events(context, stage=stage, state=state, say=progress.note, last_step=log.last_step) as events,
        closing(Report(log, progress, events, gauges, step_logged=state.step, **common)) as report,
    ):
        yield report


@contextmanager
def attempt_events(
    context: StageContext, *, stage: StageName, state: TrainState, say: Say, last_step: int = 0
) -> Iterator[EventsLog]:
    """Open events.jsonl, and record this attempt's start and end from the current `state`; an earlier attempt had
    logged up to `last_step`."""
    place = context.ranks.place
    hosts = math.ceil(place.world_size / place.local_world_size)
    with EventsLog(context.folder.stage(stage) / EVENTS_FILE, say=say) as events:

        def tell(kind: EventKind, text: str) -> None:
            events.append(kind, text, step=state.step, images_seen=state.images_seen)

        where = f"{counted(place.world_size, 'process')} on {counted(hosts, 'host')}"
        job = context.job_tags.get("shardvit.slurm_job_id")
        where += f", SLURM job {job}" if job else ""
        where += f"; repeats {counted(last_step - state.step, 'step')}" if last_step > state.step else ""
        tell("start", f"from step {state.step:,}, {where}")
        try:
            yield events
        except BaseException as error:
            match error:
                case Stopped():
                    tell("stopped", f"by {context.stop.reason or 'a signal to another process'}, after saving")
                case RollBack():
                    tell("rollback", f"{error.trouble.why}: going back to before it, and past its batches")
                case UserError():
                    tell("failed", str(error))
                case _ if peer_is_gone(error):
                    tell("failed", "another process is gone")
                case _:
                    tell("failed", f"{type(error).__name__}: {error}")
            raise
        tell("done", f"after {state.step:,} steps" if state.step else "")


@contextmanager
def attempt_log(
    context: StageContext,
    *,
    stage: StageName,
    datasets: tuple[DatasetInput, ...] = (),
    resume_step: int = -1,
    say: Say = lambda text: print(text, file=sys.stderr, flush=True),
    params: Mapping[str, str] = MappingProxyType({}),
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[MetricsLog]:
    """Open metrics.jsonl from `resume_step` on (-1: anew); write facts for MLflow. OSError if the disk is full or
    fails."""
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
        except (Stopped, RollBack):
            status = "KILLED"
            raise
        finally:
            try_writing(lambda: end_attempt(folder, stage, status), say=say)
            if recipe.tracking.mode == "offline" and (status != "FINISHED" or folder.is_complete(recipe)):
                say(f"tracking: offline; `shardvit sync {folder.path}` sends the run")


@dataclass
class Report:
    """Receive the training loop's reports. The first four fields are None on ranks above 0."""

    log: MetricsLog | None
    progress: TrainingProgress | None
    events: EventsLog | None
    gauges: Gauges | None
    _: KW_ONLY
    phases: Phases
    plan: StagePlan
    earlier_seconds: float  # spent before this attempt
    step_logged: int = 0  # default step of events

    def __post_init__(self) -> None:
        self._start = self._window_start = time.perf_counter()
        self._images = self._named_faults = 0
        self._skipped: list[int] = []
        self._is_crowded = False

    @property
    def training_seconds(self) -> float:
        """Seconds in all attempts, including evaluation and saving."""
        return self.earlier_seconds + self.attempt_seconds

    @property
    def process_seconds(self) -> float:
        """Process-seconds in all attempts; 0 above rank 0."""
        return 0.0 if self.gauges is None else self.gauges.process_seconds

    @property
    def attempt_seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self, images: int) -> None:
        self._images += images
        if self.gauges is not None:
            self.gauges.step_done(aside_seconds=self.phases.aside_seconds)

    def skipped(self, step: int) -> None:
        """Record a step, from 1, with non-finite gradients."""
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
        """Log a point of the curve and start a new window. `loss`: mean since the last point; `more`: other metrics;
        `stall_seconds`: waits for checkpoints in this attempt; `slowest_rank_ratio`: None with nothing to compare."""
        self._tell_skipped()
        now = time.perf_counter()
        spent = self.phases.take_seconds()
        seconds = max(1e-9, now - self._window_start - spent["evaluating"] - spent["saving"])
        speed, data_wait = self._images / seconds, min(1.0, spent["reading"] / seconds)
        values = {
            "train/loss": loss,
            "opt/lr": lr,
            "opt/grad_norm": grad_norm,
            **more,
            "opt/skipped_steps": float(state.skipped_steps),
            "opt/passed_over_steps": float(sum(step < state.step for step in state.passed_over)),
            "data/substituted_images": float(state.substituted_images),
            "train/epoch": state.images_seen / self.plan.samples_per_epoch,
            "perf/images_per_s": speed,
            "perf/data_wait_frac": data_wait,
            "perf/save_stall_frac": stall_seconds / max(1e-9, self.attempt_seconds),
        }
        if slowest_rank_ratio is not None:
            values["perf/slowest_rank_ratio"] = slowest_rank_ratio
        if self.gauges is not None:
            values |= self.gauges.read(step=state.step, images_per_second=speed)
        self._window_start, self._images = now, 0
        self._record(state, values)
        waits = f"data wait {data_wait:.1%}"
        share, threads = values.get("perf/core_wait_frac", 0.0), torch.get_num_threads()
        if threads > 1 and share > WORTH_A_WORD:  # a single thread cannot be reduced
            waits += f" | core wait {share:.0%}"
            if not self._is_crowded:
                self.note(
                    f"this process's threads wait {share:.0%} of their time for a core: fewer than torch's {threads} "
                    "(OMP_NUM_THREADS), or fewer other programs on this machine, may be faster"
                )
            self._is_crowded = True
        if self.progress is not None:
            self.progress.update(state.step, loss=loss, lr=lr, images_per_second=speed, waits=waits)

    def evaluation(self, state: TrainState) -> None:
        found = state.evaluation
        self._record(state, found)
        own = next((key for key in found if key in SCORES), "")  # a masked autoencoder has none
        shown = "".join(f", {show_score(found, key)}" for key in [own] if key)
        said = f"held-out loss {found['val/loss']:.4f}{shown} of {found['val/images']:,.0f} images"
        if "val/ema_loss" in found:
            shown = "".join(f", {show_score(found, key)}" for key in found if key in AVERAGES_SCORES)
            said += f"; moving average: loss {found['val/ema_loss']:.4f}{shown}"
        for key in found:
            group, _, metric = key.partition("/")
            if group.startswith("val_") and (f"val/{metric}" in SCORES or (not own and metric == "loss")):
                said += f"; {group.removeprefix('val_')}: {show_score(found, key)}"
            if group == "val" and key not in METRICS and not metric.startswith(("ema_", "fewshot_")):  # the user's own
                said += f"; {metric} {found[key]:.4f}"
        self.note(f"step {state.step}: {said}", kind="evaluation")

    def own(self, state: TrainState, values: Mapping[str, float]) -> None:
        """Record what a callback logs."""
        self._record(state, dict(values))

    def spikes(self, found: Sequence[Spike]) -> None:
        for spike in found:
            self.note(spike.describe(), kind="spike", step=spike.step)

    def faults(self, state: TrainState, new: Sequence[tuple[str, Fault]]) -> None:
        """Record newly found damaged images; name only the first few."""
        for use, fault in new[: max(0, _NAMED_FAULTS - self._named_faults)]:
            done = "another one takes its place" if use == "train" else "it is left out"
            said = f"image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): {done}"
            self.note(f"step {state.step}: {said}", kind="damaged_image", step=state.step)
        if self._named_faults < _NAMED_FAULTS <= self._named_faults + len(new):
            self.note("more damaged images are listed in corrupt_samples.jsonl, and no longer here")
        self._named_faults += len(new)

    def note(self, text: str, *, kind: EventKind = "note", step: int | None = None) -> None:
        """Print a line and record it as an event. Thread-safe."""
        if self.progress is not None:
            self.progress.note(text)
        self.event(kind, text, step=step)

    def event(self, kind: EventKind, text: str, *, step: int | None = None) -> None:
        """Record an event, by default at the last logged step, without printing. Thread-safe."""
        if self.events is not None:
            step = self.step_logged if step is None else step
            self.events.append(kind, text, step=step, images_seen=step * self.plan.global_batch_images)

    def close(self) -> None:
        """Flush what is pending. Idempotent."""
        self._tell_skipped()
        if self.progress is not None:
            self.progress.close()

    def _tell_skipped(self) -> None:
        if self._skipped:
            text = f"{_ranges(self._skipped)}: gradients that were not finite"
            self.event("skipped", text, step=self._skipped[-1])
            self._skipped.clear()

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        self.step_logged = state.step
        if self.log is not None:
            self.log.append(step=state.step, images_seen=state.images_seen, metrics=values)


def _ranges(steps: Sequence[int]) -> str:
    """Format increasing steps: `step 3, steps 7 to 9`."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return ", ".join(f"step {first}" if first == last else f"steps {first} to {last}" for first, last in runs)
