"""What type checkers see of the public API: `make check` reads `script`, which nobody runs."""

from typing import assert_type

import pandas
import torch
from timm.models.vision_transformer import VisionTransformer

import shardvit
from shardvit.data_shards.packing.found import PackReport
from shardvit.launch.api.shard_loader import LoadedBatch
from shardvit.launch.plan.plan_page import RecipeForecast
from shardvit.model.resnet import BitResnet
from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated
from shardvit.pipeline.runs.run_folder import StageRecord
from shardvit.pipeline.transfer.results import TransferRecord
from shardvit.pipeline.using.predict import ImagePrediction


def script() -> None:
    assert_type(shardvit.pack("digits", "shards"), PackReport)
    run = shardvit.run("digits", seed=1)
    assert_type(run, shardvit.LoadedRun)
    assert_type(shardvit.load_run("runs/digits"), shardvit.LoadedRun)
    assert_type(run.stages["pretrain"], StageRecord)
    assert_type(run.metrics(), pandas.DataFrame)
    model = run.model("finetune")
    assert_type(model, shardvit.LoadedModel)
    assert_type(model.class_names, tuple[str, ...])
    assert_type(model.transform("a.png"), torch.Tensor)
    assert_type(model.predict("a.png"), list[ImagePrediction])
    assert_type(shardvit.evaluate(model, "shards/val"), ModelEvaluated)
    assert_type(shardvit.transfer(run, "shards/train", "shards/val", method="knn"), TransferRecord)
    assert_type(shardvit.plan("digits"), RecipeForecast)
    assert_type(shardvit.create_model("L/16"), VisionTransformer | BitResnet)
    for batch in shardvit.open_shards("shards/train").loader(batch_size=8, image_size=16):
        assert_type(batch, LoadedBatch)
        assert_type(batch.images, torch.Tensor)
    shardvit.evaluate(model, "shards/val", image_size="16")  # pyright: ignore[reportArgumentType]
    shardvit.load_run(3)  # pyright: ignore[reportArgumentType]
    shardvit.runs  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_the_script_is_for_type_checkers():
    assert callable(script)
