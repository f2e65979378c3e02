"""Read a run: its recipe, and each stage's record, curve, events, pictures, evaluations and checkpoints.

Reads what it can of a run that is still training, damaged or hostile; `notes` lists the rest. Raises only for a path
that is no run. 100,000 points take about two seconds; re-reading costs almost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, EVENTS_FILE, METRICS_FILE, RECIPE_FILE, StageName
from shardvit.pipeline.runs.logs import Event, MetricRow, MetricsFollower, read_events
from shardvit.pipeline.runs.pictures import KeptPicture, kept_pictures
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord, checkpoint_folders

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

SUBMITTED_RECIPE = f"slurm/{RECIPE_FILE}"  # until the first job begins
Parts = Literal["all", "records"]


@dataclass(frozen=True)
class RunStage:
    """One stage of a run on disk."""

    name: StageName
    folder: Path
    record: StageRecord
    rows: tuple[MetricRow, ...]  # in file order; steps ascend unless the file is damaged
    events: tuple[Event, ...] = ()  # of all attempts

    @property
    def restarts(self) -> int:
        return max(0, sum(event.kind == "start" for event in self.events) - 1)

    @cached_property
    def pictures(self) -> list[KeptPicture]:
        return kept_pictures(self.folder)

    @cached_property
    def evaluations(self) -> dict[str, list[Path]]:
        """Evaluation folders by held-out set, oldest first; `load_evaluation` reads one."""
        from shardvit.pipeline.runs.evaluations import evaluations

        return evaluations(self.folder)

    @cached_property
    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return checkpoint_folders(self.folder / "checkpoints")

    @property
    def checkpoint_age_seconds(self) -> float | None:
        for path in self.checkpoints:
            with suppress(OSError):  # pruned since
                return max(0.0, time.time() - path.stat().st_mtime)
        return None

    @cached_property
    def latest(self) -> Mapping[str, float]:
        return {name: value for row in self.rows for name, value in row.metrics.items()}

    def points(self, metric: str) -> list[tuple[int, float]]:
        return [(row.step, row.metrics[metric]) for row in self.rows if metric in row.metrics]

    @cached_property
    def times(self) -> Floats:
        """Unix seconds [rows]."""
        import numpy as np

        return np.array([row.time for row in self.rows], dtype=np.float64)

    def columns(self, metric: str) -> tuple[Counts, Counts, Floats, Floats]:
        """Steps, images seen, unix times and values of a metric in row order, NaN included."""
        import numpy as np

        found = [row for row in self.rows if metric in row.metrics]
        return (
            np.array([row.step for row in found], dtype=np.int64),
            np.array([row.images_seen for row in found], dtype=np.int64),
            np.array([row.time for row in found], dtype=np.float64),
            np.array([row.metrics[metric] for row in found], dtype=np.float64),
        )


@dataclass(frozen=True)
class Run:
    """A run; `recipe` is None if unreadable, `stages` are the recipe's and any others with a folder, in order."""

    name: str
    folder: RunFolder
    recipe: Recipe | None
    stages: tuple[RunStage, ...]
    notes: tuple[str, ...] = ()  # one line for each thing that could not be read

    def stage(self, name: StageName) -> RunStage | None:
        return next((stage for stage in self.stages if stage.name == name), None)


def run_folder_at(path: Path) -> RunFolder:
    """Return the run in the folder `path`; UserError if it is no run."""
    place = path.resolve()
    folder = RunFolder(runs_root=place.parent, name=place.name)
    if not folder.is_begun():
        raise UserError(f"{path} is no run: give the folder RUNS/NAME of one, which holds {RECIPE_FILE}")
    return folder


def read_run(folder: RunFolder, *, parts: Parts = "all") -> Run:
    """Read a run; `parts="records"` skips curves and events."""
    return RunReader(folder).read(parts=parts)


class RunReader:
    """Re-read a run cheaply: each `read` parses only new rows, and events only if changed."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._stages: dict[StageName, _StageLogs] = {}

    def read(self, *, parts: Parts = "all") -> Run:
        folder, notes = self._folder, list[str]()
        recipe = self._recipe(notes)
        stages: list[RunStage] = []
        for name in ALL_STAGES:
            place = folder.stage(name)
            if (recipe is None or name not in recipe.stages.names) and not place.is_dir():
                continue
            if folder.leads_out(name):
                notes.append(one_line(f"{place} is a link out of the run, and is not followed"))
                continue
            record, logs = folder.peek(name, notes=notes), self._stages.setdefault(name, _StageLogs(place))
            if parts == "all":
                logs.read(notes)
            stages.append(RunStage(name, place, record, logs.rows, logs.events))
        return Run(folder.name, folder, recipe, tuple(stages), tuple(dict.fromkeys(notes)))

    def _recipe(self, notes: list[str]) -> Recipe | None:
        path, submitted = self._folder.path / RECIPE_FILE, self._folder.path / SUBMITTED_RECIPE
        if not path.exists() and submitted.exists():
            path = submitted
        try:
            return parse_recipe(path)
        except (UserError, OSError, ValueError, RecursionError) as error:
            notes.append(_unread(path, error))
        return None


class _StageLogs:
    def __init__(self, folder: Path) -> None:
        self.rows: tuple[MetricRow, ...] = ()
        self.events: tuple[Event, ...] = ()
        self._curve = MetricsFollower(folder / METRICS_FILE)
        self._events_file = folder / EVENTS_FILE
        self._events_stamp: tuple[int, int] | None = None

    def read(self, notes: list[str]) -> None:
        curve, path = self._curve, self._events_file
        try:
            new = tuple(curve.new_rows())
            self.rows = new if curve.count == len(new) else self.rows + new
        except OSError as error:
            notes.append(_unread(curve.path, error))
        if curve.damaged:
            lines = f"{curve.damaged:,} damaged line{'s' if curve.damaged > 1 else ''}"
            notes.append(one_line(f"{curve.path}: {lines} left out"))
        try:
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != self._events_stamp:
                self.events, self._events_stamp = tuple(read_events(path)), (stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            self.events, self._events_stamp = (), None
        except OSError as error:
            notes.append(_unread(path, error))


def _unread(path: Path, error: Exception) -> str:
    text = one_line(str(error.strerror if isinstance(error, OSError) else error))
    return text if text.startswith(str(path)) else f"{one_line(str(path))} cannot be read ({text})"
