"""Attempts at a stage that are followed by a sender, and what MLflow has of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.logs import MetricsLog
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.client import home_of, store_uri
from shardvit.pipeline.tracking.describe import begin_attempt, end_attempt
from shardvit.pipeline.tracking.facts import DatasetInput, FinalStatus, load_run_state
from shardvit.pipeline.tracking.sender import Sender, Synced, follow
from shardvit.pipeline.tracking.sinks.mlflow_sink import MlflowSink
from shardvit.pipeline.tracking.sinks.sink import Sink
from shardvit.pipeline.tracking.sync_run import sync_run

OPENED: list["Attempt"] = []


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one attempt at a stage tells a store."""

    folder: RunFolder
    recipe: Recipe
    stage: StageName = "pretrain"
    params: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[DatasetInput] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    uri: str | None = None
    experiment: str = "shardvit"

    @property
    def sink(self) -> MlflowSink:
        home = home_of(self.folder)
        return MlflowSink(store_uri(self.uri, home=home), home=home, experiment=self.experiment)


class Attempt:
    """One attempt at a stage, with its metrics.jsonl, and a thread that sends; `sends` False: nobody does."""

    def __init__(
        self, settings: Settings, *, resume_step: int = 0, sends: bool = True, sink: Sink | None = None
    ) -> None:
        self.said: list[str] = []
        self.settings = settings
        self.file = MetricsLog(settings.folder.stage(settings.stage) / "metrics.jsonl", resume_step=resume_step)
        begin_attempt(
            settings.folder,
            settings.recipe,
            settings.stage,
            from_step=resume_step,
            kept_rows=self.file.kept_rows,
            params=settings.params,
            datasets=settings.datasets,
            tags=settings.tags,
        )
        self.sender = Sender(settings.folder, settings.recipe, sink or settings.sink, say=self.said.append)
        self._over = threading.Event()
        self._thread = threading.Thread(target=follow, args=(self.sender,), kwargs={"over": self._over}, daemon=True)
        if sends:
            self._thread.start()
        OPENED.append(self)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.metrics(step, {"train/loss": 1 / step})

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.file.append(step=step, images_seen=64 * step, metrics=metrics)

    def close(self, status: FinalStatus, *, wait_seconds: float = 240.0) -> str:
        """As the process beside rank 0 does: returns what is missing after so long."""
        end_attempt(self.settings.folder, self.settings.stage, status)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(wait_seconds)
        return self.sender.missing()


def sync(settings: Settings, say: Callable[[str], None]) -> list[Synced]:
    return sync_run(settings.folder, settings.recipe, settings.sink, say=say)


def begun(settings: Settings) -> str | None:
    return load_run_state(settings.folder.stage(settings.stage) / "mlflow.json").run_id


def run_of(client: Any, settings: Settings) -> Any:
    return client.get_run(begun(settings))


def curve(client: Any, settings: Settings, name: str = "train/loss") -> list[tuple[int, float]]:
    run_id = run_of(client, settings).info.run_id
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
