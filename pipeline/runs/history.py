"""A run as it lies on disk, for whoever shows it: its recipe, and each stage's record, curve and events.

Reads a run that is being written, half broken or hostile as far as it goes, and says in `notes` what could not be read;
raises for nothing but a path that is no run. 100,000 points take about two seconds. What is drawn and evaluated lies in
the stage's folder: `pictures.picture.kept_pictures(stage.folder)`, `evaluation.result.evaluations(stage.folder)`. They
are not read here, because the rooms that make them may read runs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data_shards.errors import UserError
from data_shards.text import one_line
from pipeline.recipe.io import parse_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import ALL_STAGES, EVENTS_FILE, METRICS_FILE, RECIPE_FILE, STAGE_FILE, StageName
from pipeline.runs.events import Event, read_events
from pipeline.runs.metrics_log import MetricRow, read_readable
from pipeline.runs.run_folder import RunFolder, StageRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

Content = TypeVar("Content")


@dataclass(frozen=True)
class StageHistory:
    """One stage of a run."""

    name: StageName
    folder: Path
    record: StageRecord
    rows: tuple[MetricRow, ...]  # in the order they were written; steps ascend, but for a damaged file
    events: tuple[Event, ...] = ()  # of all attempts

    def points(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, nan included."""
        return [(row.step, row.metrics[metric]) for row in self.rows if metric in row.metrics]

    def last(self, metric: str) -> float | None:
        """Its last value on the curve."""
        return next((row.metrics[metric] for row in reversed(self.rows) if metric in row.metrics), None)

    @cached_property
    def times(self) -> Floats:
        """[rows], unix seconds."""
        import numpy as np

        return np.array([row.time for row in self.rows], dtype=np.float64)

    @cached_property
    def _steps_and_images(self) -> tuple[Counts, Counts]:
        import numpy as np

        return (
            np.array([row.step for row in self.rows], dtype=np.int64),
            np.array([row.images_seen for row in self.rows], dtype=np.int64),
        )

    def columns(self, metric: str) -> tuple[Counts, Counts, Floats, Floats]:
        """Steps, images seen, unix times and values of a metric, nan included, in the order of the rows."""
        import numpy as np

        found = [number for number, row in enumerate(self.rows) if metric in row.metrics]
        values = np.fromiter((self.rows[number].metrics[metric] for number in found), np.float64, len(found))
        steps, images = self._steps_and_images
        return steps[found], images[found], self.times[found], values

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names that occur, those of the first rows first."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.metrics))


@dataclass(frozen=True)
class RunHistory:
    """A run; `recipe` None: it cannot be read. `stages`: the recipe's, and those that have a folder, in order."""

    name: str
    folder: RunFolder
    recipe: Recipe | None
    stages: tuple[StageHistory, ...]
    notes: tuple[str, ...] = ()  # what could not be read, a line each

    def stage(self, name: StageName) -> StageHistory | None:
        return next((stage for stage in self.stages if stage.name == name), None)


def run_folder_at(path: Path) -> RunFolder:
    """The run whose folder `path` is; UserError if it is none."""
    place = path.resolve()
    if not (place / RECIPE_FILE).is_file() and not any((place / name / STAGE_FILE).is_file() for name in ALL_STAGES):
        raise UserError(f"{path} is no run: give the folder RUNS/NAME of one, which holds {RECIPE_FILE}")
    return RunFolder(runs_root=place.parent, name=place.name)


def read_history(folder: RunFolder) -> RunHistory:
    """Everything of a run that can be read."""
    notes: list[str] = []
    recipe = None
    try:
        recipe = parse_recipe(folder.path / RECIPE_FILE)
    except (UserError, OSError, ValueError, RecursionError) as error:
        notes.append(_unread(folder.path / RECIPE_FILE, error))
    stages = tuple(_read_stage(folder, name, notes=notes) for name in folder.shown_stages(recipe, notes=notes))
    return RunHistory(folder.name, folder, recipe, stages, tuple(notes))


def _read_stage(folder: RunFolder, name: StageName, *, notes: list[str]) -> StageHistory:
    record = folder.shown_record(name, notes=notes)
    rows, damaged = _read(folder.stage(name) / METRICS_FILE, read_readable, none=([], 0), notes=notes)
    if damaged:
        file = folder.stage(name) / METRICS_FILE
        notes.append(one_line(f"{file}: {damaged:,} damaged line{'s' if damaged > 1 else ''} left out"))
    events = _read(folder.stage(name) / EVENTS_FILE, read_events, none=[], notes=notes)
    return StageHistory(name, folder.stage(name), record, tuple(rows), tuple(events))


def _read(file: Path, reader: Callable[[Path], Content], *, none: Content, notes: list[str]) -> Content:
    try:
        return reader(file)
    except OSError as error:
        notes.append(_unread(file, error))
    return none


def _unread(path: Path, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else str(error)
    text = one_line(str(why))
    return text if text.startswith(str(path)) else f"{one_line(str(path))} cannot be read ({text})"
