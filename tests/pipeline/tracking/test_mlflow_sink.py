"""Real MLflow on SQLite. One store for the module, since MLflow makes its schema in some seconds."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.pipeline.tracking.facts import DatasetInput, load_facts, load_run_state
from shardvit.pipeline.tracking.sinks.mlflow_sink import log_datasets
from tests.pipeline.tracking.attempts import Attempt, Settings, curve, run_of

# MLflow's and SQLAlchemy's own: they are not for us to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("close_files"),
]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_pipeline_is_a_parent_run_with_its_stages_results_and_a_child_per_stage(
    client: Any, settings: Settings
) -> None:
    (settings.folder.path / "tracking").mkdir()
    (settings.folder.path / "tracking/environment.txt").write_text("python 3\n")
    finetune = replace(settings, stage="finetune", datasets=settings.datasets[:1], params={"plan.lanes": "5"})
    for stage, last, top1 in ((settings, False, 0.5), (finetune, True, 0.75)):
        attempt = Attempt(stage)
        folder = stage.folder.stage(stage.stage)
        (folder / "corrupt_samples.jsonl").write_text("{}\n")
        attempt.log(1, 2, 3)
        stage.folder.update(stage.stage, state="done", results={"val/top1": top1})
        if last:  # swap_head keeps no record here
            stage.folder.update("swap_head", state="done")
        assert attempt.close("FINISHED") == ""
        assert attempt.said == []
        run_id = run_of(client, stage).info.run_id
        assert {file.path for file in client.list_artifacts(run_id)} == {"recipe.yaml", "corrupt_samples.jsonl"}
        parent = client.get_run(run_of(client, stage).data.tags["mlflow.parentRunId"])
        assert parent.info.status == ("FINISHED" if last else "RUNNING")
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'", order_by=["start_time"]
    )
    experiment = client.get_experiment(parent.info.experiment_id)
    assert (experiment.name, experiment.tags["mlflow.experimentKind"]) == ("shardvit", "custom_model_development")
    assert parent.info.run_name == settings.folder.name
    names = [child.info.run_name.rpartition("-") for child in children]
    assert [name[0] for name in names] == ["pretrain-vit64x6p4-16-digits", "finetune-vit64x6p4-24-digits"]
    assert all(name[2].isdigit() for name in names)
    assert [child.info.status for child in children] == ["FINISHED"] * 2
    assert parent.data.metrics == {"pretrain/val/top1": 0.5, "finetune/val/top1": 0.75, "val/top1": 0.75}
    assert parent.data.params["stages.finetune.global_batch_size"] == "64"
    assert (parent.data.params["pretrain.plan.lanes"], parent.data.params["finetune.plan.lanes"]) == ("4", "5")
    assert {one.dataset.name for one in parent.inputs.dataset_inputs} == {"digits-train", "digits-val"}
    assert "shardvit run" in parent.data.tags["mlflow.note.content"]
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"recipe.yaml", "environment.txt"}
    assert curve(client, settings) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert curve(client, settings, "images_seen") == [(1, 64.0), (2, 128.0), (3, 192.0)]


def test_a_run_holds_its_own_params_data_sets_tags_and_the_recipe(client: Any, settings: Settings) -> None:
    Attempt(settings).close("FINISHED")
    run = run_of(client, settings)
    parent_id = run.data.tags["mlflow.parentRunId"]
    params = run.data.params
    assert (params["seed"], params["optimizer.name"], params["head_bias"]) == ("0", "adamw", "-7.0")
    assert not [key for key, value in params.items() if value == "None" or "finetune" in key or "stages" in key]
    assert (params["data.url"], params["long"], params["empty"]) == ("https://***@host/x", "x" * 6000, "")
    assert {
        (one.dataset.name, one.dataset.digest, one.dataset.profile, one.tags[0].key, one.tags[0].value)
        for one in run.inputs.dataset_inputs
    } == {
        ("digits-train", "d" * 36, '{"num_rows": 9}', "mlflow.data.context", "train"),
        ("digits-val", "e" * 36, "{}", "mlflow.data.context", "eval"),
    }
    assert run.data.tags["shardvit.host"] == "node1"
    assert run.data.tags["shardvit.stage"] == "pretrain"
    assert run.data.tags["shardvit.attempt.1"] == "step 0 processes=2 host=node1"
    assert run.data.tags["mlflow.source.name"] == client.get_run(parent_id).data.tags["mlflow.source.name"]
    for run_id in (run.info.run_id, parent_id):
        artifact = settings.folder.runs_root / "mlartifacts" / run_id / "artifacts" / "recipe.yaml"
        assert artifact.read_text() == "seed: 1\n"


def test_a_stage_that_is_begun_again_is_told_from_the_first_by_name_and_tag(client: Any, settings: Settings) -> None:
    Attempt(settings).close("FINISHED")
    first = run_of(client, settings)
    settings.folder.open(settings.recipe, restart="pretrain")
    Attempt(settings).close("FINISHED")
    second = run_of(client, settings)
    assert second.info.run_id != first.info.run_id
    assert second.info.run_name == f"{first.info.run_name}-restart1"
    assert (second.data.tags["shardvit.restart"], "shardvit.restart" in first.data.tags) == ("1", False)
    assert second.data.tags["mlflow.parentRunId"] == first.data.tags["mlflow.parentRunId"]


def test_what_is_written_down_has_no_password(settings: Settings) -> None:
    Attempt(settings, sends=False).log(1)
    facts = load_facts(settings.folder.stage("pretrain"))
    assert facts is not None and (facts.status, facts.name.startswith("pretrain-vit")) == ("RUNNING", True)
    assert "secret" not in (settings.folder.stage("pretrain") / "mlflow_facts.json").read_text()
    assert load_run_state(settings.folder.stage("pretrain") / "mlflow.json").run_id is None


def test_a_resumed_stage_goes_on_in_its_run_with_a_whole_curve(client: Any, settings: Settings) -> None:
    first = Attempt(settings)
    first.log(1, 2, 3)
    first.close("KILLED")
    killed = run_of(client, settings)
    assert killed.info.status == "KILLED"
    again = replace(settings, params={**settings.params, "plan.lanes": "8", "new": "x"})
    second = Attempt(again, resume_step=3)
    until(lambda: run_of(client, settings).info.status == "RUNNING")
    second.log(4, 5)
    second.close("FINISHED")
    run = run_of(client, settings)
    assert second.said == [] and run.info.run_id == killed.info.run_id
    assert curve(client, settings) == [(step, 1 / step) for step in range(1, 6)]
    assert (run.data.params["plan.lanes"], run.data.params["new"]) == ("4", "x")
    assert run.data.tags["shardvit.params_changed.2"] == "plan.lanes: 4 -> 8"
    assert (run.data.tags["shardvit.attempt"], run.info.status) == ("2", "FINISHED")
    assert len(run.inputs.dataset_inputs) == 2
    time.sleep(0.002)  # another millisecond: else the repeated points would be equal and collapse
    third = Attempt(again, resume_step=4)
    third.log(5, 6)
    third.close("FINISHED")
    assert [step for step, _ in curve(client, settings)] == [1, 2, 3, 4, 5, 5, 6]


def test_non_finite_values_reach_the_store(client: Any, settings: Settings) -> None:
    attempt = Attempt(settings)
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        attempt.metrics(step, {"train/loss": value})
    attempt.close("FINISHED")
    values = [value for _, value in curve(client, settings)]
    assert math.isnan(values[0])
    assert values[1:] == [sys.float_info.max, -sys.float_info.max]
    assert attempt.said == []


def test_a_metric_that_mlflow_refuses_loses_itself_alone(client: Any, settings: Settings) -> None:
    attempt = Attempt(settings)
    for step in range(1, 41):
        attempt.metrics(step, {"train/loss": 1.0, **({"bad?name$": 1.0} if step == 17 else {})})
    attempt.close("FINISHED")
    assert len(curve(client, settings)) == 40
    assert len(attempt.said) == 1
    assert "bad?name$" in attempt.said[0]


def test_a_long_curve_goes_over_mlflows_limits_per_call(client: Any, settings: Settings) -> None:
    attempt = Attempt(replace(settings, params={f"p{n}": str(n) for n in range(250)}))
    for step in range(300):
        attempt.metrics(step, {f"m{n}": 1.0 for n in range(9)})
    attempt.close("FINISHED")
    assert len(curve(client, settings, "m8")) == 300
    assert len([key for key in run_of(client, settings).data.params if key[1:].isdigit()]) == 250


def test_a_run_that_the_store_does_not_know_is_begun_anew_and_filled(client: Any, settings: Settings) -> None:
    first = Attempt(settings)
    first.log(1, 2)
    first.close("KILLED")
    old_id = run_of(client, settings).info.run_id
    client.delete_run(old_id)
    second = Attempt(settings, resume_step=2)
    second.log(3)
    second.close("FINISHED")
    assert run_of(client, settings).info.run_id != old_id
    assert curve(client, settings) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert old_id in second.said[0]


def test_a_run_whose_id_was_never_written_is_found_by_its_key(client: Any, settings: Settings) -> None:
    first = Attempt(settings)
    first.log(1)
    first.close("KILLED")
    known = run_of(client, settings).info.run_id
    for file in (settings.folder.path / "mlflow.json", settings.folder.path / "pretrain" / "mlflow.json"):
        state = load_run_state(file)
        state.run_id = None
        state.save()
    second = Attempt(settings, resume_step=1)
    second.close("FINISHED")
    assert run_of(client, settings).info.run_id == known


def test_a_state_that_cannot_be_read_begins_a_new_run_and_says_so(client: Any, settings: Settings) -> None:
    state = settings.folder.path / "pretrain" / "mlflow.json"
    state.parent.mkdir()
    state.write_text("{")
    attempt = Attempt(settings)
    attempt.close("FINISHED")
    assert str(state) in attempt.said[0]
    assert run_of(client, settings).info.status == "FINISHED"


def test_training_imports_nothing_heavy_to_write_down_what_is_sent() -> None:
    code = "import sys, shardvit.pipeline.tracking.facts, shardvit.pipeline.report.progress\n"
    code += "print([m for m in sys.modules if m in heavy])"
    code = "heavy = {'mlflow', 'torch', 'tqdm', 'pandas', 'numpy'}\n" + code
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_different_data_sets_of_one_name_have_different_names() -> None:
    sent: list[tuple[str, str]] = []

    def log_inputs(run_id: str, *, datasets: list[Any]) -> None:
        sent.extend((one.dataset.name, one.dataset.digest) for one in datasets)

    sets = [
        DatasetInput(name=name, source="s", digest=digest * 32, context=context)
        for name, digest, context in (
            ("a-train", "1", "train"),
            ("a-val", "2", "eval"),
            ("a-train", "3", "train"),
            ("a-train", "1", "eval more"),
        )
    ]
    log_datasets(SimpleNamespace(log_inputs=log_inputs), "run", sets)
    assert [name for name, _ in sent] == ["a-train", "a-val", "a-train-33333333", "a-train"]
    log_datasets(SimpleNamespace(log_inputs=log_inputs), "run", sets[:2])  # as before the second stage began
    assert {digest for _, digest in sent} == {one.digest for one in sets} and len(set(sent)) == 3
