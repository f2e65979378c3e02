"""The paper's figures of tiny models of every kind: which there are, what they say, and that they are drawn from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch, batch_of
from shardvit.model.config import ModelConfig
from shardvit.model.inspection import Rollout, look_at_attention
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from shardvit.pipeline.pictures.paper.attention_figures import in_the_light_of
from shardvit.pipeline.pictures.paper.attention_inputs import images_of_files, images_to_look_at, look
from shardvit.pipeline.pictures.paper.model_figures import built, figures_of_attention, figures_of_weights, left_out
from shardvit.pipeline.pictures.paper.weight_figures import evenly, tiled
from shardvit.pipeline.pictures.style import keep_picture
from shardvit.pipeline.runs.pictures import kept_pictures
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.using.find_model import FoundModel
from tests.model.comparing import randomise

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "patch_size": 4}
CLASSES = ("cat", "$x^2$ <b>", "d" * 60)
WEIGHTS = {"embedding_filters"}
ATTENTION = {"attention_rollout", "attention_maps", "attention_distance"}
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "class token": (SIZES, WEIGHTS | ATTENTION | {"position_similarity"}),
    "gap": ({**SIZES, "pool": "gap"}, WEIGHTS | ATTENTION | {"position_similarity"}),
    "map, sincos": (
        {**SIZES, "pool": "map", "position": "sincos_2d"},
        WEIGHTS | ATTENTION | {"position_similarity"},
    ),
    "2-D, every layer": (
        {**SIZES, "position": "learned_2d", "position_at": "every_layer"},
        WEIGHTS | ATTENTION | {"position_similarity"},
    ),
    "hybrid": ({**SIZES, "resnet_layers": (), "patch_size": 8}, WEIGHTS | ATTENTION | {"position_similarity"}),
    "relative": ({**SIZES, "position": "relative"}, WEIGHTS | ATTENTION),
    "none": ({**SIZES, "position": "none"}, WEIGHTS | ATTENTION),
    "one patch": ({**SIZES, "patch_size": 16}, WEIGHTS | ATTENTION | {"position_similarity"}),
    "resnet": ({"resnet_layers": (1,)}, WEIGHTS),
    "masked patch": (SIZES, WEIGHTS | ATTENTION | {"position_similarity"}),
}


def _found(kind: str) -> FoundModel:
    config = ModelConfig(**KINDS[kind][0])
    masked = kind == "masked patch"
    meta = SavedModelMeta(
        model=config,
        image_size=16 if config.kind == "vit" else 32,
        num_classes=512 if masked else 3,
        class_names=tuple(map(str, range(512))) if masked else CLASSES,
        head="masked_patch" if masked else "linear",
    )
    return FoundModel(meta, randomise(build_described(meta)).state_dict(), origin="here")


def _batch(meta: SavedModelMeta, number: int = 3) -> Batch:
    pixels = np.random.default_rng(1).integers(0, 256, (number, meta.image_size, meta.image_size, 3), np.uint8)
    keys = [f"a/{row}" for row in range(number)]
    return replace(batch_of(torch.from_numpy(pixels), keys=keys), labels=torch.arange(number) % 3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_has_its_figures(kind: str, tmp_path: Path) -> None:
    found = _found(kind)
    model = built(found, device=torch.device("cpu"))
    drawn = list(figures_of_weights(model, meta=found.meta))
    if isinstance(model, VisionTransformer):
        batch = _batch(found.meta)
        attention = look(model, batch, meta=found.meta)
        drawn += figures_of_attention(attention, batch, meta=found.meta, classes=CLASSES)
    for picture, figure in drawn:
        keep_picture(tmp_path, picture, figure=figure, step=3)
    kept = kept_pictures(tmp_path)
    assert {each.picture.name for each in kept} == KINDS[kind][1]
    assert bool(left_out(found.meta)) == (len(kept) < 5)
    for each in kept:
        assert each.png is not None and each.svg is not None
        with Image.open(each.png) as image:
            pixels = np.asarray(image.convert("L"))
        assert min(pixels.shape) > 100 and pixels.std() > 5  # something is drawn
        assert each.picture.caption and each.picture.alt
        assert "nan" not in each.picture.alt


def test_a_model_is_built_as_it_was_saved() -> None:
    found = _found("map, sincos")  # whose table is no part of its state
    expected = build_described(found.meta)
    expected.load_state_dict(found.state)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(built(found, device=torch.device("cpu"))(images), expected.eval()(images))


def test_what_is_kept_of_a_look_is_that_of_the_model_shown_all_at_once() -> None:
    found = _found("class token")
    model = built(found, device=torch.device("cpu"))
    assert isinstance(model, VisionTransformer)
    batch = _batch(found.meta, number=40)  # several passes
    attention = look(model, batch, meta=found.meta)
    rollout, maps = Rollout(), list[torch.Tensor]()

    def see(block: int, probabilities: torch.Tensor) -> None:
        rollout.add(block, probabilities)
        maps.append(probabilities[0, :, 0, 1:])

    images = model_input(batch, device=torch.device("cpu"), dtype=torch.float32)
    tokens = look_at_attention(model, images, see=see)
    assert attention.images == 40
    torch.testing.assert_close(attention.rollout, rollout.to_patches(model, tokens)[:8])
    torch.testing.assert_close(attention.maps.flatten(2), torch.stack(maps))
    with torch.no_grad():
        best = model(images)[:8].softmax(dim=1).max(dim=1)
    assert [index for index, _ in attention.guesses] == best.indices.tolist()
    assert [share for _, share in attention.guesses] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_the_number_of_images_follows_from_the_model() -> None:
    tiny, large = _found("class token").meta, ModelConfig(variant="H/14")
    huge = SavedModelMeta(model=large, image_size=224, num_classes=1, class_names=("a",), head="linear")
    assert images_to_look_at(tiny) == 128
    assert images_to_look_at(huge) == 8


def test_light_falls_where_attention_is() -> None:
    image = np.full((64, 64, 3), 200, np.uint8)
    shares = np.zeros((4, 4))
    shares[1, 2] = 1.0
    lit = in_the_light_of(image, shares)
    assert lit.max() == 200 and lit.min() == 0
    assert lit[24, 40].min() > 190 and lit[56, 8].max() < 5  # the middle of that patch, and of one far away
    assert np.array_equal(in_the_light_of(image, np.full((4, 4), 0.0625)), image)  # equal shares: all of it


def test_tiles_keep_their_maps_and_leave_gaps() -> None:
    maps = np.arange(2 * 3 * 4 * 4, dtype=np.float64).reshape(2, 3, 4, 4)
    tiles = tiled(maps)
    times = (tiles.steps[0] - tiles.gap) // 4
    assert np.isnan(tiles.raster[tiles.steps[0] - 1]).all()
    for row in range(2):
        for column in range(3):
            top, left = row * tiles.steps[0], column * tiles.steps[1]
            shown = tiles.raster[top : top + 4 * times : times, left : left + 4 * times : times]
            assert np.array_equal(shown, maps[row, column])
    places, names = tiles.ticks("columns", names=["a", "b", "c"])
    assert names == ["a", "b", "c"] and len(places) == 3


def test_evenly_spaced_numbers_have_both_ends() -> None:
    assert evenly(3, most=5) == [0, 1, 2]
    assert evenly(24, most=4) == [0, 8, 15, 23]


def test_files_that_are_no_images_are_named_and_the_others_shown(tmp_path: Path) -> None:
    meta = _found("class token").meta
    Image.fromarray(np.full((20, 30, 3), 7, np.uint8)).save(tmp_path / "good.png")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    files = [tmp_path / "good.png", tmp_path / "bad.jpg", tmp_path / "gone.png"]
    batch, faults = images_of_files(files, meta=meta)
    assert batch.keys == ("good.png",) and batch.images.shape == (1, 16, 16, 3) and int(batch.images.max()) == 7
    assert len(faults) == 2 and "bad.jpg" in faults[0] and "gone.png" in faults[1]
    with pytest.raises(UserError, match=r"bad\.jpg"):
        images_of_files([tmp_path / "bad.jpg"], meta=meta)


def test_words_are_json_whatever_a_class_is_called(tmp_path: Path) -> None:
    found = _found("class token")
    model = built(found, device=torch.device("cpu"))
    assert isinstance(model, VisionTransformer)
    classes = ("\x1b[31mred", "\ud800", "</svg><script>alert(1)</script>")
    batch = _batch(found.meta)
    attention = look(model, batch, meta=found.meta)
    for picture, figure in figures_of_attention(attention, batch, meta=found.meta, classes=classes):
        words = keep_picture(tmp_path, picture, figure=figure, step=0)
        json.loads(words.read_text(encoding="utf-8"))
        svg = words.with_suffix(".svg").read_text(encoding="utf-8")
        assert "<script>alert" not in svg and "\x1b" not in svg
