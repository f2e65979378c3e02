"""`model.formats.external_model`: another resolution, other classes, and what may not change."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import ndimage

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import ExternalModel, adapt
from shardvit.model.positions.interpolation import resize_state
from tests.model.formats.small_model import CONFIG, NAMES, described, images, logits, random_model, rebuilt

SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


def _foreign(config: ModelConfig = CONFIG, **changes: Any) -> ExternalModel:
    meta = described(config, **changes)
    return ExternalModel(
        format="test",
        state=random_model(meta).state_dict(),
        config=config,
        image_size=24,
        num_classes=5,
        head="mlp" if meta.head == "mlp" else "linear",
        class_names=NAMES,
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        eval_protocol="timm",
        eval_crop_share=0.8,
    )


def test_nothing_asked_is_nothing_changed() -> None:
    foreign = _foreign(head="mlp")
    meta, state = adapt(foreign)
    assert meta == described(
        head="mlp", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), eval_protocol="timm", eval_crop_share=0.8
    )
    assert all(state[name] is value for name, value in foreign.state.items())
    same, state = adapt(foreign, image_size=24, num_classes=5)
    assert same == meta
    assert state.keys() == foreign.state.keys()


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_another_count_drops_the_whole_head(head: str) -> None:
    foreign = _foreign(head=head)
    meta, state = adapt(foreign, num_classes=3)
    assert (meta.head, meta.num_classes, meta.class_names) == ("linear", 3, ("0", "1", "2"))
    assert sorted(name for name in state if name.startswith("head")) == ["head.bias", "head.weight"]
    assert torch.equal(logits(rebuilt(meta, state), images()), torch.zeros(3, 3))
    trunk = [name for name in foreign.state if not name.startswith("head.")]
    assert all(state[name] is foreign.state[name] for name in trunk)


def test_class_names_count_and_rename() -> None:
    meta, _ = adapt(_foreign(), class_names=["a", "b"])
    assert (meta.num_classes, meta.class_names) == (2, ("a", "b"))
    renamed, state = adapt(_foreign(), class_names=["a", "b", "c", "d", "e"])
    assert renamed.class_names == ("a", "b", "c", "d", "e")
    assert state["head.weight"].abs().max() > 0
    assert adapt(replace(_foreign(), class_names=()))[0].class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("interpolation", ["google", "timm"])
@pytest.mark.parametrize("size", [16, 40])
def test_another_resolution_interpolates_by_the_kernel_of_the_file(interpolation: Any, size: int) -> None:
    config = ModelConfig(**SIZES, interpolation=interpolation)
    foreign = _foreign(config)
    meta, state = adapt(foreign, image_size=size)
    assert meta.image_size == size
    assert torch.equal(state["pos_embed"][:, 0], foreign.state["pos_embed"][:, 0])
    expected = resize_state(foreign.state, config=config, from_image_size=24, to_image_size=size)
    assert torch.equal(state["pos_embed"], expected["pos_embed"])
    grid = foreign.state["pos_embed"][0, 1:].reshape(6, 6, 48).double().numpy()
    zoomed = torch.from_numpy(ndimage.zoom(grid, (size / 24, size / 24, 1), order=1)).float()
    difference = (state["pos_embed"][0, 1:].reshape(zoomed.shape) - zoomed).abs().max()
    assert (difference < 1e-6) == (interpolation == "google")
    assert logits(rebuilt(meta, state), images(size)).shape == (3, 5)


def test_dtypes_are_kept() -> None:
    foreign = _foreign()
    half = replace(foreign, state={name: value.bfloat16() for name, value in foreign.state.items()})
    _, state = adapt(half, image_size=32, num_classes=2)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"image_size": 26}, "image size 26 is not a multiple of the patch size 4"),
        ({"num_classes": 0}, "--num-classes must be at least 1, not 0"),
        ({"num_classes": 3, "class_names": ["a"]}, "1 class names for --num-classes 3"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        adapt(_foreign(), **arguments)


def test_a_trunk_without_head_wants_a_count() -> None:
    foreign = _foreign()
    trunk = {name: value for name, value in foreign.state.items() if not name.startswith("head.")}
    headless = replace(foreign, state=trunk, num_classes=0, class_names=())
    with pytest.raises(ValueError, match="has no head: give --num-classes"):
        adapt(headless)
    assert adapt(headless, num_classes=2)[0].num_classes == 2


def test_weights_of_another_model_are_tabled() -> None:
    foreign = _foreign()
    with pytest.raises(ValueError, match=r"does not fit(.*\n)*  blocks\.4\.(.*\n)*.*give --width 48 --depth 4"):
        adapt(replace(foreign, config=ModelConfig(**SIZES | {"depth": 5})))
    with pytest.raises(ValueError, match=r"blocks\.2\.norm1\.bias +missing +\(48,\)"):
        adapt(replace(foreign, state={k: v for k, v in foreign.state.items() if k != "blocks.2.norm1.bias"}))
