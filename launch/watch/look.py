"""Collect a run's current state for `watch`: files, rank heartbeats and SLURM's queue.

Files may be half written, damaged or hostile: `notes` lists what cannot be read. A refresh reads new rows and events,
and a heartbeat file per rank; on SLURM a thread calls squeue every 30 seconds.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import open_inside
from shardvit.launch.slurm.commands import Queued, Slurm
from shardvit.launch.slurm.records import Submission, read_ends, read_submission
from shardvit.pipeline.ranks.heartbeat import Heartbeat, Sightings, heartbeat_file, read_heartbeat
from shardvit.pipeline.ranks.stopping import requeues_needed
from shardvit.pipeline.recipe.vocabulary import SWEEP_FILE
from shardvit.pipeline.report.progress import RecentSpeed
from shardvit.pipeline.runs.logs import Event
from shardvit.pipeline.runs.read import SUBMITTED_RECIPE, RunReader, RunStage
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord

_SPEED_WINDOW_SECONDS = 1800.0
_QUEUE_SECONDS = 30.0
_SILENT_SECONDS = 60.0  # ranks beat every 2 seconds, less often if there are many
_BEATS_PER_SECOND = 32  # over all ranks, see `pipeline.ranks.watch`
_LOG_BYTES = 16_384
_MOST_RANKS = 100_000
_SCORES = (
    *("val/top1", "val/accuracy", "val/precision_at_1", "val/mean_average_precision"),
    *("train/top1", "train/accuracy"),
)

StageState = Literal["waits", "running", "stopped", "failed", "interrupted", "done"]
"""stopped: by a signal, after saving; interrupted: its processes vanished, as after a kill."""
Found = TypeVar("Found")
RankState = Literal["runs", "dead", "silent", "failed", "left"]


@dataclass(frozen=True)
class RankView:
    """A rank's state from its heartbeat."""

    beat: Heartbeat
    state: RankState
    idle_seconds: float  # without progress
    silent_seconds: float  # without a heartbeat


@dataclass(frozen=True)
class StageView:
    """A stage with its processes and SLURM job."""

    on_disk: RunStage
    state: StageState
    step: int
    total_steps: int  # 0: unknown or none
    eta_seconds: float  # NaN: unknown
    ranks: Sequence[RankView]
    job: str  # SLURM's job number
    queued: Queued | None  # the job's state in SLURM
    requeues: int | None  # needed until done; None: unknown
    last_end: str

    @property
    def name(self) -> str:
        return self.on_disk.name

    @property
    def score(self) -> tuple[str, list[tuple[int, float]]]:
        """The first score with a curve, else with a point; ("", []) if none."""
        curves = [(name, self.on_disk.points(name)) for name in _SCORES]
        return next(((name, points) for least in (2, 1) for name, points in curves if len(points) >= least), ("", []))

    def as_tree(self) -> dict[str, Any]:
        """Return the fields of `--json`; None: unknown."""
        queued, stage = self.queued or Queued(""), self.on_disk
        return {
            "stage": self.name,
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps or None,
            "eta_seconds": None if math.isnan(self.eta_seconds) else self.eta_seconds,
            "restarts": stage.restarts,
            "saved_step": stage.record.last_saved_step,
            "saved_seconds_ago": stage.checkpoint_age_seconds,
            "job": self.job,
            "queue": queued.state,
            "reason": queued.reason,
            "nodes": queued.nodes,
            "left_seconds": queued.left_seconds,
            "last_end": self.last_end,
            "requeues_needed": self.requeues,
        }


@dataclass(frozen=True)
class RunView:
    """A run; `current` is the stage shown in detail, `log` the last lines of its `log_file`."""

    path: Path
    stages: tuple[StageView, ...]
    current: StageView | None
    log: tuple[str, ...] = ()
    log_file: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return bool(self.stages) and all(stage.state == "done" for stage in self.stages)


class Watcher:
    """Follow the run in the folder `run`; UserError if it is no run."""

    def __init__(self, run: Path, *, slurm: Slurm, monotonic: Callable[[], float] = time.monotonic) -> None:
        if (run / SWEEP_FILE).is_file():
            raise UserError(f"{run} is a sweep: follow one of its runs, such as {run}/final, or give --once")
        self._folder = RunFolder(runs_root=run.parent, name=run.name)
        if not self._is_there():
            raise UserError(f"{run} is no run: give the folder RUNS/NAME of one, for instance runs/digits")
        self._reader = RunReader(self._folder)
        self._queue = _Queue(slurm, monotonic=monotonic)
        self._sightings: dict[str, Sightings] = {}
        self._monotonic = monotonic

    def look(self, *, queue: Literal["wait for it", "as known"] = "as known") -> RunView:
        """Read the run's current state; UserError if it is gone."""
        if not self._is_there():
            raise UserError(f"{self._folder.path} is gone: the run was deleted, moved or renamed")
        run = self._reader.read()
        notes = list(run.notes)
        submission = _or_none(lambda: read_submission(self._folder.path / "slurm"), notes)
        jobs = {} if submission is None else submission.jobs
        queued = self._queue.of(jobs.values(), wait=queue == "wait for it")
        if self._queue.problem:
            notes.append(f"the queue is unknown: {self._queue.problem}")
        stages = tuple(self._stage(each, submission, queued, notes) for each in run.stages)
        current = _current(stages)
        log_file = None if current is None else self._folder.path / "slurm" / f"{current.name}.log"
        log = () if log_file is None else last_lines(log_file)
        return RunView(self._folder.path, stages, current, log, log_file if log else None, tuple(dict.fromkeys(notes)))

    def _is_there(self) -> bool:
        return self._folder.is_begun() or (self._folder.path / SUBMITTED_RECIPE).exists()

    def _stage(
        self, stage: RunStage, submission: Submission | None, queue: dict[str, Queued], notes: list[str]
    ) -> StageView:
        record, ranks = stage.record, self._ranks(stage)
        state = _state(record, ranks=ranks, events=stage.events)
        total, job = record.total_steps, ""
        if submission is not None:
            total, job = total or submission.total_steps.get(stage.name, 0), submission.jobs.get(stage.name, "")
        eta, queued, requeues = math.nan, queue.get(job), None
        if total and state == "running":
            speed = RecentSpeed(_SPEED_WINDOW_SECONDS)
            for row in stage.rows:
                speed.add(row.step, row.time)
            eta = speed.seconds_left(total)
        if submission and queued and queued.left_seconds is not None and not math.isnan(eta):
            limit = max(1, submission.limit_seconds)
            requeues = requeues_needed(eta, left_seconds=queued.left_seconds, limit_seconds=limit)
        ends = _or_none(lambda: read_ends(self._folder.path / "slurm", stage.name), notes)
        return StageView(
            stage,
            state,
            step=max([record.last_saved_step, *(row.step for row in stage.rows)]),
            total_steps=total,
            eta_seconds=eta,
            ranks=ranks,
            job=job,
            queued=queued,
            requeues=requeues,
            last_end=ends[-1].sentence if ends else "",
        )

    def _ranks(self, stage: RunStage) -> tuple[RankView, ...]:
        """Read heartbeats from rank 0 up to the first missing file; keeps those of rank 0's attempt."""
        folder, now = stage.folder / "ranks", self._monotonic()
        sightings = self._sightings.setdefault(stage.name, Sightings())
        beats: list[Heartbeat] = []
        for rank in range(_MOST_RANKS):
            try:
                age = time.time() - heartbeat_file(folder, rank).stat().st_mtime
            except OSError:
                break
            beat = read_heartbeat(folder, rank)
            if beat is None or not _is_sound(beat, rank=rank):
                continue  # torn or damaged
            if sightings.of(rank) is None:  # first sighting: date it by its file
                sightings.note(beat, now=now - max(0.0, age))
            sightings.note(beat, now=now)
            beats.append(beat)
        limit = max(_SILENT_SECONDS, 4 * len(beats) / _BEATS_PER_SECOND)
        found: list[RankView] = []
        for beat in beats:
            if beat.attempt == beats[0].attempt:
                silent = sightings.silent_seconds(beat.rank, now=now)
                state: RankState = "silent" if silent > limit else "runs"
                if beat.state != "running":
                    state = "left" if beat.state == "left" else "failed"
                elif beat.is_gone:
                    state = "dead"
                found.append(RankView(beat, state, sightings.idle_seconds(beat.rank, now=now), silent))
        return tuple(found)


def _current(stages: Sequence[StageView]) -> StageView | None:
    begun = [stage for stage in stages if stage.state != "waits"]
    not_done = [stage for stage in begun if stage.state != "done"]
    with_curve = [stage for stage in reversed(begun) if "train/loss" in stage.on_disk.latest]
    return next(iter([*not_done, *with_curve, *begun, *stages]), None)


def _or_none(read: Callable[[], Found], notes: list[str]) -> Found | None:
    try:
        return read()
    except (UserError, OSError) as error:
        notes.append(str(error))
        return None


def _is_sound(beat: Heartbeat, *, rank: int) -> bool:
    """True if it is this rank's and has the right types: files are untrusted."""
    texts = (beat.attempt, beat.host, beat.machine, beat.status, beat.state, beat.note)
    numbers, idle = (beat.pid, beat.sequence, beat.step, beat.turn), beat.idle_seconds
    has_types = all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in numbers)
    return beat.rank == rank and has_types and isinstance(idle, int | float) and math.isfinite(idle)


def _state(record: StageRecord, *, ranks: Sequence[RankView], events: Sequence[Event]) -> StageState:
    if record.state == "done":
        return "done"
    if any(rank.state == "runs" for rank in ranks):
        return "running"
    if record.state == "new":
        return "waits"
    last = next((event.kind for event in reversed(events) if event.kind in ("start", "stopped", "failed")), "start")
    if last == "start":
        return "interrupted" if ranks else "running"
    return "stopped" if last == "stopped" else "failed"


class _Queue:
    """Query SLURM's queue in a thread, so that an unresponsive cluster does not block the page."""

    def __init__(self, slurm: Slurm, *, monotonic: Callable[[], float]) -> None:
        self._slurm, self._monotonic = slurm, monotonic
        self._known: dict[str, Queued] = {}
        self._asked_at = -math.inf
        self._thread: threading.Thread | None = None
        self.problem = ""

    def of(self, jobs: Iterable[str], *, wait: bool) -> dict[str, Queued]:
        asked = list(jobs)
        busy = self._thread is not None and self._thread.is_alive()
        if asked and not busy and self._monotonic() - self._asked_at >= _QUEUE_SECONDS:
            self._asked_at = self._monotonic()
            self._thread = threading.Thread(target=self._ask, args=(asked,), daemon=True, name="queue")
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        return self._known

    def _ask(self, jobs: list[str]) -> None:
        try:
            known = self._slurm.queue(jobs)
            ended = self._slurm.history(set(jobs) - set(known))  # squeue forgets jobs after minutes
            self._known, self.problem = known | {job: Queued(state) for job, state in ended.items()}, ""
        except UserError as error:
            self.problem = str(error)


def last_lines(path: Path, *, most: int = 50) -> tuple[str, ...]:
    """Read the last non-empty lines of RUN/slurm/NAME, only the last state of progress bars; () if unreadable."""
    try:
        with open_inside(path, folder=path.parent.parent) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple([line for line in lines if line][-most:])
