"""Log each node's CPU, memory, network, disk and GPU to the stage's MLflow run, if the recipe asks for it.

Runs MLflow's monitor every ten seconds in a child of each node's first rank. Values during an outage are lost.
"""

import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, MLFLOW_FILE
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.client import client_of, home_of, store_uri
from shardvit.pipeline.tracking.facts import load_facts, load_run_state, without_credentials

_POLL_SECONDS = 1.0
_AGAIN_SECONDS = 30.0  # before restarting the monitor, which an outage ends
_END_SECONDS = 5.0
_LOWEST_PRIORITY = 19
_LONGEST_REASON = 300


@contextmanager
def node_metrics(folder: RunFolder, *, node: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Monitor this node while the run trains; `node` is its name, empty for a single node."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder.runs_root), folder.name, node]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # MLflow's output; problems go to stderr, once
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    except OSError as error:
        print(f"MLflow: no system metrics of {platform.node()}: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        try:
            child.communicate(timeout=_END_SECONDS)  # closes its stdin
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# The child process.


def main(runs_root: str, name: str, node: str) -> None:
    """Monitor this node, stage after stage, until stdin closes."""
    os.nice(_LOWEST_PRIORITY)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), over.set()), daemon=True).start()
    folder = RunFolder(runs_root=Path(runs_root), name=name)
    home = home_of(folder)
    uri = store_uri(os.environ.get("MLFLOW_TRACKING_URI") or None, home=home)
    while not over.wait(_POLL_SECONDS):
        with suppress(OSError, ValueError):
            if run_id := running(folder):
                watch(run_id, uri=uri, home=home, node=node, over=lambda: over.is_set() or running(folder) != run_id)


def running(folder: RunFolder) -> str | None:
    """Return the MLflow run id of the stage in training, once it has one."""
    for stage in ALL_STAGES:
        facts = load_facts(folder.stage(stage))
        if facts is not None and facts.status == "RUNNING":
            return load_run_state(folder.stage(stage) / MLFLOW_FILE).run_id
    return None


def watch(run_id: str, *, uri: str, home: Path, node: str, over: Callable[[], bool]) -> None:
    """Monitor this node for a run until `over`; restarts the monitor after outages."""
    client_of(uri, home=home)  # sets short timeouts and silences logging
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.disable(logging.WARNING)
    has_failed, pause = False, threading.Event()

    def wait_while(is_on: Callable[[], bool]) -> None:
        while is_on() and not over():
            pause.wait(_POLL_SECONDS)

    while not over():
        try:
            monitor: Any = SystemMetricsMonitor(run_id, node_id=node or None, resume_logging=True, tracking_uri=uri)
            monitor.start()
            wait_while(monitor._process.is_alive)
            if over():
                return monitor.finish()
        except Exception as error:  # noqa: BLE001 - retried, without affecting training
            if not has_failed:
                has_failed = True
                why = without_credentials(f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}")
                print(f"MLflow: no system metrics of {platform.node()} for now: {why}", file=sys.stderr, flush=True)
        polls = iter(range(int(_AGAIN_SECONDS / _POLL_SECONDS)))
        wait_while(lambda polls=polls: next(polls, None) is not None)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
