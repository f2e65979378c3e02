"""What a stage shows of itself: metrics.jsonl, MLflow and the progress bar, from rank 0 alone.

metrics.jsonl is the full record, and MLflow is filled from it, which may fail without harm. Times are measured here:
how long the loop waited for data, and images per second without evaluation and saving.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from data_shards.loading.batch import Fault
from pipeline.context import StageContext
from pipeline.ranks.phases import Phases
from pipeline.ranks.stopping import Stopped
from pipeline.recipe.io import flatten
from pipeline.recipe.schema import StageName
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.best import SCORES
from pipeline.report.losses import Spike
from pipeline.report.metrics_log import MetricsLog, open_metrics_log
from pipeline.report.mlflow_store import DatasetInput, Say, TrackerSettings, open_tracker
from pipeline.report.progress import TrainingProgress
from pipeline.report.tracking_thread import FinalStatus
from pipeline.stage_data import StageData
from pipeline.state import TrainState
from pipeline.vocabulary import CORRUPT_SAMPLES_FILE, METRICS_FILE, RECIPE_FILE

_NAMED_FAULTS = 10


@contextmanager
def stage_report(
    context: StageContext, *, stage: StageName, data: StageData, plan: StagePlan, state: TrainState, phases: Phases
) -> Iterator[Report]:
    """The report of one training stage; closed as finished, killed (`Stopped`) or failed."""
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
    with tracked_log(context, stage=stage, datasets=datasets, resume_step=state.step or -1, say=progress.note) as log:
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
) -> Iterator[MetricsLog]:
    """metrics.jsonl of one stage, from a step on (-1: anew), and MLflow's run of it, which is told how the stage ended.

    Raises:
        OSError: the disk is full or fails.
    """
    recipe, folder = context.recipe, context.folder
    with open_metrics_log(folder.stage(stage) / METRICS_FILE, resume_step=resume_step) as log:
        if log.dropped_broken_rows:
            print(f"{log.path}: {log.dropped_broken_rows} unreadable rows were dropped", file=sys.stderr)
        tracker = open_tracker(
            TrackerSettings(
                runs_root=folder.runs_root,
                run_dir=folder.path,
                pipeline=recipe.name,
                stage=stage,
                params=flatten(recipe),
                recipe_file=folder.path / RECIPE_FILE,
                datasets=datasets,
                tags={"shardvit.world_size": str(context.ranks.place.world_size), **context.job_tags},
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
        except Stopped:
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
        log: takes the values; None, on the ranks above 0: nobody.
        progress: shows them; None: nobody.
        phases: what this rank is doing, with its times.
        samples_per_epoch: to say the epoch.
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
        """Seconds of this stage in all attempts, evaluation and saving included."""
        return self._earlier_seconds + self.attempt_seconds

    @property
    def attempt_seconds(self) -> float:
        """Of these, those of this attempt."""
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
        """A point of the training curve; the window of the times ends here.

        Args:
            state: the position.
            loss: mean since the last point.
            lr: of the last step.
            grad_norm: of the last step.
            slowest_rank_ratio: its own part of a step over the median rank's; None: there is nothing to compare.
            stall_seconds: in which this attempt stood still for its checkpoints, in all.
        """
        now = time.perf_counter()
        spent = self.phases.take_seconds()
        seconds = max(1e-9, now - self._window_start - spent["evaluating"] - spent["saving"])
        values = {
            "train/loss": loss,
            "opt/lr": lr,
            "opt/grad_norm": grad_norm,
            "opt/skipped_steps": float(state.skipped_steps),
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
        """The state's evaluation is new."""
        self._record(state, state.evaluation)
        loss, images = state.evaluation["val/loss"], int(state.evaluation["val/images"])
        name, score = next((SCORES[key], value) for key, value in state.evaluation.items() if key in SCORES)
        self.note(f"step {state.step}: held-out loss {loss:.4f}, {name} {score:.4f} of {images:,} images")

    def spikes(self, found: Sequence[Spike]) -> None:
        """Losses far above those before them."""
        for spike in found:
            self.note(spike.describe())

    def faults(self, state: TrainState, new: Sequence[tuple[str, Fault]]) -> None:
        """Damaged images that were not known before; the first few are named on the screen."""
        for use, fault in new[: max(0, _NAMED_FAULTS - self._named_faults)]:
            done = "another one takes its place" if use == "train" else "it is left out"
            self.note(f"step {state.step}: image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): {done}")
        if self._named_faults < _NAMED_FAULTS <= self._named_faults + len(new):
            self.note("more damaged images are listed in corrupt_samples.jsonl, and no longer here")
        self._named_faults += len(new)

    def note(self, text: str) -> None:
        """A line for the screen."""
        if self._progress is not None:
            self._progress.note(text)

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        if self._log is not None:
            self._log.append(step=state.step, images_seen=state.images_seen, metrics=values)
