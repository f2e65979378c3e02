"""A command's result as one MLflow run, on real SQLite; MLflow in trouble costs one line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking import command_runs
from shardvit.pipeline.tracking.command_runs import CommandResult, log_result
from shardvit.pipeline.tracking.facts import DatasetInput, load_run_state

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def client_of(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db?timeout=240")


def test_a_result_is_one_finished_run_a_child_of_the_run_that_it_judges(tmp_path: Path) -> None:
    folder = RunFolder(runs_root=tmp_path / "runs", name="one")
    folder.path.mkdir(parents=True)
    client = client_of(tmp_path / "runs")
    experiment = client.create_experiment("of-the-run", artifact_location=(tmp_path / "runs" / "mlartifacts").as_uri())
    state = load_run_state(folder.path / "mlflow.json")
    state.run_id = client.create_run(experiment, run_name="one").info.run_id
    state.save()
    page = tmp_path / "table.txt"
    page.write_text("top-1 0.5\n")
    said: list[str] = []
    result = CommandResult(
        name="eval-one-val",
        kind="eval",
        params={"protocol": "paper", "processes": 2, "subset": None},
        metrics={"val/top1": 0.5, "val/loss": math.nan},
        datasets=[DatasetInput(name="digits/test", source="https://me:secret@host/x", digest="d" * 40, context="eval")],
        files=[page],
        tables={"per_class": {"class": ["<b>a</b>", "b"], "top1": [0.25, 0.75]}},
        of_run=folder,
    )
    log_result(result, tracking_uri=None, experiment=None, say=said.append)
    assert said == []
    (run,) = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{state.run_id}'")
    assert (run.info.run_name, run.info.status, run.data.tags["shardvit.kind"]) == ("eval-one-val", "FINISHED", "eval")
    assert run.data.params == {"protocol": "paper", "processes": "2"}
    assert run.data.metrics == {"val/top1": 0.5}
    (known,) = run.inputs.dataset_inputs
    assert (known.dataset.name, "secret" in known.dataset.source) == ("digits/test", False)
    kept = tmp_path / "runs" / "mlartifacts" / run.info.run_id / "artifacts"
    assert (kept / "table.txt").read_text() == "top-1 0.5\n"
    assert json.loads((kept / "tables" / "per_class.json").read_text())["data"] == [["<b>a</b>", 0.25], ["b", 0.75]]


def test_a_server_that_is_not_there_or_silent_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def log(uri: str) -> None:
        result = CommandResult(name="eval", kind="eval", params={}, metrics={})
        log_result(result, tracking_uri=uri, experiment=None, say=said.append)

    monkeypatch.chdir(tmp_path)
    log("http://me:secret@127.0.0.1:9")
    assert len(said) == 1 and "secret" not in said[0]
    monkeypatch.setattr(command_runs, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(command_runs, "_send_result", lambda *_, **__: __import__("threading").Event().wait(240))
    log("http://127.0.0.1:9")
    assert len(said) == 2 and "0.01 seconds" in said[1]
    assert not list(tmp_path.iterdir())
