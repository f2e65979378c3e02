"""What a run's folder says now: read again and again, only what is new of its curves.

All that is read may be half written, damaged or hostile: what cannot be read is left out and named in `notes`. Costs,
per look, the new lines of the curves, the events where there are new ones, a heartbeat file of each rank, and for a
run on SLURM one squeue every 30 seconds, in a thread of its own.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.safe_paths import open_inside
from launch.slurm.commands import Queued, Slurm
from launch.slurm.records import Submission, read_ends, read_submission
from launch.slurm.status import SPEED_WINDOW_SECONDS, checkpoint_age
from pipeline.ranks.heartbeat import Heartbeat, Sightings, heartbeat_file, read_heartbeat
from pipeline.ranks.stopping import requeues_needed
from pipeline.recipe.io import parse_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import (
    ALL_STAGES,
    EVENTS_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    STAGE_FILE,
    SWEEP_FILE,
    StageName,
)
from pipeline.report.progress import RecentSpeed
from pipeline.runs.events import Event, read_events
from pipeline.runs.metrics_log import follow_metrics
from pipeline.runs.run_folder import RunFolder, StageRecord

_QUEUE_SECONDS = 30.0
_SILENT_SECONDS = 60.0  # a heartbeat comes every 2 seconds, or of many ranks less often
_BEATS_PER_SECOND = 32  # of all ranks together, see `pipeline.ranks.watch`
_LOG_BYTES = 16_384
_MOST_RANKS = 100_000
_SCORES = (
    *("val/top1", "val/accuracy", "val/precision_at_1", "val/mean_average_precision"),
    *("train/top1", "train/accuracy"),
)

StageState = Literal["waits", "running", "stopped", "failed", "interrupted", "done"]
"""stopped: by a signal, after saving; interrupted: its processes are gone without a word, as after a kill."""
RankState = Literal["runs", "dead", "silent", "failed", "left"]


@dataclass(frozen=True)
class RankView:
    """A process, by its heartbeat."""

    name: str
    state: RankState
    step: int
    status: str
    idle_seconds: float  # without progress
    silent_seconds: float  # without a heartbeat
    note: str


@dataclass(frozen=True)
class StageView:
    """One stage; `values`: the last of each metric."""

    name: StageName
    state: StageState
    step: int
    total_steps: int  # 0: not known, or it has none
    eta_seconds: float  # nan: unknown
    saved_step: int
    saved_seconds_ago: float | None
    restarts: int
    values: Mapping[str, float] = field(default_factory=dict)
    loss: Sequence[tuple[int, float]] = ()
    score: Sequence[tuple[int, float]] = ()
    score_name: str = ""
    events: Sequence[Event] = ()
    ranks: Sequence[RankView] = ()
    job: str = ""  # SLURM's number
    queued: Queued | None = None  # what SLURM says of it
    requeues: int | None = None  # until it is done; None: unknown
    last_end: str = ""


@dataclass(frozen=True)
class RunView:
    """A run; `current`: the stage that is looked at closely. `log`: its last lines, `log_file`: of what."""

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
    """Looks at the run in the folder `run`; UserError: it is none."""

    def __init__(self, run: Path, *, slurm: Slurm, monotonic: Callable[[], float] = time.monotonic) -> None:
        if (run / SWEEP_FILE).is_file():
            raise UserError(f"{run} is a sweep: watch one of its runs, such as {run}/final, or see shardvit status")
        if not _is_run(run):
            raise UserError(f"{run} is no run: give the folder RUNS/NAME of one, for instance runs/digits")
        self._folder = RunFolder(runs_root=run.parent, name=run.name)
        self._queue = _Queue(slurm, monotonic=monotonic)
        self._stages: dict[StageName, _Follower] = {}
        self._monotonic = monotonic

    def look(self, *, queue: Literal["wait for it", "as known"] = "as known") -> RunView:
        """The run as it is now; UserError: it is gone."""
        if not _is_run(self._folder.path):
            raise UserError(f"{self._folder.path} is gone: the run was deleted, moved or renamed")
        notes: list[str] = []
        submission = self._submission(notes)
        jobs = {} if submission is None else submission.jobs
        queued = self._queue.of(jobs.values(), wait=queue == "wait for it")
        if self._queue.problem:
            notes.append(f"the queue is unknown: {self._queue.problem}")
        recipe = self._recipe(notes)
        stages = tuple(
            self._stages.setdefault(name, _Follower(self._folder, name, monotonic=self._monotonic)).look(
                notes,
                job=jobs.get(name, ""),
                queued=queued.get(jobs.get(name, "")),
                submission=submission,
            )
            for name in [
                n for n in ALL_STAGES if n in ((recipe and recipe.stages.names) or ()) or self._folder.stage(n).is_dir()
            ]
        )
        begun = [stage for stage in stages if stage.state != "waits"]
        open_ones = [stage for stage in begun if stage.state != "done"]
        current = next(iter([*open_ones, *reversed([each for each in begun if each.loss]), *begun, *stages]), None)
        log_file = None if current is None else self._folder.path / "slurm" / f"{current.name}.log"
        log = () if log_file is None else last_lines(log_file)
        return RunView(self._folder.path, stages, current, log, log_file if log else None, tuple(dict.fromkeys(notes)))

    def _submission(self, notes: list[str]) -> Submission | None:
        try:
            return read_submission(self._folder.path / "slurm")
        except (UserError, OSError) as error:
            notes.append(str(error))
            return None

    def _recipe(self, notes: list[str]) -> Recipe | None:
        for path in (self._folder.path / RECIPE_FILE, self._folder.path / "slurm" / RECIPE_FILE):
            if path.exists():
                try:
                    return parse_recipe(path)
                except (UserError, OSError, ValueError, RecursionError) as error:
                    notes.append(str(error))
        return None


def _is_run(path: Path) -> bool:
    """Begun, or submitted."""
    names = (RECIPE_FILE, f"slurm/{RECIPE_FILE}", *(f"{each}/{STAGE_FILE}" for each in ALL_STAGES))
    return any((path / name).exists() for name in names)


class _Follower:
    """One stage: keeps what was read of it."""

    def __init__(self, folder: RunFolder, name: StageName, *, monotonic: Callable[[], float]) -> None:
        self._folder, self._monotonic = folder, monotonic
        self._name: StageName = name
        self._sightings = Sightings()
        self._events: tuple[Event, ...] = ()
        self._events_stamp: tuple[int, int] | None = None
        self._forget_curve()

    def _forget_curve(self) -> None:
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0  # in bytes
        self._step = 0
        self._speed = RecentSpeed(SPEED_WINDOW_SECONDS)
        self._values: dict[str, float] = {}
        self._curves: dict[str, list[tuple[int, float]]] = {name: [] for name in ("train/loss", *_SCORES)}

    def look(self, notes: list[str], *, job: str, queued: Queued | None, submission: Submission | None) -> StageView:
        record = self._folder.peek(self._name)
        try:
            self._folder.record(self._name)
        except UserError as error:
            notes.append(str(error))
        self._read_curve(notes)
        self._read_events()
        ranks = self._ranks()
        total = record.total_steps
        if not total and submission is not None:
            total = submission.total_steps.get(self._name, 0)
        state = _state(record, ranks=ranks, events=self._events)
        eta = self._speed.seconds_left(total) if total and state == "running" else math.nan
        requeues = None
        if submission and queued and queued.left_seconds is not None and not math.isnan(eta):
            left, limit = queued.left_seconds, max(1, submission.limit_seconds)
            requeues = requeues_needed(eta, left_seconds=left, limit_seconds=limit)
        score = next((name for least in (2, 1) for name in _SCORES if len(self._curves[name]) >= least), "")
        return StageView(
            name=self._name,
            state=state,
            step=max(self._step, record.last_saved_step),
            total_steps=total,
            eta_seconds=eta,
            saved_step=record.last_saved_step,
            saved_seconds_ago=checkpoint_age(self._folder, self._name),
            restarts=max(0, sum(event.kind == "start" for event in self._events) - 1),
            values=dict(self._values),
            loss=tuple(self._curves["train/loss"]),
            score=tuple(self._curves[score]) if score else (),
            score_name=score,
            events=self._events,
            ranks=ranks,
            job=job,
            queued=queued,
            requeues=requeues,
            last_end=self._last_end(notes),
        )

    def _read_curve(self, notes: list[str]) -> None:
        path = self._folder.stage(self._name) / METRICS_FILE
        try:
            stat = path.stat()
            # A resumed stage replaces the file by one without what it will do again.
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset:
                self._forget_curve()
                self._file = (stat.st_dev, stat.st_ino)
            for row, offset in follow_metrics(path, offset=self._offset):
                self._offset = offset
                self._step = max(self._step, row.step)
                self._speed.add(row.step, row.time)
                self._values |= row.metrics
                for name, points in self._curves.items():
                    if name in row.metrics:
                        points.append((row.step, row.metrics[name]))
        except FileNotFoundError:
            pass
        except OSError as error:
            notes.append(f"{path} cannot be read ({error.strerror})")

    def _read_events(self) -> None:
        path = self._folder.stage(self._name) / EVENTS_FILE
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
            if stamp != self._events_stamp:
                self._events, self._events_stamp = tuple(read_events(path)), stamp
        except OSError:
            pass

    def _ranks(self) -> tuple[RankView, ...]:
        """Of the last attempt: those whose files follow one another from rank 0 on."""
        folder, now = self._folder.ranks(self._name), self._monotonic()
        beats: list[Heartbeat] = []
        for rank in range(_MOST_RANKS):
            try:
                age = time.time() - heartbeat_file(folder, rank).stat().st_mtime
            except OSError:
                break
            beat = read_heartbeat(folder, rank)
            if beat is None or not _is_sound(beat, rank=rank):
                continue  # torn, or damaged
            if self._sightings.of(rank) is None:  # seen for the first time: as old as its file
                self._sightings.note(beat, now=now - max(0.0, age))
            self._sightings.note(beat, now=now)
            beats.append(beat)
        if not beats:
            return ()
        limit = max(_SILENT_SECONDS, 4 * len(beats) / _BEATS_PER_SECOND)
        return tuple(self._rank(beat, now=now, limit=limit) for beat in beats if beat.attempt == beats[0].attempt)

    def _rank(self, beat: Heartbeat, *, now: float, limit: float) -> RankView:
        silent = self._sightings.silent_seconds(beat.rank, now=now)
        state: RankState = "runs"
        if beat.state != "running":
            state = "left" if beat.state == "left" else "failed"
        elif beat.is_gone:
            state = "dead"
        elif silent > limit:
            state = "silent"
        idle = self._sightings.idle_seconds(beat.rank, now=now)
        return RankView(beat.name, state, beat.step, beat.status, idle, silent, beat.note)

    def _last_end(self, notes: list[str]) -> str:
        try:
            ends = read_ends(self._folder.path / "slurm", self._name)
        except (UserError, OSError) as error:
            notes.append(str(error))
            return ""
        return ends[-1].sentence if ends else ""


def _is_sound(beat: Heartbeat, *, rank: int) -> bool:
    """Of this rank, and of the types that it says: the file may be anybody's."""
    texts = (beat.attempt, beat.host, beat.machine, beat.status, beat.state, beat.note)
    numbers = (beat.pid, beat.sequence, beat.step, beat.turn)
    return (
        beat.rank == rank
        and all(isinstance(each, str) for each in texts)
        and all(isinstance(each, int) for each in numbers)
        and isinstance(beat.idle_seconds, int | float)
        and math.isfinite(beat.idle_seconds)
    )


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
    """SLURM's queue, asked in a thread, so that a silent cluster stops no page."""

    def __init__(self, slurm: Slurm, *, monotonic: Callable[[], float]) -> None:
        self._slurm, self._monotonic = slurm, monotonic
        self._known: dict[str, Queued] = {}
        self._asked_at = -math.inf
        self._thread: threading.Thread | None = None
        self.problem = ""

    def of(self, jobs: Iterable[str], *, wait: bool) -> dict[str, Queued]:
        """The jobs as they were when last asked for, or with `wait` as they are."""
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
            self._known, self.problem = self._slurm.queue(jobs), ""
        except UserError as error:
            self.problem = str(error)


def last_lines(path: Path, *, most: int = 50) -> tuple[str, ...]:
    """The last lines of RUN/slurm/NAME, of a line drawn over and over its last state; none if it cannot be read."""
    try:
        with open_inside(path, folder=path.parent.parent) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple([line for line in lines if line][-most:])
