"""Images that grow, in real runs: killed in every phase and at its borders, on other processes, back from trouble."""

import json
import signal
from pathlib import Path

import pytest

from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.logs import read_events, read_metrics
from tests.faults.harness import Case, pack_shards

pytestmark = pytest.mark.slow

BORDERS = {20: 12, 40: 16}  # new sizes by step; 8 pixels before, saved every 10 steps
CHANGES = {
    "stages.pretrain.image_size": {"from": 8, "to": 16, "over": "40 steps", "steps": 2},
    "stages.pretrain.augment": {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "crop_area": [0.5, 1.0]},
    "stages.pretrain.patch_dropout": 0.25,
    "stages.pretrain.unmasked_finish": "20%",
    "data.workers": 2,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("shards") / "digits")


def ended(case: Case) -> str:
    found = case.start().wait()
    assert found.code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = Case(tmp_path_factory.mktemp("undisturbed"), shards, changes=CHANGES)
    assert "8 px from step 0, 12 px from step 20, 16 px from step 40; evaluated at 16 px" in ended(case)
    return case


def test_kills_in_every_phase_and_at_its_borders_change_nothing(
    shards: Path, undisturbed: Case, tmp_path: Path
) -> None:
    case = Case(tmp_path / "case", shards, changes=CHANGES)
    for step, saved in ((15, 10), (25, 20), (35, 30), (45, 40), (55, 50)):  # 20 and 40: the borders themselves
        killed = case.start(faults=[case.fault("kill_all", "between_steps", rank=1, step=step)]).wait()
        assert killed.code == -signal.SIGKILL and case.saved()[-1] == saved, killed.output
    assert "resuming from" in ended(case)
    assert case.curve() == undisturbed.curve()
    assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert case.record()["results"] == undisturbed.record()["results"]
    marked = {event.step for event in read_events(case.stage / "events.jsonl") if event.kind == "image_size"}
    assert marked == BORDERS.keys()
    assert json.loads((case.stage / "model" / "config.json").read_text())["shardvit"]["image_size"] == 16


@pytest.mark.parametrize("stage", [1, 2])
def test_another_number_of_processes_and_zero_stage_continues(shards: Path, tmp_path: Path, stage: int) -> None:
    changes = {**CHANGES, "engine.precision": "fp32", "stages.pretrain.log_every": "1 steps"}
    alone, case = (
        Case(tmp_path / name, shards, changes={**changes, "processes": 1, "engine.zero_stage": 1})
        for name in ("alone", "case")
    )
    ended(alone)
    killed = case.start(faults=[case.fault("kill_all", "between_steps", rank=0, step=25)]).wait()
    assert killed.code == -signal.SIGKILL and case.saved()[-1] == 20
    arguments = (f"engine.zero_stage={stage}", "processes=2")
    continued = case.start(*arguments, processes=2).wait()
    assert continued.code == 0, continued.output

    def losses(of: Case) -> list[float]:
        rows = read_metrics(of.stage / "metrics.jsonl")
        return [row.metrics[name] for row in rows for name in ("train/loss", "val/loss") if name in row.metrics]

    assert losses(case) == pytest.approx(losses(alone), rel=1e-4)


def test_a_rollback_past_a_border_ends_as_without_its_batches(shards: Path, tmp_path: Path) -> None:
    changes = {**CHANGES, "stages.pretrain.rollback": {"after_skipped_steps": 3, "steps_before": 3, "times": 1}}
    baseline, case = (Case(tmp_path / name, shards, changes=changes) for name in ("baseline", "case"))
    baseline.stage.mkdir(parents=True)
    passed_over = [*range(18, 24)]
    record = {"passed_over": passed_over, "rollbacks": 1}
    (baseline.stage / "stage.json").write_text(json.dumps(record), encoding="utf-8")
    content = dump_recipe(load_recipe(str(baseline.folder / "recipe.yaml")))
    (baseline.run / "recipe.yaml").write_text(content, encoding="utf-8")
    ended(baseline)
    nan = case.fault("nan", "backward", rank=1, step=21, last_step=23, once=None)
    found = case.start(faults=[nan]).wait()
    assert found.code == 0 and case.record()["passed_over"] == passed_over, found.output
    assert case.record()["model_digest"] == baseline.record()["model_digest"]
