"""CPU, memory, network, disk and GPU of each node in the stage's MLflow run, where the recipe says so.

MLflow's own monitor, every ten seconds, in a process beside the first rank of each node: it takes nothing from training
but some seconds of one core for importing mlflow, and ends when its rank does. What an outage swallows is lost.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe.vocabulary import ALL_STAGES, MLFLOW_FILE, StageName
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.client import client_of, store_uri
from pipeline.tracking.settings import home_of
from pipeline.tracking.tracking_state import load_run_state
from pipeline.tracking.tracking_thread import without_credentials

if TYPE_CHECKING:
    from pipeline.stage.context import StageContext

_POLL_SECONDS = 1.0
_AGAIN_SECONDS = 30.0  # after an outage, which ends MLflow's monitor
_END_SECONDS = 5.0
_LOWEST_PRIORITY = 19
_LONGEST_REASON = 300


@contextmanager
def node_metrics(context: StageContext, *, stage: StageName) -> Iterator[None]:
    """Have this rank's node watched during a stage, if it is the node's first and the recipe says so."""
    place = context.ranks.place
    if not context.recipe.tracking.system_metrics or place.local_rank:
        yield
        return
    nodes = -(-place.world_size // place.local_world_size)
    node = f"node{place.rank // place.local_world_size}-{platform.node()}" if nodes > 1 else ""
    folder, uri = context.folder, context.tracking.uri
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder.runs_root), folder.name, stage, node]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # MLflow's lines; what goes wrong is said once, on standard error
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **({} if uri is None else {"MLFLOW_TRACKING_URI": uri})},
        )
    except OSError as error:
        print(f"MLflow: no system metrics of {platform.node()}: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        try:
            child.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# From here on: the process itself.


def main(runs_root: str, name: str, stage_name: str, node: str) -> None:
    """Watch this node until standard input ends."""
    os.nice(_LOWEST_PRIORITY)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), over.set()), daemon=True).start()
    folder = RunFolder(runs_root=Path(runs_root), name=name)
    stage: StageName = next(each for each in ALL_STAGES if each == stage_name)
    home = home_of(folder)
    uri = store_uri(os.environ.get("MLFLOW_TRACKING_URI") or None, home=home)
    while not over.wait(_POLL_SECONDS):
        with suppress(OSError, ValueError):
            run_id = load_run_state(folder.stage(stage) / MLFLOW_FILE).run_id
            if run_id is not None:
                watch(run_id, uri=uri, home=home, node=node, over=over)


def watch(run_id: str, *, uri: str, home: Path, node: str, over: threading.Event) -> None:
    """Watch this node for a run until `over`; a monitor that an outage has ended is started again."""
    client_of(uri, home=home)  # quietly, and with short time-outs
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.disable(logging.WARNING)
    told = False
    while not over.is_set():
        try:
            monitor: Any = SystemMetricsMonitor(run_id, node_id=node or None, resume_logging=True, tracking_uri=uri)
            monitor.start()
            thread = monitor._process
            while thread.is_alive() and not over.wait(_POLL_SECONDS):
                pass
            if over.is_set():
                monitor.finish()
        except Exception as error:  # noqa: BLE001 - it is tried again, and training knows nothing of it
            if not told:
                told = True
                why = without_credentials(f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}")
                print(f"MLflow: no system metrics of {platform.node()} for now: {why}", file=sys.stderr, flush=True)
        over.wait(_AGAIN_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
