"""What a stage says of itself before its first step."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.stage_data import Stage, open_data
from shardvit.pipeline.stage.start_summary import describe_start


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    pack("digits", folder, classes=("0", "1", "2", "3"), holdout=0.2, report=lambda line: None)
    return folder


@pytest.mark.parametrize(("precision", "value_bytes"), [("fp32", 4), ("bf16", 2)])
def test_activations_are_those_of_the_run_s_precision(
    shards: Path, precision: Literal["fp32", "bf16"], value_bytes: int
) -> None:
    changes = [f"stages.pretrain.{key}={shards}/{split}" for key, split in (("train", "train"), ("eval", "val"))]
    recipe = load_recipe("digits", overrides=[*changes, f"engine.precision={precision}", "processes=1"])
    data = open_data(recipe, stage="pretrain", report=lambda line: None)
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=1)
    task: Any = SimpleNamespace(outputs=data.train.classes, kind_of_output="classes")
    lines = list(
        describe_start(
            Stage(recipe, "pretrain", data, plan, run=RunFolder(Path(), name="r")),
            place=Place(),
            task=task,
            notes=(),
            restored=None,
        )
    )
    in_bf16 = recipe.engine.model_copy(update={"precision": "bf16"})
    cost = stage_cost(recipe.model, stage=recipe.train_stage("pretrain"), engine=in_bf16, num_classes=4)
    shown = re.search(r", ([\d.]+) kB activations per image in (\w+)$", lines[1])
    assert shown and shown[2] == precision
    assert float(shown[1]) == pytest.approx(cost.activation_bytes * value_bytes / 2 / 1000, rel=1e-3)
    assert "= 1 process x 1 micro-batch x 64 images" in lines[0]
