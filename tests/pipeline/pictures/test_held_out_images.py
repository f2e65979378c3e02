"""Images beside predictions are those that evaluation sees, and masked patches those that it judges; else none."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.shards.tar_index import index_path, read_index
from shardvit.model.init import initialise
from shardvit.model.saved.model_folder import save_model
from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder
from shardvit.model.self_supervised.masked_patch import build_masked_patch, colour_classes
from shardvit.pipeline.pictures import held_out_images as held_out_module
from shardvit.pipeline.pictures.drawing import draw, drawers
from shardvit.pipeline.pictures.evaluation_grid import draw_evaluation_grid, draw_worst_mistakes, is_right
from shardvit.pipeline.pictures.held_out_images import held_out_images
from shardvit.pipeline.pictures.masked_patches import colour_of, draw_masked_patches, fill_in
from shardvit.pipeline.pictures.reconstructions import draw_reconstructions, reconstruct
from shardvit.pipeline.pictures.style import keep_drawn
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.runs.evaluations import Evaluation, Judged, save_evaluation
from shardvit.pipeline.runs.pictures import DrawRequest, kept_pictures
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.batches import eval_transform
from shardvit.pipeline.stage.initial_model import StageStart, stage_model
from shardvit.pipeline.tasks.patch_corruption import MaskedPatches
from shardvit.pipeline.tasks.patch_reconstruction import PatchReconstruction
from tests.pipeline.pictures.evaluated_sets import HOSTILE, evaluation_of

IMAGES, DAMAGED = 40, 5
CLASSES = HOSTILE[:4]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 photographs of 4 classes in 4 shards, number 5 of them damaged; and another such set."""
    root = tmp_path_factory.mktemp("set")
    for name, seed in (("one", 0), ("other", 1)):
        draw = np.random.default_rng(seed)
        for number in range(IMAGES):
            path = root / f"in-{name}" / "train" / f"class{number % 4}" / f"{name}{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (18 + number % 7, 21, 3), dtype=np.uint8)).save(path)
        pack(str(root / f"in-{name}"), root / name, samples_per_shard=11, report=lambda line: None)
        manifest = root / name / "train" / "manifest.json"
        content = json.loads(manifest.read_text())
        content |= {"classes": CLASSES, "label_map": {name: number for number, name in enumerate(CLASSES)}}
        manifest.write_text(json.dumps(content))
    tar = min((root / "one" / "train").glob("*.tar"))
    start, damaged = int(read_index(index_path(tar)).image_offset[DAMAGED]), bytearray(tar.read_bytes())
    damaged[start : start + 40] = bytes(40)
    tar.write_bytes(damaged)
    return root


def request_for(folder: Path, held_out: Path, *, stage: str = "pretrain", protocol: str = "big_vision") -> DrawRequest:
    run = RunFolder(runs_root=folder, name="r")
    (run.path / stage).mkdir(parents=True, exist_ok=True)
    config = {
        "train": str(held_out),
        "eval": str(held_out),
        "eval_protocol": protocol,
        "image_size": 16,
        "global_batch_size": 8,
        "duration": "4 steps",
        "optimizer": {"name": "adamw", "lr": 0.001},
    }
    after = {"swap_head": {}, "finetune": config} if stage.startswith("masked_") else {}
    recipe = {
        "name": "r",
        "seed": 7,
        "model": {"width": 16, "depth": 2, "heads": 2, "patch_size": 4},
        "data": {"max_corrupt_share": 0.1, "cache": {"folder": str(folder / "cache")}},
        "stages": {stage: config, **after},
    }
    return DrawRequest(run, Recipe.model_validate(recipe), stage, 4)  # pyright: ignore[reportArgumentType]


def seen_in_evaluation(request: DrawRequest, held_out: Path) -> Batch:
    """All samples in one batch, by the loader of evaluations."""
    opened = open_shards(ShardsSpec(str(held_out)), damaged="report", report=lambda line: None)
    access = Access(opened, on_corrupt="substitute")
    transform = eval_transform(request.recipe.train_stage(request.stage))
    [batch] = eval_batches(EvalBatches(access, transform=transform, rank=0, world_size=1, batch_size=IMAGES), workers=0)
    return batch


def evaluation(batch: Batch, *, wrong: int) -> Evaluation:
    """Of all samples that can be read, the last `wrong` of them mistaken, ever less surely."""
    rows = batch.counted.nonzero()[:, 0].tolist()
    true = batch.labels[batch.counted].numpy()
    shares = 0.1 * np.ones((len(rows), 4)) + 0.6 * np.eye(4)[true]
    for number in range(1, wrong + 1):
        shares[-number] = 0.02 * number + (0.97 - 0.08 * number) * np.eye(4)[(true[-number] + 1) % 4]
    whole = evaluation_of(true, shares, classes=CLASSES, keys=[batch.keys[row] for row in rows])

    def numbered(judged: Judged) -> Judged:
        return replace(judged, sample=rows[judged.sample])

    return replace(whole, examples=tuple(map(numbered, whole.examples)), mistakes=tuple(map(numbered, whole.mistakes)))


@pytest.mark.parametrize("protocol", ["vit", "big_vision", "timm"])
def test_the_images_are_those_of_evaluation(shards: Path, tmp_path: Path, protocol: str) -> None:
    held_out = shards / "one" / "train"
    request = request_for(tmp_path, held_out, protocol=protocol)
    everything = seen_in_evaluation(request, held_out)
    wanted = [39, 0, DAMAGED, 12, 11, 10]
    some = held_out_images(request, set_name="val", samples=wanted)
    assert some.samples.tolist() == [39, 0, 12, 11, 10] and some.counted.all()
    assert not everything.counted[DAMAGED]
    assert torch.equal(some.images, everything.images[some.samples])
    assert torch.equal(some.labels, everything.labels[some.samples])
    assert list(some.keys) == [everything.keys[number] for number in some.samples.tolist()]


def test_what_is_not_on_this_machine_is_not_fetched(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(tmp_path, shards / "one" / "train")
    monkeypatch.setattr(held_out_module, "is_local", lambda url: False)
    assert held_out_images(request, set_name="val", samples=[0, 1]).keys == ()
    save_evaluation(request.stage_folder, evaluation_of([0], np.eye(4)[[1]], classes=CLASSES), step=4)
    keep_drawn(request, (*draw_evaluation_grid(request), *draw_worst_mistakes(request)))
    assert kept_pictures(request.stage_folder) == []


def test_a_sample_or_a_set_that_there_is_not(shards: Path, tmp_path: Path) -> None:
    request = request_for(tmp_path, shards / "one" / "train")
    with pytest.raises(ValueError, match="40"):
        held_out_images(request, set_name="val", samples=[3, IMAGES])
    with pytest.raises(ValueError, match="imagenet_v2"):
        held_out_images(request, set_name="imagenet_v2", samples=[3])
    with pytest.raises(UserError, match="gone"):
        held_out_images(request_for(tmp_path, tmp_path / "gone"), set_name="val", samples=[3])


def test_predictions_and_mistakes_are_drawn_with_their_images(shards: Path, tmp_path: Path) -> None:
    held_out = shards / "one" / "train"
    request = request_for(tmp_path, held_out)
    found = evaluation(seen_in_evaluation(request, held_out), wrong=3)
    assert [is_right(each) for each in found.examples].count(False) == 3
    save_evaluation(request.stage_folder, found, step=4)
    said: list[str] = []
    draw(request, moment="evaluated", say=said.append)
    assert not [line for line in said if "failed" in line], said
    kept = {each.picture.name: each for each in kept_pictures(request.stage_folder)}
    assert {"evaluation_grid", "worst_mistakes", "confusion_matrix"} <= set(kept)
    grid, worst = kept["evaluation_grid"], kept["worst_mistakes"]
    assert grid.picture.alt.startswith("36 of the first 36 images")
    assert grid.svg is not None and worst.svg is not None
    svg = worst.svg.read_text(encoding="utf-8")
    assert svg.count("<image") == 3 and grid.svg.read_text(encoding="utf-8").count("<image") == 36
    assert "<script" not in svg and "3 images that were predicted wrongly" in worst.picture.alt
    for judged in found.mistakes:
        assert f"({judged.probability:.0%})" in svg and f"({judged.probability_of_true:.0%})" in svg
    first = found.mistakes[0]
    assert first.probability == max(each.probability for each in found.mistakes)
    assert f"{100 * first.probability:.1f} %" in worst.picture.alt


def test_other_shards_than_were_evaluated_show_no_images(shards: Path, tmp_path: Path) -> None:
    request = request_for(tmp_path, shards / "one" / "train")
    found = evaluation(seen_in_evaluation(request, shards / "other" / "train"), wrong=3)
    save_evaluation(request.stage_folder, found, step=4)
    keep_drawn(request, (*draw_evaluation_grid(request), *draw_worst_mistakes(request)))
    assert kept_pictures(request.stage_folder) == []


def test_several_labels_and_none_are_named(shards: Path, tmp_path: Path) -> None:
    held_out = shards / "one" / "train"
    request = request_for(tmp_path, held_out)
    found = evaluation(seen_in_evaluation(request, held_out), wrong=2)
    several = replace(found.examples[0], true=(0, 3), predicted=3)
    unlabelled = replace(found.examples[1], true=(), probability_of_true=math.nan)
    found = replace(
        found,
        label_kind="multi",
        confusion=None,
        calibration=None,
        examples=(several, unlabelled),
        mistakes=(unlabelled,),
    )
    save_evaluation(request.stage_folder, found, step=4)
    keep_drawn(request, (*draw_evaluation_grid(request), *draw_worst_mistakes(request)))
    grid, worst = kept_pictures(request.stage_folder)
    assert grid.picture.alt.startswith("1 of the first 2 images")
    assert worst.svg is not None and "no label" in worst.svg.read_text(encoding="utf-8")


def test_a_set_of_which_no_image_could_be_read_fails_nothing(shards: Path, tmp_path: Path) -> None:
    request = request_for(tmp_path, shards / "one" / "train")
    save_evaluation(request.stage_folder, evaluation_of([], np.zeros((0, 4)), classes=CLASSES), step=4)
    said: list[str] = []
    draw(request, moment="evaluated", say=said.append)
    assert not [line for line in said if "failed" in line], said
    assert [each.picture.name for each in kept_pictures(request.stage_folder)] == ["per_class"]


@pytest.fixture
def masked(shards: Path, tmp_path: Path) -> DrawRequest:
    """A masked_patch stage that has left a model that guesses all kinds of colours."""
    request = request_for(tmp_path, shards / "one" / "train", stage="masked_patch")
    model = build_masked_patch(request.recipe.model, image_size=16)
    initialise(model, seed=1)
    torch.nn.init.normal_(model.head.weight)
    meta = stage_model(request.recipe, stage="masked_patch", classes=(), start=StageStart())
    save_model(request.folder.model("masked_patch"), model.state_dict(), meta=meta)
    return request


def test_what_is_filled_in_is_what_evaluation_judges(masked: DrawRequest, shards: Path) -> None:
    filled = fill_in(masked)
    assert filled is not None
    engine: Any = SimpleNamespace(device=torch.device("cpu"), input_dtype=torch.float32)
    task = MaskedPatches(engine=engine, seed=7, patch_size=4)
    everything = seen_in_evaluation(masked, shards / "one" / "train")
    example = task.example(everything, use="eval")
    from shardvit.model.saved.model_folder import build_from_saved

    _, model = build_from_saved(masked.folder.model("masked_patch"))
    with torch.inference_mode():
        logits = model.eval()(*example.inputs)
    rows = [number for number in range(8) if number != DAMAGED]
    np.testing.assert_array_equal(filled.images, everything.images[rows].numpy())
    np.testing.assert_array_equal(filled.source, example.inputs[1][rows].numpy())
    np.testing.assert_array_equal(filled.corrupted, example.inputs[2][rows].numpy())
    np.testing.assert_array_equal(filled.true, example.targets[rows].numpy())
    np.testing.assert_array_equal(filled.predicted, logits[rows].argmax(dim=-1).numpy())
    assert len(np.unique(filled.predicted)) > 5


def test_masked_patches_are_drawn_at_the_end_of_their_stage(masked: DrawRequest) -> None:
    assert draw_masked_patches in drawers("end")
    keep_drawn(masked, draw_masked_patches(masked))
    [kept] = kept_pictures(masked.stage_folder)
    filled = fill_in(masked)
    assert filled is not None and kept.svg is not None
    assert f"{filled.right.sum()} of {filled.right.size} patches" in kept.picture.alt
    svg = kept.svg.read_text(encoding="utf-8")
    assert svg.count("<image") == 4 * 7
    for row in filled.right:
        assert f"{row.sum()} of 8 right" in svg
    assert list(draw_masked_patches(replace(masked, stage="finetune"))) == []


def test_a_masked_autoencoders_reconstructions_are_what_evaluation_judges(shards: Path, tmp_path: Path) -> None:
    request = request_for(tmp_path, shards / "one" / "train", stage="masked_autoencoder")
    config = request.recipe.train_stage("masked_autoencoder")
    assert isinstance(config, MaskedAutoencoderStage)
    model = build_masked_autoencoder(request.recipe.model, image_size=16, decoder=config.decoder)
    initialise(model, seed=1, style="mae")
    meta = stage_model(request.recipe, stage="masked_autoencoder", classes=(), start=StageStart())
    save_model(request.folder.model("masked_autoencoder"), model.state_dict(), meta=meta)
    found = reconstruct(request, config)
    assert found is not None
    engine: Any = SimpleNamespace(device=torch.device("cpu"), input_dtype=torch.float32)
    task = PatchReconstruction(engine=engine, seed=7, patch_size=4, mask_ratio=0.75)
    example = task.example(seen_in_evaluation(request, shards / "one" / "train"), use="eval")
    with torch.inference_mode():
        predicted = model.eval()(*example.inputs)
    rows = [number for number in range(8) if number != DAMAGED]
    np.testing.assert_array_equal(found.hidden, example.inputs[2][rows].numpy())
    losses = task.tally(predicted, example.targets)
    np.testing.assert_allclose(found.losses, (losses.loss / losses.predictions)[rows].numpy(), rtol=1e-5)
    for row, number in enumerate(rows):  # the mean of a prediction is the true patch's, so nearly is its rounded one
        true = (example.inputs[0][number] * 127.5 + 127.5).permute(1, 2, 0).numpy()
        for column, at in enumerate(found.hidden[row].tolist()):
            patch = true[at // 4 * 4 : at // 4 * 4 + 4, at % 4 * 4 : at % 4 * 4 + 4]
            rescaled = predicted[number, column].numpy() * patch.std(ddof=1) + patch.mean()
            shown = found.predicted[row, column].reshape(-1)
            assert np.abs(rescaled.clip(0, 255) - shown).max() <= 0.51
    keep_drawn(request, draw_reconstructions(request))
    [kept] = kept_pictures(request.stage_folder)
    assert kept.svg is not None and kept.svg.read_text(encoding="utf-8").count("<image") == 4 * 7
    assert list(draw_reconstructions(replace(request, stage="finetune"))) == []


def test_a_class_of_colours_is_shown_as_a_colour_of_that_class() -> None:
    classes = np.arange(512)
    pixels = torch.from_numpy(np.broadcast_to(colour_of(classes)[:, None, None], (512, 4, 4, 3)).copy())
    np.testing.assert_array_equal(colour_classes(pixels, patch_size=4)[:, 0].numpy(), classes)
