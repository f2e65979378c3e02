"""What is said of a restored checkpoint: where it stands, and what has changed since it was written."""

import os
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.order.sample_order import Order
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardSet, ShardsSpec
from shardvit.pipeline.checkpoint.identity import checkpoint_identity
from shardvit.pipeline.checkpoint.store import Restored
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import written_by
from shardvit.pipeline.stage.stage_data import Stage, StageData
from shardvit.pipeline.stage.start_summary import describe_changes, describe_restored

NOW = written_by()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    out = tmp_path_factory.mktemp("note") / "digits"
    pack("digits", out, classes=("0", "1"), samples_per_shard=60, report=lambda text: None)
    return open_shards(ShardsSpec(location=str(out / "train")))


def restored(folder: Path, *overrides: str, step: int = 3, processes: int = 1, by: dict[str, str] = NOW) -> Restored:
    recipe = load_recipe("digits", overrides=overrides)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    return Restored(
        folder=folder,
        state=TrainState(step=step, images_seen=step * 64, skipped_steps=2),
        notes=("step-00000004 is damaged",),
        identity=checkpoint_identity(recipe, stage="pretrain", processes=processes),
        written_by=by,
    )


def changes(found: Restored, *overrides: str) -> str | None:
    now = load_recipe("digits", overrides=overrides)
    identity = checkpoint_identity(now, stage="pretrain", processes=1)
    return describe_changes(found, recipe=now, identity=identity, written_by=NOW)


def test_position_age_and_the_next_image_are_told(tmp_path: Path, shards: ShardSet):
    recipe = load_recipe("digits", overrides=["data.lanes=4", "stages.pretrain.global_batch_size=64"])
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=shards.num_samples, world_size=1)
    window = recipe.data.shuffle_window_images
    order = Order(shards.shard_sizes, seed=recipe.seed, lanes=4, global_batch_images=64, window_images=window)
    store: Any = None
    data = StageData(shards, (tuple(shards.shard_sizes),), weights=None, held_out={"val": shards}, store=store)
    stage = Stage(recipe, "pretrain", data, plan, run=RunFolder(tmp_path, name="r"))
    found = restored(tmp_path)
    os.utime(tmp_path, (0, os.stat(tmp_path).st_mtime - 600))
    text = "\n".join(describe_restored(found, stage=stage))
    first = order.rank_batch(3, rank=0, world_size=1)
    assert text.startswith("step-00000004 is damaged\n")
    assert f"step 3 of {plan.total_steps:,}, 192 images seen, epoch {192 / shards.num_samples:.2f}" in text
    assert (
        f"number {first.row[0]} of {Path(shards.shards[first.shard[0]].url).name}, learning rate {plan.schedule(3):.3g}"
        in text
    )
    assert "10 minutes old" in text and "2 steps skipped" in text
    done = restored(tmp_path, step=plan.total_steps)
    assert "nothing is left to train" in "\n".join(describe_restored(done, stage=stage))


def test_the_same_recipe_machine_and_versions_are_no_change(tmp_path: Path):
    assert changes(restored(tmp_path)) is None


def test_every_change_is_named_once(tmp_path: Path):
    found = restored(tmp_path, "engine.zero_stage=2", "data.workers=5", processes=4, by=NOW | {"torch": "2.0.0"})
    text = changes(found, "data.workers=1")
    assert text is not None
    for part in ("processes 4 -> 1", "ZeRO stage 2 -> 1", f"torch 2.0.0 -> {NOW['torch']}", "data.workers 5 -> 1"):
        assert text.count(part) == 1
    assert "last digits" in text and "zero_stage" not in text


def test_a_change_that_leaves_the_numbers_alone_says_nothing_of_numbers(tmp_path: Path):
    text = changes(restored(tmp_path, "data.workers=5"), "data.workers=1")
    assert text is not None and text.endswith("data.workers 5 -> 1")


def test_a_checkpoint_without_a_recipe_is_no_problem(tmp_path: Path):
    found = restored(tmp_path)
    (tmp_path / "recipe.yaml").unlink()
    assert changes(found) is None
