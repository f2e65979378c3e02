"""A stage's metrics.jsonl (the full record), MLflow (filled from it; may fail without harm) and progress bar.

Only on rank 0. Also measured here: how long the loop waited for data, and images/s without evaluation and saving.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from data_shards.loading.batch import Fault
from pipeline.context import StageContext
from pipeline.metrics_log import MetricsLog, open_metrics_log
from pipeline.ranks.phases import Phases
from pipeline.ranks.stopping import Stopped
from pipeline.recipe.io import flatten
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.best import AVERAGES_SCORES, SCORES
from pipeline.report.losses import Spike
from pipeline.report.progress import TrainingProgress
from pipeline.rollback import GoBack
from pipeline.stage_data import StageData
from pipeline.state import TrainState
from pipeline.tracking.mlflow_store import Say, TrackerSettings, open_tracker
from pipeline.tracking.runs import DatasetInput
from pipeline.tracking.tracking_thread import FinalStatus
from pipeline.vocabulary import CORRUPT_SAMPLES_FILE, METRICS_FILE, RECIPE_FILE, StageName

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
    samples, seconds = plan.samples_per_epoch, state.training_seconds
    if not context.ranks.place.is_main:
        yield Report(None, None, phases=phases, samples_per_epoch=samples, training_seconds=seconds)
        return
    datasets = tuple(
        DatasetInput(name=shards.name, source=shards.source, digest=shards.digest, context=use)
        for shards, use in ((data.train, "train"), (data.eval, "eval"))
    )
    progress = TrainingProgress(
        stage, total_steps=plan.total_steps, start_step=state.step, images_per_step=plan.global_batch_images
    )
    with tracked_log(
        context, stage=stage, datasets=datasets, resume_step=state.step or -1, say=progress.note, tags=tags
    ) as log:
        try:
            yield Report(log, progress, phases=phases, samples_per_epoch=samples, training_seconds=seconds)
        finally:
            progress.close()


@contextmanager
def tracked_log(
    context: StageContext,
    *,
    stage: StageName,
    datasets: tuple[DatasetInput, ...] = (),
    resume_step: int = -1,
    say: Say | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[MetricsLog]:
    """A stage's metrics.jsonl from a step on (-1: anew) and its MLflow run, which is told how the stage ended.
    OSError: the disk is full or fails."""
    recipe, folder = context.recipe, context.folder
    with open_metrics_log(folder.stage(stage) / METRICS_FILE, resume_step=resume_step) as log:
        if log.dropped_broken_rows:
            print(f"{log.path}: {log.dropped_broken_rows} unreadable rows were dropped", file=sys.stderr)
        tracker = open_tracker(
            TrackerSettings(
                runs_root=folder.runs_root,
                run_dir=folder.path,
                sweep=folder.sweep,
                pipeline=recipe.name,
                stage=stage,
                params=flatten(recipe),
                recipe_file=folder.path / RECIPE_FILE,
                datasets=datasets,
                tags={"shardvit.world_size": str(context.ranks.place.world_size), **context.job_tags, **tags},
                tracking_uri=context.tracking.uri,
                experiment=context.tracking.experiment,
            ),
            log=log,
            say=say,
        )
        status: FinalStatus = "FAILED"
        try:
            yield log
            status = "FINISHED"
        except (Stopped, GoBack):  # it goes on later, or at once
            status = "KILLED"
            raise
        finally:
            faults = folder.stage(stage) / CORRUPT_SAMPLES_FILE
            tracker.close(
                status,
                finish_parent=status != "FINISHED" or folder.is_complete(recipe),
                files=[faults] if faults.exists() else [],
            )


class Report:
    """What the training loop reports.

    Args:
        log: takes the values; None on ranks above 0.
        progress: shows them; None: nobody.
        samples_per_epoch: for train/epoch.
        training_seconds: spent before this attempt.
    """

    def __init__(
        self,
        log: MetricsLog | None,
        progress: TrainingProgress | None,
        *,
        phases: Phases,
        samples_per_epoch: int,
        training_seconds: float,
    ) -> None:
        self.phases = phases
        self._log = log
        self._progress = progress
        self._samples_per_epoch = samples_per_epoch
        self._earlier_seconds = training_seconds
        self._start = self._window_start = time.perf_counter()
        self._images = self._named_faults = 0

    @property
    def training_seconds(self) -> float:
        """Seconds of this stage in all attempts, including evaluation and saving."""
        return self._earlier_seconds + self.attempt_seconds

    @property
    def attempt_seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self, images: int) -> None:
        """A step over so many images, on all ranks together, is done."""
        self._images += images

    def curve(
        self,
        state: TrainState,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        slowest_rank_ratio: float | None,
        stall_seconds: float,
    ) -> None:
        """A point of the training curve, with the mean `loss` since the last one; starts a new window of times.
        `slowest_rank_ratio` None: nothing to compare; `stall_seconds`: of this attempt, waiting for checkpoints."""
        now = time.perf_counter()
        spent = self.phases.take_seconds()
        seconds = max(1e-9, now - self._window_start - spent["evaluating"] - spent["saving"])
        values = {
            "train/loss": loss,
            "opt/lr": lr,
            "opt/grad_norm": grad_norm,
            "opt/skipped_steps": float(state.skipped_steps),
            "opt/passed_over_steps": float(sum(step < state.step for step in state.passed_over)),
            "data/substituted_images": float(state.substituted_images),
            "train/epoch": state.images_seen / self._samples_per_epoch,
            "perf/images_per_s": self._images / seconds,
            "perf/data_wait_frac": min(1.0, spent["reading"] / seconds),
            "perf/save_stall_frac": stall_seconds / max(1e-9, self.attempt_seconds),
        }
        if slowest_rank_ratio is not None:
            values["perf/slowest_rank_ratio"] = slowest_rank_ratio
        self._window_start, self._images = now, 0
        self._record(state, values)
        if self._progress is not None:
            self._progress.update(
                state.step,
                loss=loss,
                lr=lr,
                images_per_second=values["perf/images_per_s"],
                data_wait_share=values["perf/data_wait_frac"],
            )

    def evaluation(self, state: TrainState) -> None:
        self._record(state, state.evaluation)
        loss, images = state.evaluation["val/loss"], int(state.evaluation["val/images"])
        name, score = next((SCORES[key], value) for key, value in state.evaluation.items() if key in SCORES)
        average = "".join(
            f"; moving average: loss {state.evaluation['val/ema_loss']:.4f}, {AVERAGES_SCORES[key]} {value:.4f}"
            for key, value in state.evaluation.items()
            if key in AVERAGES_SCORES
        )
        self.note(f"step {state.step}: held-out loss {loss:.4f}, {name} {score:.4f} of {images:,} images{average}")

    def spikes(self, found: Sequence[Spike]) -> None:
        for spike in found:
            self.note(spike.describe())

    def faults(self, state: TrainState, new: Sequence[tuple[str, Fault]]) -> None:
        """Newly found damaged images; the first few are named on the screen."""
        for use, fault in new[: max(0, _NAMED_FAULTS - self._named_faults)]:
            done = "another one takes its place" if use == "train" else "it is left out"
            self.note(f"step {state.step}: image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): {done}")
        if self._named_faults < _NAMED_FAULTS <= self._named_faults + len(new):
            self.note("more damaged images are listed in corrupt_samples.jsonl, and no longer here")
        self._named_faults += len(new)

    def note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.note(text)

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        if self._log is not None:
            self._log.append(step=state.step, images_seen=state.images_seen, metrics=values)
