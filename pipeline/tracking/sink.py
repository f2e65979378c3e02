"""The protocol of a tracking service. To add one: a file with this class beside `mlflow_sink`, and its choice in
`mlflow_sink.sink_of`. A run has one sink, whose ids and progress are in its mlflow.json; `shardvit eval`, `transfer`
and `sweep` write to MLflow alone (`command_runs`).

Methods may raise anything: the sender asks `answers`, waits for a dead service, and drops what a living one refuses
three times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.logs import MetricRow
from pipeline.runs.pictures import KeptPicture
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.facts import RunFacts, RunState


@dataclass(frozen=True)
class ResultModel:
    """A stage's model, the stage's run, and the pipeline's."""

    folder: RunFolder
    recipe: Recipe
    stage: StageName
    run_id: str
    parent_id: str


class Sink(Protocol):
    """A tracking service; runs are named by the id that `open` returns."""

    place: str  # for messages

    def connect(self) -> None:
        """Reach the service; called again after an outage."""

    def open(self, known: RunState, *, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        """Find a run by its id or key, or create it; returns its id."""
        ...

    def address(self, run_id: str) -> str | None:
        """Where a browser shows the run."""
        ...

    def answers(self, run_id: str) -> bool:
        """True if the service is alive and has the run."""
        ...

    def params(self, run_id: str, facts: RunFacts) -> None:
        """Bring name, description, tags, params, data sets and results up to date."""

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        """Send rows; returns a message for each value that a living service refuses."""
        ...

    def file(self, run_id: str, path: Path) -> None:
        """Send or replace a file."""

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        """Send a picture or a table, unless it is there."""

    def model(self, result: ResultModel) -> str:
        """Send a stage's model; returns its name there."""
        ...

    def close(self, run_id: str, facts: RunFacts) -> None:
        """Set the status: still or again running, or how and when it ended."""
