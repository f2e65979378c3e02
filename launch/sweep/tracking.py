"""A sweep's own run in MLflow, which its points' and the final run's are children of: what it is told, and when it is
not there, that. Takes the seconds that MLflow takes to import; a silent server is left after a minute."""

from __future__ import annotations

import math
import threading
from typing import Literal

from launch.local.env import experiment_name, tracking_uri
from launch.local.output import say
from launch.sweep.points import FINAL, Sweep
from launch.sweep.record import Outcome, SweepRecord
from pipeline.tracking.sweep_run import SweepNews, tell_sweep

_WAIT_SECONDS = 60.0
_MOST_CHARACTERS = 5000  # of a tag, in any MLflow


def tell(sweep: Sweep, record: SweepRecord, *, status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]) -> None:
    """Bring the sweep's run up to date; whatever goes wrong is said, and raises nothing."""
    chosen = next((one for one in record.points if one.name == record.chosen), None)
    # All as tags: grid and share may change, and MLflow's params never do.
    tags = {"sweep.stage": record.stage, "sweep.recipe": record.recipe, "sweep.hold_out": f"{record.hold_out:g}"}
    tags |= {f"sweep.{key}": ",".join(values)[:_MOST_CHARACTERS] for key, values in record.grid.items()}
    metrics: dict[str, float] = {}
    if chosen is not None:
        tags |= {"sweep.chosen": chosen.name, **{f"sweep.chosen.{key}": text for key, text in chosen.values.items()}}
        metrics |= _metrics(chosen, prefix="sweep/chosen")
    points = {sweep.folder(one.name).path: _metrics(one, prefix="sweep/held_out") for one in record.points}
    if record.final is not None:
        metrics |= _metrics(record.final, prefix="sweep/final")
        points[sweep.folder(FINAL).path] = _metrics(record.final, prefix="sweep/final")
    news = SweepNews(
        folder=sweep.root,
        tags=tags,
        metrics=metrics,
        points={folder: values for folder, values in points.items() if values},
        status=status,
        tracking_uri=tracking_uri(),
        experiment=experiment_name() or sweep.points[0].final.experiment,
    )
    problem: list[str] = []

    def send() -> None:
        try:
            tell_sweep(news)
        except Exception as error:  # noqa: BLE001 - the sweep goes on without MLflow
            problem.append(str(error))

    thread = threading.Thread(target=send, name="sweep-mlflow", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        problem.append(f"no answer in {_WAIT_SECONDS:g} seconds")
    if problem:
        say(f"MLflow was not told of the sweep {sweep.root.name}: {problem[0]}")


def _metrics(one: Outcome, *, prefix: str) -> dict[str, float]:
    values = {"score": one.score, "loss": one.loss, "balanced_accuracy": one.balanced_accuracy}
    return {f"{prefix}_{name}": value for name, value in values.items() if value is not None and math.isfinite(value)}
