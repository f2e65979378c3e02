"""Interface between the sender and a tracking service. To add one, subclass `Sink` here and open it in `choose`.
`shardvit eval`, `transfer` and `sweep` support only MLflow (`command_runs`).

Methods may raise anything: the sender then calls `answers`, waits for a dead service, and drops what a live one refuses
three times. Each sink has its own sender, thread and NAME.json (ids and progress), so none waits for another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import SinkName, StageName
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.facts import RunFacts, RunState, without_credentials

RunKind = StageName | Literal["pipeline", "sweep"]
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class ResultModel:
    """A stage's model to send; `run_id` is the stage's, `parent_id` the pipeline's."""

    folder: RunFolder
    recipe: Recipe
    stage: StageName
    run_id: str
    parent_id: str


class Sink:
    """A tracking service; `open` returns the run ids that the other methods take."""

    name: SinkName  # in tracking.to; NAME.json is its state
    title: str  # for messages
    place: str
    takes: frozenset[Literal["files", "model", "sweep"]] = frozenset()  # besides facts, rows, pictures and tables

    def connect(self) -> None:
        """Reach the service; called again after an outage."""

    def open(self, known: RunState, *, kind: RunKind, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        """Find a run by its id or key, or create it; returns the id."""
        raise NotImplementedError

    def resume(self, run_id: str, known: RunState, *, kept: int | None, steps: Sequence[int]) -> None:
        """Set `known.sent_rows` to what the service has of the curve, whose rows are at `steps`; before the first rows
        of a session, and when a resumed stage has cut the curve to `kept` rows."""
        known.sent_rows = known.sent_rows if kept is None else min(known.sent_rows, kept)

    def address(self, run_id: str) -> str | None:
        """Return the run's URL for a browser, if it has one."""
        return None

    def answers(self, run_id: str) -> bool:
        """True if the service is alive and has the run."""
        raise NotImplementedError

    def params(self, run_id: str, facts: RunFacts) -> None:
        """Update name, description, tags, params, data sets and results."""
        raise NotImplementedError

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        """Send rows; returns a message for each value that a live service refuses."""
        raise NotImplementedError

    def file(self, run_id: str, path: Path) -> None:
        """Send or replace a file."""
        raise NotImplementedError

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        """Send a picture or table unless already there."""
        raise NotImplementedError

    def model(self, result: ResultModel) -> str:
        """Send a stage's model; returns its name in the service."""
        raise NotImplementedError

    def close(self, run_id: str, facts: RunFacts) -> None:
        """Set the status: running, or how and when it ended."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of all runs, once all is sent."""


def values_of(row: MetricRow) -> dict[str, float]:
    """Return a row's values with `images_seen`."""
    return {**row.metrics, "images_seen": float(row.images_seen)}


def typed_params(facts: RunFacts) -> dict[str, bool | float | str]:
    """Turn params into numbers and booleans where they are, without passwords in URLs."""
    words: dict[str, bool] = {"True": True, "False": False}
    return {
        name: words[text] if text in words else float(text) if _NUMBER.fullmatch(text) else without_credentials(text)
        for name, text in facts.params.items()
    }
