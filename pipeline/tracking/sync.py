"""What an outage or an offline cluster kept back of a run, sent to MLflow: each value once, however often it is asked.

Rows of metrics.jsonl (by their number), facts (mlflow_facts.json), files, status, pictures, tables and the model. A run
that the store does not have yet is made there and filled from the start. The run must not be training: that sends by
itself. Takes the seconds that MLflow takes to import, and one call for some 100 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from data_shards.errors import UserError
from data_shards.safe_paths import is_inside
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import METRICS_FILE, StageName
from pipeline.runs.metrics_log import read_metrics
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.mlflow_store import MlflowStore
from pipeline.tracking.publish import PublishedStage, publish_page, publish_stage
from pipeline.tracking.settings import TrackerSettings
from pipeline.tracking.tracking_thread import without_credentials

_ROWS_PER_CALL = 100
_LONGEST_REASON = 300


@dataclass
class Synced:
    """What was sent of a stage."""

    stage: StageName
    points: int = 0
    others: list[str] = field(default_factory=list)  # tags, artifacts, ...: what each call was for
    published: PublishedStage = field(default_factory=PublishedStage)
    refused: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.points:,} points"] if self.points else []
        parts += self.others
        sent = self.published
        parts += [f"{count} {what}" for count, what in ((sent.pictures, "pictures"), (sent.tables, "tables")) if count]
        parts += [f"model {sent.model}"] if sent.model else []
        return f"{self.stage}: " + (", ".join(parts) if parts else "nothing was missing")


def sync_run(
    folder: RunFolder, recipe: Recipe, *, tracking_uri: str | None, experiment: str, say: Callable[[str], None]
) -> list[Synced]:
    """Send what the store at `tracking_uri` (None: the database beside the runs) lacks of a run that nobody trains.

    Raises:
        UserError: the store cannot be reached or refuses, or nothing was trained.
    """
    files: dict[StageName, Path] = {name: folder.stage(name) / METRICS_FILE for name in recipe.stages.names}
    # What is a link is another run's, and is sent with that one.
    stages: list[StageName] = [
        name for name, file in files.items() if file.is_file() and is_inside(file, folder=folder.path)
    ]
    if not stages:
        raise UserError(f"{folder.path}: no stage has begun, so there is nothing to send")
    settings = [
        TrackerSettings(folder=folder, recipe=recipe, stage=stage, tracking_uri=tracking_uri, experiment=experiment)
        for stage in stages
    ]
    for each in settings:  # all before the pipeline's run is told its end
        MlflowStore(each, say=say, runs="as they are").settle()
    done: list[Synced] = []
    for each in settings:
        store, stage = MlflowStore(each, say=say, runs="as they are"), each.stage
        synced = Synced(stage)
        try:
            store.connect()
            _send_rows(store, folder, synced)
            for call in store.unsent():
                call.send()
                synced.others.append(call.name)
            if publish_page(folder, recipe, tracking_uri=each.uri):
                synced.others.append("the page")
        except Exception as error:
            reason = without_credentials(str(error) or type(error).__name__)[:_LONGEST_REASON]
            raise UserError(f"{store.place} does not take {folder.path}: {' '.join(reason.split())}") from error
        synced.published = publish_stage(folder, recipe, stage, say, tracking_uri=each.uri, wait_seconds=0.0)
        done.append(synced)
        if synced.published.problem:
            raise UserError(f"{store.place} does not take all of {folder.path}: {synced.published.problem}")
    return done


def _send_rows(store: MlflowStore, folder: RunFolder, synced: Synced) -> None:
    rows = read_metrics(folder.stage(synced.stage) / METRICS_FILE)
    unsent = iter(islice(rows, store.state.sent_rows, None))
    while batch := list(islice(unsent, _ROWS_PER_CALL)):
        synced.refused += store.send(batch)
        store.state.sent_rows += len(batch)
        store.state.save()
        synced.points += sum(len(row.metrics) + 1 for row in batch)  # with images_seen
