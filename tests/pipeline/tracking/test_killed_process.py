"""Kill -9 of a process that sends its curve to real MLflow on SQLite: the next one completes it."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pipeline.tracking import mlflow_store as tracking
from pipeline.tracking.settings import TrackerSettings
from tests.pipeline.tracking.attempts import Attempt, curve, run_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("close_files"),
]


def test_a_killed_process_is_followed_by_one_that_completes_its_curve(
    client: Any,
    settings: TrackerSettings,
) -> None:
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from pipeline.runs.metrics_log import open_metrics_log
        from pipeline.tracking.mlflow_store import open_tracker
        from pipeline.tracking.settings import TrackerSettings

        from pipeline.recipe.io import load_recipe
        from pipeline.runs.run_folder import RunFolder

        folder = RunFolder(runs_root=Path(sys.argv[1]), name=sys.argv[2])
        log = open_metrics_log(folder.stage("pretrain") / "metrics.jsonl", resume_step=0)
        recipe = load_recipe("digits", overrides=[f"name={folder.name}"])
        settings = TrackerSettings(folder=folder, recipe=recipe, stage="pretrain")
        tracker = open_tracker(settings, log=log)
        log.append(step=1, images_seen=64, metrics={"train/loss": 1.0})
        while not tracker._is_connected:
            time.sleep(0.01)
        for step in (2, 3, 4):
            log.append(step=step, images_seen=64 * step, metrics={"train/loss": 1 / step})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = [str(settings.folder.runs_root), settings.folder.name]
    repository = Path(tracking.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=repository,
        timeout=400,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed_id = run_of(client, settings).info.run_id
    second = Attempt(settings, resume_step=3)
    second.log(4, 5)
    second.tracker.close("FINISHED")
    assert run_of(client, settings).info.run_id == killed_id
    # Rows that were on their way when the kill came are sent again, and exact duplicates collapse.
    assert sorted(curve(client, settings)) == [(step, 1 / step) for step in range(1, 6)]
