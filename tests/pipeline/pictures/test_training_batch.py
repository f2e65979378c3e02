"""What is drawn of a training batch is what the loop feeds the model, bit for bit, whoever computes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.loading.device_prefetch import prefetch_to_device
from shardvit.data_shards.loading.loader import TrainLoader
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.tar_index import index_path, read_index
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.pictures.drawing import draw
from shardvit.pipeline.pictures.training_batch import batch_pictures, seen_batch, seen_in_epochs
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.runs.pictures import DrawRequest, kept_pictures
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord
from shardvit.pipeline.stage.batches import train_stream
from shardvit.pipeline.stage.stage_data import Stage, StageData, open_data
from shardvit.pipeline.tasks.make_task import make_task
from shardvit.pipeline.training.train_loop import train
from tests import looping

CPU = torch.device("cpu")
CLASSES = ("<script>alert(1)</script>", "$x^2$", "a\x1b[2J\nb", "plain")
OTHER_NORMALISATION = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
MIXING: dict[str, dict[str, Any]] = {
    "none": {"crop_area": [0.3, 1.0]},
    "mixup": {"mixup_alpha": 0.5, "rand_augment": {"num_ops": 2, "magnitude": 9}},
    "cutmix": {"cutmix_alpha": 1.0, "flip": 1.0},
    "both": {"cutmix_alpha": 1.0, "mixup_alpha": 0.2, "crop": "google"},
    "erasing": {"random_erasing": {"probability": 0.7}, "auto_augment": "3a"},
    "corner": {"crop": "resize_and_crop", "resize_size": 20},
    "pytorch": {
        "crop": "simple_random",
        "interpolation": "random",
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "color_jitter": 0.3,
        "random_erasing": {"probability": 0.5, "mode": "const"},  # noise is beyond what pixels can show
        "mixup_alpha": 0.8,
        "mixed_share": 0.7,
    },
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 noisy photographs of 4 classes; one of the training set is damaged."""
    root, draw = tmp_path_factory.mktemp("set"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(80 if split == "train" else 8):
            path = root / "in" / split / f"class{number % 4}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = 18 + number % 7, 21 + number % 5
            Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    pack(str(root / "in"), root / "out", samples_per_shard=11, report=lambda line: None)
    for manifest in (root / "out").glob("*/manifest.json"):  # any name can stand there
        content = json.loads(manifest.read_text())
        content |= {"classes": CLASSES, "label_map": {name: number for number, name in enumerate(CLASSES)}}
        manifest.write_text(json.dumps(content))
    tar = min((root / "out" / "train").glob("*.tar"))
    start, damaged = int(read_index(index_path(tar)).image_offset[3]), bytearray(tar.read_bytes())
    damaged[start : start + 40] = bytes(40)
    tar.write_bytes(damaged)
    return root / "out"


def recipe_of(shards: Path, *, augment: str = "none", engine: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "seed": 5,
            "model": {"width": 8, "depth": 1, "heads": 2, "patch_size": 4},
            "data": {"max_corrupt_share": 0.1, "shuffle_window_images": 16},
            "engine": {"precision": "fp32", **(engine or {})},
            "stages": {
                "pretrain": {
                    "train": str(shards / "train"),
                    "eval": str(shards / "val"),
                    "image_size": 16,
                    "global_batch_size": 16,
                    "duration": "12 steps",
                    "optimizer": {"name": "adamw", "lr": 0.001},
                    "augment": MIXING[augment],
                    **more,
                }
            },
        }
    )


def fed(recipe: Recipe, data: StageData, *, place: Place, steps: int, normalisation: Normalisation) -> list[Any]:
    """The inputs and targets of each step that the training loop itself gives the engine of one rank."""
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=place.world_size)
    plan = replace(plan, total_steps=steps, log_steps=0, eval_steps=0, save_steps=0)
    inputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    job, _ = looping.job(patch_dropout=0.0, first_step=0)

    def forward(images: torch.Tensor) -> torch.Tensor:
        inputs.append(images.clone())
        return torch.zeros(len(images), len(CLASSES), requires_grad=True)

    engine: Any = job.engine
    engine.forward, engine.input_dtype, engine.backward = forward, torch.float32, lambda loss: None
    job.ranks.place = place
    task: Any = make_task(recipe, stage="pretrain", data=data, normalisation=normalisation, engine=engine)
    loss = task.train_loss
    task = replace(task, train_loss=lambda outputs, wanted: (targets.append(wanted.clone()), loss(outputs, wanted))[1])
    stage = Stage(recipe, "pretrain", data, plan, run=RunFolder(Path(), name="r"))
    stream = train_stream(stage, place=place, normalisation=normalisation)
    loader = TrainLoader(stream, start_step=0, stop_step=steps, workers=2, kind="thread")
    batches = prefetch_to_device(loader, device=CPU)
    train(replace(job, plan=plan, batches=batches, task=task), TrainState())
    many = plan.accumulation_steps
    return [
        (torch.cat(inputs[step * many : (step + 1) * many]), torch.cat(targets[step * many : (step + 1) * many]))
        for step in range(steps)
    ]


def test_an_augmentation_of_the_users_own_is_not_run_to_draw(shards: Path, tmp_path: Path) -> None:
    """A page may be drawn of somebody else's run."""
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')\n")
    tree = recipe_of(shards).model_dump(mode="json")
    tree["stages"]["pretrain"]["augment"]["custom"] = f"{tmp_path / 'mine.py'}:mine"
    recipes = recipe_of(shards), Recipe.model_validate(tree)
    data = open_data(recipes[0], stage="pretrain", report=lambda line: None)
    plain, own = (seen_batch(recipe, stage="pretrain", data=data) for recipe in recipes)
    assert torch.equal(plain.inputs, own.inputs)
    captions = [each.caption for each, _ in batch_pictures(recipes[1], stage="pretrain", data=data, step=0)]
    assert all("without the user's own augmentation" in each for each in captions)


@pytest.mark.parametrize("augment", sorted({*MIXING} - {"erasing"}))
@pytest.mark.parametrize(("processes", "most_at_once"), [(1, 16), (2, 2), (4, 4)])
def test_the_pixels_shown_are_those_that_the_loop_feeds_the_model(
    shards: Path, augment: str, processes: int, most_at_once: int
) -> None:
    recipe = recipe_of(shards, augment=augment, engine={"max_micro_batch_size": most_at_once})
    data = open_data(recipe, stage="pretrain", report=lambda line: None)
    normalisation = OTHER_NORMALISATION if processes == 2 else GOOGLES
    steps = 7  # beyond the first epoch of 80 images
    ranks = [
        fed(recipe, data, place=Place(rank=rank, world_size=processes), steps=steps, normalisation=normalisation)
        for rank in range(processes)
    ]
    for step in (0, 3, 6):
        inputs, targets = (torch.cat([rank[step][which] for rank in ranks]) for which in (0, 1))
        whole = seen_batch(recipe, stage="pretrain", data=data, step=step, images=32, normalisation=normalisation)
        some = seen_batch(recipe, stage="pretrain", data=data, step=step, images=5, normalisation=normalisation)
        assert torch.equal(whole.inputs, inputs)
        assert torch.equal(some.inputs, inputs[:5])
        mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (normalisation.mean, normalisation.std))
        for image, row, target in zip(whole.images, inputs, targets, strict=True):
            assert np.abs(image.seen - (row * std + mean).permute(1, 2, 0).numpy()).max() < 0.501
            shares = torch.zeros(len(CLASSES))
            for name, share in image.labels:
                shares[data.train.classes.index(name)] = share
            wanted = target if target.is_floating_point() else torch.nn.functional.one_hot(target, len(CLASSES))
            assert torch.equal(shares, wanted.float())
        if augment not in ("none", "corner"):
            assert whole.mix is not None
            assert any(len(image.labels) == 2 for image in whole.images) == (whole.mix.kind != "none")


def test_originals_are_the_images_of_the_shards_and_substitutes_are_named(shards: Path) -> None:
    recipe = recipe_of(shards)
    data = open_data(recipe, stage="pretrain", report=lambda line: None)
    files = {
        tuple(np.asarray(Image.open(path)).ravel()[:60]): path
        for path in (shards.parent / "in" / "train").rglob("*.png")
    }
    seen = [image for step in range(5) for image in seen_batch(recipe, stage="pretrain", data=data, step=step).images]
    assert len(seen) == 80
    numbers = sorted({image.sample for image in seen})
    assert len(numbers) == 79  # the damaged one is not there
    for image in seen:
        path = files[tuple(image.original.ravel()[:60])]
        assert image.own == CLASSES[int(path.parent.name[-1])]
        assert np.array_equal(image.original, np.asarray(Image.open(path)))


@pytest.mark.parametrize("augment", ["none", "erasing"])
def test_an_epoch_of_an_image_is_what_the_stream_shows_in_that_epoch(shards: Path, augment: str) -> None:
    recipe = recipe_of(shards, augment=augment)
    data = open_data(recipe, stage="pretrain", report=lambda line: None)
    first = seen_batch(recipe, stage="pretrain", data=data, step=0).images[2]
    found = []
    for step in range(12):
        found += [
            image.seen
            for image in seen_batch(recipe, stage="pretrain", data=data, step=step).images
            if image.sample == first.sample
        ]
    in_epochs = seen_in_epochs(recipe, stage="pretrain", data=data, sample=first.sample, most_epochs=4)
    assert len(found) >= 2
    for number, pixels in enumerate(found):
        assert np.array_equal(pixels, in_epochs[number])


def test_the_lanes_of_a_run_of_many_processes_give_its_order(shards: Path) -> None:
    recipe = recipe_of(shards)
    data = open_data(recipe, stage="pretrain", report=lambda line: None)
    few, many = (
        [image.sample for image in seen_batch(recipe, stage="pretrain", data=data, lanes=lanes).images]
        for lanes in (0, 2)
    )
    fixed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"lanes": 2})})
    assert few != many == [image.sample for image in seen_batch(fixed, stage="pretrain", data=data).images]


def begun(runs: Path, recipe: Recipe, **record: Any) -> RunFolder:
    folder = RunFolder(runs_root=runs, name="r")
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text(dump_recipe(recipe))
    folder.write("pretrain", StageRecord(total_steps=12, **record))
    return folder


def test_a_run_s_pictures_are_drawn_once_with_names_as_text(shards: Path, tmp_path: Path) -> None:
    recipe = recipe_of(shards, augment="both")
    folder = begun(tmp_path, recipe, state="running", lanes=4)
    said: list[str] = []
    for step in (0, 7):  # it resumes after step 7
        draw(DrawRequest(folder, recipe, "pretrain", step), moment="begin", say=said.append)
    assert not [line for line in said if "failed" in line]
    kept = {(each.picture.name, each.step): each for each in kept_pictures(folder.stage("pretrain"))}
    assert set(kept) == {("training_batch", 0), ("augmentation", 0)}
    assert kept["augmentation", 0].picture.title == "One image in 3 epochs"  # 12 steps of 16 of the 80 images
    text = kept["training_batch", 0].svg.read_text()
    assert "<script>alert" not in text and "&lt;script" in text
    assert "\x1b" not in text


def test_after_the_last_step_its_batch_is_drawn(shards: Path, tmp_path: Path) -> None:
    recipe = recipe_of(shards)
    folder = begun(tmp_path, recipe, state="done")
    draw(DrawRequest(folder, recipe, "pretrain", 12), moment="begin", say=print)
    (kept,) = (each for each in kept_pictures(folder.stage("pretrain")) if each.picture.name == "training_batch")
    assert kept.step == 11 and "after 11 steps," in kept.picture.title  # the page shows both
