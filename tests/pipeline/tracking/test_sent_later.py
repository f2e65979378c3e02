"""`shardvit sync` into the database beside the runs: a run's own times, its own files, and no run but its own."""

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.pipeline.tracking.attempts import Attempt, Settings, begun, curve, run_of, sync

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("close_files"),
]


@pytest.mark.parametrize("left_by", ["closing", "kill -9", "an earlier version"])
def test_a_run_that_is_sent_later_has_its_own_times(client: Any, settings: Settings, left_by: str) -> None:
    attempt = Attempt(settings, sends=False)
    attempt.log(1, 2)
    settings.folder.update("swap_head", state="done")
    settings.folder.update("finetune", state="done")
    if left_by != "kill -9":
        settings.folder.update("pretrain", state="done")
        attempt.close("FINISHED")
    stage = settings.folder.stage(settings.stage)
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    for row, seconds in zip(rows, (1000.0, 1400.0), strict=True):
        row["time"] = seconds
    (stage / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    facts = json.loads((stage / "mlflow_facts.json").read_text())
    assert facts["begun_ms"] > 1e12 and (facts["ended_ms"] is None) == (left_by == "kill -9")
    facts |= {"begun_ms": 980_000, "ended_ms": None if left_by == "kill -9" else 1_420_000}
    if left_by == "an earlier version":
        del facts["begun_ms"], facts["ended_ms"]
    (stage / "mlflow_facts.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="nothing to send"):
        sync(replace(settings, folder=RunFolder(settings.folder.runs_root, "other")), pytest.fail)
    (sent,) = sync(replace(settings, experiment="elsewhere"), pytest.fail)
    assert sent.points == 4
    begun_ms = 1_000_000 if left_by == "an earlier version" else 980_000
    ended_ms = 1_420_000 if left_by == "closing" else 1_400_000
    child = run_of(client, settings)
    assert client.get_experiment(child.info.experiment_id).name == "elsewhere"
    for run in (child, client.get_run(child.data.tags["mlflow.parentRunId"])):
        assert (run.info.start_time, run.info.end_time) == (begun_ms, ended_ms)
        assert run.info.status == ("KILLED" if left_by == "kill -9" else "FINISHED")


def test_only_files_of_the_run_are_sent_whatever_its_records_name(
    client: Any, settings: Settings, tmp_path: Path
) -> None:
    attempt = Attempt(settings)
    attempt.log(1)
    attempt.close("FINISHED")
    (tmp_path / "secret.txt").write_text("mine")
    stage = settings.folder.stage(settings.stage)
    (stage / "events.jsonl").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(settings.folder.path / "fifo")
    facts = json.loads((stage / "mlflow_facts.json").read_text())
    named = [f"../{Path(os.path.relpath(tmp_path, stage.parent.parent))}/secret.txt", str(tmp_path / "secret.txt")]
    files = ["pretrain/events.jsonl", "fifo", *named]
    (stage / "mlflow_facts.json").write_text(json.dumps({**facts, "files": files}))
    assert (settings.folder.path / named[0]).exists()
    sync(settings, pytest.fail)
    sent = {file.path for file in client.list_artifacts(run_of(client, settings).info.run_id)}
    assert sent & {"events.jsonl", "fifo", "secret.txt"} == set()
    (stage / "metrics.jsonl").unlink()
    (stage / "metrics.jsonl").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match="nothing to send"):
        sync(settings, pytest.fail)


def test_an_experiment_that_was_deleted_is_named_with_the_way_back(client: Any, settings: Settings) -> None:
    client.delete_experiment(client.create_experiment("deleted"))
    Attempt(settings).close("FINISHED")
    with pytest.raises(UserError, match="experiment deleted was deleted") as caught:
        sync(replace(settings, experiment="deleted"), pytest.fail)
    assert "--experiment" in str(caught.value) and "Exception" not in str(caught.value)


@pytest.mark.parametrize("run_id", ["a" * 5000, "../\x1b]0;' OR ''='", "somebody's"])
def test_an_id_that_is_no_run_of_ours_is_not_used(client: Any, settings: Settings, run_id: str) -> None:
    attempt = Attempt(settings)
    attempt.log(1)
    attempt.close("FINISHED")
    mine = client.create_run(client.get_experiment_by_name("shardvit").experiment_id, run_name="mine").info.run_id
    file = settings.folder.stage(settings.stage) / "mlflow.json"
    hostile = {"run_id": mine if run_id == "somebody's" else run_id, "attempt": 1, "sent_rows": 0}
    said: list[str] = []
    for key in (uuid.uuid4().hex, "' OR tags.x = '"):
        file.write_text(json.dumps({"key": key, **hostile}))
        sync(settings, said.append)
        assert begun(settings) not in (None, mine, run_id) and curve(client, settings) == [(1, 1.0)]
    assert client.get_run(mine).data.metrics == {} and all(len(line) < 400 for line in said)
