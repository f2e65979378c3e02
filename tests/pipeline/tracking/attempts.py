"""Attempts at a stage that are tracked by MLflow, and what MLflow has of them."""

from typing import Any

from pipeline.runs.metrics_log import open_metrics_log
from pipeline.tracking.mlflow_store import open_tracker
from pipeline.tracking.settings import TrackerSettings
from pipeline.tracking.tracking_state import load_run_state

OPENED: list["Attempt"] = []


class Attempt:
    """One attempt at a stage, with its metrics.jsonl."""

    def __init__(self, settings: TrackerSettings, *, resume_step: int = 0) -> None:
        self.said: list[str] = []
        path = settings.folder.stage(settings.stage) / "metrics.jsonl"
        self.file = open_metrics_log(path, resume_step=resume_step)
        self.tracker = open_tracker(settings, log=self.file, say=self.said.append)
        OPENED.append(self)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.metrics(step, {"train/loss": 1 / step})

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.file.append(step=step, images_seen=64 * step, metrics=metrics)


def begun(settings: TrackerSettings) -> str | None:
    return load_run_state(settings.folder.stage(settings.stage) / "mlflow.json").run_id


def run_of(client: Any, settings: TrackerSettings) -> Any:
    return client.get_run(begun(settings))


def curve(client: Any, settings: TrackerSettings, name: str = "train/loss") -> list[tuple[int, float]]:
    run_id = run_of(client, settings).info.run_id
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
