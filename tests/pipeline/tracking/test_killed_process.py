"""Kill -9 of a process that sends its curve to real MLflow on SQLite: the next one completes it."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.tracking.attempts import Attempt, Settings, curve, run_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("close_files"),
]


def test_a_killed_process_is_followed_by_one_that_completes_its_curve(
    client: Any,
    settings: Settings,
) -> None:
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from shardvit.pipeline.recipe.io import load_recipe
        from shardvit.pipeline.runs.run_folder import RunFolder
        from shardvit.pipeline.tracking import sender
        from tests.pipeline.tracking.attempts import Attempt, Settings, begun

        sender._BEGIN_SECONDS = 0
        folder = RunFolder(runs_root=Path(sys.argv[1]), name=sys.argv[2])
        settings = Settings(folder=folder, recipe=load_recipe("digits", overrides=[f"name={folder.name}"]))
        attempt = Attempt(settings)
        attempt.log(1)
        while begun(settings) is None:
            time.sleep(0.01)
        attempt.log(2, 3, 4)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = [str(settings.folder.runs_root), settings.folder.name]
    repository = Path(__file__).parents[3]
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
    second.close("FINISHED")
    assert run_of(client, settings).info.run_id == killed_id
    # Rows that were on their way when the kill came are sent again, and exact duplicates collapse.
    assert sorted(curve(client, settings)) == [(step, 1 / step) for step in range(1, 6)]
