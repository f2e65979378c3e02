"""The protocol of a tracking service. To add one, implement `Sink` in a new file and choose it in
`mlflow_sink.sink_of`. `shardvit eval`, `transfer` and `sweep` support only MLflow (`command_runs`).

Methods may raise anything: the sender then calls `answers`, waits for a dead service, and drops what a live one refuses
three times. A run has one sink; its mlflow.json holds ids and progress.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.facts import RunFacts, RunState


@dataclass(frozen=True)
class ResultModel:
    """A stage's model to send; `run_id` is the stage's, `parent_id` the pipeline's."""

    folder: RunFolder
    recipe: Recipe
    stage: StageName
    run_id: str
    parent_id: str


class Sink(Protocol):
    """A tracking service; `open` returns the run ids that the other methods take."""

    place: str  # for messages

    def connect(self) -> None:
        """Reach the service; called again after an outage."""

    def open(self, known: RunState, *, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        """Find a run by its id or key, or create it; returns the id."""
        ...

    def address(self, run_id: str) -> str | None:
        """Return the run's URL for a browser, if it has one."""
        ...

    def answers(self, run_id: str) -> bool:
        """True if the service is alive and has the run."""
        ...

    def params(self, run_id: str, facts: RunFacts) -> None:
        """Update name, description, tags, params, data sets and results."""

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        """Send rows; returns a message for each value that a live service refuses."""
        ...

    def file(self, run_id: str, path: Path) -> None:
        """Send or replace a file."""

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        """Send a picture or table unless already there."""

    def model(self, result: ResultModel) -> str:
        """Send a stage's model; returns its name in the service."""
        ...

    def close(self, run_id: str, facts: RunFacts) -> None:
        """Set the status: running, or how and when it ended."""
