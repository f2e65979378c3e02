"""The batches of a loop of one's own: the run's own order, whatever the processes, workers and restarts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardvit
from shardvit.launch.api.shard_loader import LoadedBatch, OpenedShards
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.batches import train_stream
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.stage.stage_data import Stage, open_data

SIZES: dict[str, Any] = {"batch_size": 24, "image_size": 16}
STRONG = {"mixup_alpha": 0.2, "rand_augment": {"magnitude": 9}, "random_erasing": {"probability": 0.9}}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """62 images of 3 classes in shards of 7, held out: 14."""
    folder = tmp_path_factory.mktemp("loader")
    drawn = np.random.default_rng(0)
    for number in range(76):
        path = folder / "images" / f"class{number % 3}" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    report = shardvit.pack(
        folder / "images", folder / "shards", samples_per_shard=7, holdout_images=14, report=[].append
    )
    assert report.num_images == 76
    return folder / "shards"


@pytest.fixture(scope="module")
def shards(packed: Path) -> OpenedShards:
    return shardvit.open_shards(packed / "train")


def some(shards: OpenedShards, count: int = 8, **more: Any) -> list[LoadedBatch]:
    return list(islice(shards.loader(**SIZES, **more), count))


def joined(parts: Sequence[LoadedBatch]) -> LoadedBatch:
    return LoadedBatch(*(torch.cat(each) for each in zip(*parts, strict=True)))


def same(ours: Sequence[LoadedBatch], theirs: Sequence[LoadedBatch]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(one, other) for first, second in pairs for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_processes_parts_are_the_batch_of_one(shards: OpenedShards, world_size: int):
    alone = some(shards, augment=STRONG)
    parts = [some(shards, augment=STRONG, world_size=world_size, rank=rank) for rank in range(world_size)]
    assert same([joined(each) for each in zip(*parts, strict=True)], alone)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_do_not_matter(shards: OpenedShards, workers: int):
    assert same(some(shards, workers=workers), some(shards))


def test_worker_processes_do_not_matter(shards: OpenedShards):
    assert same(some(shards, workers=1, worker_kind="process"), some(shards))


@pytest.mark.parametrize("at", [0, 1, 5])
def test_it_goes_on_from_its_position_on_any_number_of_processes(shards: OpenedShards, at: int):
    whole = some(shards)
    loader = shards.loader(**SIZES)
    for _ in islice(loader, at):
        pass
    assert loader.images_seen == at * 24
    assert same(list(islice(loader, 8 - at)), whole[at:]), "the same loader"
    later = [some(shards, 8 - at, resume_at=at * 24, world_size=4, rank=rank) for rank in range(4)]
    assert same([joined(each) for each in zip(*later, strict=True)], whole[at:]), "other processes"


def test_what_was_read_ahead_is_not_counted(shards: OpenedShards):
    loader = shards.loader(**SIZES, workers=3)
    for _ in loader:
        break
    assert loader.images_seen == 24


def test_each_sample_comes_once_an_epoch_without_a_gap(shards: OpenedShards):
    loader = shards.loader(**SIZES, duration="12 epochs")
    seen = torch.cat([batch.ids for batch in loader])
    assert len(seen) == loader.images_seen == 12 * 62
    assert torch.equal(seen.bincount(minlength=62), torch.full((62,), 12))
    for epoch in range(12):
        assert len({*seen[epoch * 62 : (epoch + 1) * 62].tolist()}) > 62 - 24, "only the batch on a boundary mixes two"
    assert list(loader) == [], "its end does not move"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
def test_an_evaluation_has_each_sample_once(packed: Path, world_size: int):
    held_out = shardvit.open_shards(packed / "val")
    for batch_size in (6, 24):
        loaders = [
            held_out.loader(batch_size=batch_size, image_size=16, use="evaluate", world_size=world_size, rank=rank)
            for rank in range(world_size)
        ]
        for _ in range(2):
            ids = [batch.ids for loader in loaders for batch in loader]
            assert sorted(torch.cat(ids).tolist()) == list(range(14)), "and again in a second pass"


def test_it_is_the_stream_of_a_run(packed: Path, tmp_path: Path, shards: OpenedShards):
    texts = [f"train={packed / 'train'}", f"eval={packed / 'val'}", "seed=5", "model.patch_size=8"]
    changes = {"image_size": 16, "global_batch_size": 24, "duration": "8 steps", "augment": "{mixup_alpha: 0.2}"}
    recipe = load_recipe("digits", overrides=[*texts, *(f"pretrain.{key}={text}" for key, text in changes.items())])
    data = open_data(recipe, stage="pretrain")
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=62, world_size=2)
    stage = Stage(recipe, "pretrain", data, plan, RunFolder(tmp_path, "x"))
    stream = train_stream(stage, place=Place(rank=1, world_size=2))
    config = recipe.train_stage("pretrain")
    augment = config.augment.model_dump()
    loader = shards.loader(**SIZES, seed=5, world_size=2, rank=1, augment=augment, lanes=plan.lanes)
    for number, batch in enumerate(islice(loader, 8)):
        theirs = stream[number]
        assert torch.equal(batch.images, model_input(theirs, device=torch.device("cpu"), dtype=torch.float32))
        assert batch.ids.tolist() == theirs.samples[: len(batch.ids)].tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resume_at": 25}, "resume_at 25"),
        ({"world_size": 5}, "5 processes"),
        ({"rank": 1}, "rank 1"),
        ({"augment": {"flp": 0}}, "did you mean flip"),
        ({"duration": "much"}, "duration: "),
        ({"duration": "10%"}, "duration: "),
        ({"use": "evaluate", "resume_at": 24}, "resume_at"),
        ({"lanes": 7}, "data.lanes 7"),
    ],
)
def test_what_does_not_fit_is_a_users_mistake(shards: OpenedShards, given: dict[str, Any], said: str):
    with pytest.raises(shardvit.UserError, match=said):
        shards.loader(**SIZES, **given)


def test_channels_take_a_mean_of_each_and_no_augmentation_of_colours(tmp_path: Path):
    for number in range(8):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((16, 16, 1), number, np.uint8))
    shardvit.pack(tmp_path / "images", tmp_path / "out", channels=1, report=[].append)
    shards, sizes = shardvit.open_shards(tmp_path / "out" / "train"), {"batch_size": 8, "image_size": 16, "lanes": 1}
    for given, said in (({}, "mean"), ({"mean": (0.0,)}, "std")):  # three would make three channels of one
        with pytest.raises(shardvit.UserError, match=f"{said} has 3 numbers: give 1"):
            shards.loader(**sizes, **given)
    own = {"mean": (0.0,), "std": (1.0,)}
    for augment in ({"auto_augment": "3a"}, {"color_jitter": 0.3}, {"rand_augment": {"magnitude": 9}}):
        with pytest.raises(shardvit.UserError, match=next(iter(augment))):
            shards.loader(**sizes, **own, augment=augment)
    (batch,) = islice(shards.loader(**sizes, **own), 1)
    assert batch.images.shape == (8, 1, 16, 16)
    assert torch.allclose(batch.images[:, 0, 0, 0].sort().values, torch.arange(8) / 255)


def test_a_damaged_image_stops_or_is_replaced_by_a_rule(packed: Path, tmp_path: Path):
    tars = sorted((packed / "train").glob("*.tar"))
    for number, tar in enumerate(tars):
        (tmp_path / tar.name).write_bytes(tar.read_bytes().replace(b"IDAT", b"IDOT", number < 2))
    broken = shardvit.open_shards(tmp_path, report=[].append)
    with pytest.raises(shardvit.UserError, match="damaged"):
        some(broken)
    replaced = some(broken, on_corrupt="substitute")
    assert same(replaced, some(broken, on_corrupt="substitute", workers=0))
    assert not same(replaced, some(broken, on_corrupt="substitute", seed=1))
    passed = list(broken.loader(**SIZES, use="evaluate", on_corrupt="substitute"))
    assert len(torch.cat([each.ids for each in passed])) == 60


def test_several_labels_are_shares(tmp_path: Path):
    lines = ["path,label"]
    (tmp_path / "images").mkdir()
    for number in range(12):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        lines.append(f"{number}.png,{'a|b' if number % 2 else 'c'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    shardvit.pack(tmp_path / "images", tmp_path / "out", labels=tmp_path / "labels.csv", report=[].append)
    opened = shardvit.open_shards(tmp_path / "out" / "train")
    batch = next(iter(opened.loader(batch_size=12, image_size=16)))
    assert sorted(batch.targets.sum(1).tolist()) == [1.0] * 6 + [2.0] * 6
