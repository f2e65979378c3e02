"""A node's metrics reach its stage's run from a process of their own, which ends with its rank."""

import logging
import os
import subprocess
import time
from pathlib import Path

import pytest

from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking import system_metrics
from shardvit.pipeline.tracking.facts import RunFacts, load_run_state
from shardvit.pipeline.tracking.system_metrics import node_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_a_node_is_watched_under_its_name_and_no_longer_than_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    folder = RunFolder(tmp_path, "one")
    folder.stage("pretrain").mkdir(parents=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db?timeout=240")
    run = client.create_run("0")
    state = load_run_state(folder.stage("pretrain") / "mlflow.json")
    state.run_id = run.info.run_id
    state.save()
    RunFacts(name="a").save(folder.stage("pretrain") / "mlflow_facts.json")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: started.append(real(*args, **kw)) or started[-1])
    end = time.monotonic() + 240
    with node_metrics(folder, node="node1-here", environ=dict(os.environ)):
        while not (metrics := client.get_run(run.info.run_id).data.metrics) and time.monotonic() < end:
            time.sleep(0.1)
    (child,) = started
    assert child.poll() is not None
    assert any(name.startswith("system/node1-") and "cpu_utilization" in name for name in metrics)
    assert not client.get_run(run.info.run_id).info.end_time  # it ends no run


def test_what_keeps_a_node_from_being_watched_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.system_metrics import system_metrics_monitor

    tries: list[object] = []

    def fails(*args: object, **kw: object) -> None:
        tries.append(args)
        raise RuntimeError("no sensors at https://me:secret@host")

    monkeypatch.setattr(system_metrics_monitor, "SystemMetricsMonitor", fails)
    monkeypatch.setattr(system_metrics, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    system_metrics.watch(
        "run", uri=f"sqlite:///{tmp_path}/mlflow.db", home=tmp_path, node="", over=lambda: len(tries) == 3
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert len(tries) == 3 and "RuntimeError: no sensors" in line and "secret" not in line
