"""What the world gets to see of a stage: metrics.jsonl, MLflow and the progress bar, from rank 0 alone.

metrics.jsonl is the full record; MLflow is filled with the same values and may fail without harm. Times are measured
here: how long the loop waited for data, and images per second with evaluation and saving taken out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from data_shards.loading.batch import Fault
from pipeline.report.best import SCORES
from pipeline.report.metrics_log import MetricsLog
from pipeline.report.mlflow_store import Tracker
from pipeline.report.progress import Progress
from pipeline.report.spikes import Spike
from pipeline.state import TrainState

_NAMED_FAULTS = 10


class Sink(Protocol):
    """Where the values go; rank 0 has a `Recorder`, the others a `Silence`."""

    def metrics(self, state: TrainState, values: dict[str, float]) -> None:
        """Record values at the state's step."""
        ...

    def progress(self, state: TrainState, values: dict[str, float]) -> None:
        """Show values of the training curve."""
        ...

    def note(self, text: str) -> None:
        """Show a line."""
        ...


class Recorder:
    """Rank 0's sink: metrics.jsonl, MLflow and the screen."""

    def __init__(self, *, log: MetricsLog, tracker: Tracker, progress: Progress) -> None:
        self._log = log
        self._tracker = tracker
        self._progress = progress

    def metrics(self, state: TrainState, values: dict[str, float]) -> None:
        """See `Sink`."""
        row = self._log.append(step=state.step, images_seen=state.images_seen, metrics=values)
        self._tracker.log(row.step, row.images_seen, row.metrics, time_seconds=row.time)

    def progress(self, state: TrainState, values: dict[str, float]) -> None:
        """See `Sink`."""
        self._progress.update(
            state.step,
            loss=values["train/loss"],
            lr=values["opt/lr"],
            images_per_second=values["perf/images_per_s"],
            data_wait_share=values["perf/data_wait_frac"],
        )

    def note(self, text: str) -> None:
        """See `Sink`."""
        self._progress.note(text)


class Silence:
    """The other ranks' sink."""

    def metrics(self, state: TrainState, values: dict[str, float]) -> None:
        """See `Sink`."""

    def progress(self, state: TrainState, values: dict[str, float]) -> None:
        """See `Sink`."""

    def note(self, text: str) -> None:
        """See `Sink`."""


class Report:
    """What the loop tells of itself.

    Args:
        sink: where it goes.
        samples_per_epoch: to say the epoch.
        training_seconds: spent before this attempt.
    """

    def __init__(self, sink: Sink, *, samples_per_epoch: int, training_seconds: float) -> None:
        self._sink = sink
        self._samples_per_epoch = samples_per_epoch
        self._earlier_seconds = training_seconds
        self._start = self._window_start = time.perf_counter()
        self._waited_seconds = self._aside_seconds = 0.0
        self._images = self._named_faults = 0

    @property
    def training_seconds(self) -> float:
        """Seconds of this stage in all attempts, evaluation and saving included."""
        return self._earlier_seconds + self.attempt_seconds

    @property
    def attempt_seconds(self) -> float:
        """Of these, the present attempt's."""
        return time.perf_counter() - self._start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is spent waiting for a batch."""
        start = time.perf_counter()
        yield
        self._waited_seconds += time.perf_counter() - start

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time in here (evaluation, saving) does not count as training."""
        start = time.perf_counter()
        yield
        self._aside_seconds += time.perf_counter() - start

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
        seconds = max(1e-9, now - self._window_start - self._aside_seconds)
        values = {
            "train/loss": loss,
            "opt/lr": lr,
            "opt/grad_norm": grad_norm,
            "opt/skipped_steps": float(state.skipped_steps),
            "data/substituted_images": float(state.substituted_images),
            "train/epoch": state.images_seen / self._samples_per_epoch,
            "perf/images_per_s": self._images / seconds,
            "perf/data_wait_frac": min(1.0, self._waited_seconds / seconds),
            "perf/save_stall_frac": stall_seconds / max(1e-9, self.attempt_seconds),
        }
        if slowest_rank_ratio is not None:
            values["perf/slowest_rank_ratio"] = slowest_rank_ratio
        self._window_start, self._waited_seconds, self._aside_seconds, self._images = now, 0.0, 0.0, 0
        self._sink.metrics(state, values)
        self._sink.progress(state, values)

    def evaluation(self, state: TrainState) -> None:
        """The state's evaluation is new."""
        self._sink.metrics(state, state.evaluation)
        loss, images = state.evaluation["val/loss"], int(state.evaluation["val/images"])
        name, score = next((SCORES[key], value) for key, value in state.evaluation.items() if key in SCORES)
        self._sink.note(f"step {state.step}: held-out loss {loss:.4f}, {name} {score:.4f} of {images:,} images")

    def spikes(self, found: Sequence[Spike]) -> None:
        """Losses far above those before them."""
        for spike in found:
            self._sink.note(spike.describe())

    def faults(self, state: TrainState, new: Sequence[tuple[str, Fault]]) -> None:
        """Damaged images that were not known before; the first few are named on the screen."""
        for use, fault in new[: max(0, _NAMED_FAULTS - self._named_faults)]:
            done = "another one takes its place" if use == "train" else "it is left out"
            self._sink.note(
                f"step {state.step}: image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): {done}"
            )
        if self._named_faults < _NAMED_FAULTS <= self._named_faults + len(new):
            self._sink.note("more damaged images are listed in corrupt_samples.jsonl, and no longer here")
        self._named_faults += len(new)

    def note(self, text: str) -> None:
        """A line for the screen."""
        self._sink.note(text)
