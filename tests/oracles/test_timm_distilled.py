"""The distillation token against timm's VisionTransformerDistilled: through folders and bare weights, both ways."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import account
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.init import initialise
from shardvit.model.layers.head import HeadPair, replace_head
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import (
    SavedModelMeta,
    build_described,
    build_from_saved,
    save_model,
    timm_objection,
)
from shardvit.model.vit import DistilledVit, build_model
from tests.model.comparing import randomise
from tests.oracles.conftest import Measured

SIZES: dict[str, Any] = {"width": 48, "depth": 2, "heads": 4, "patch_size": 4, "distillation_token": "learned"}
TIMMS: dict[str, Any] = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
IMAGES = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
NAMES = tuple("abcde")


def ours_of(**more: Any) -> tuple[SavedModelMeta, DistilledVit]:
    config = ModelConfig(**SIZES, **more)
    meta = SavedModelMeta(model=config, image_size=24, num_classes=5, class_names=NAMES, head="linear")
    model = randomise(build_described(meta)).eval()
    assert isinstance(model, DistilledVit)
    return meta, model


@pytest.mark.parametrize(
    "more",
    [{}, {"layer_scale": 1e-2}, {"position": "sincos_2d"}, {"qk_norm": "per_head"}],
)
def test_timm_loads_our_folder_and_computes_the_same_as_a_mean_and_in_training_as_a_pair(
    more: dict[str, Any], tmp_path: Path, measured: Measured
) -> None:
    meta, ours = ours_of(**more)
    save_model(tmp_path, ours.state_dict(), meta=meta)
    _, again = build_from_saved(tmp_path)
    theirs: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(theirs).__name__ == "VisionTransformerDistilled"
    other: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7)
    assert torch.equal(other.dist_token, theirs.dist_token) and other.head_dist.out_features == 7
    with torch.no_grad():
        expected = ours(IMAGES)
        assert torch.equal(again.eval()(IMAGES), expected) and expected.abs().mean() > 0.1
        besides = "".join(f", {key} {value}" for key, value in more.items())
        measured(f"ViT: distillation token{besides}", "timm", "logits", expected, theirs(IMAGES))
        theirs.set_distilled_training()
        ours.teaches_both = True
        for own, other in zip(ours.train()(IMAGES), theirs.train()(IMAGES), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["folder", "bare"])
def test_timms_distilled_model_is_imported_with_both_heads(how: str, tmp_path: Path) -> None:
    theirs = randomise(timm.create_model("deit_base_distilled_patch16_224", num_classes=5, **TIMMS)).eval()
    given: Any = {}
    path = tmp_path / "model.safetensors"
    if how == "folder":
        save_for_hf(theirs, tmp_path, model_args=TIMMS, safe_serialization=True)
        path = tmp_path
    else:
        save_file(theirs.state_dict(), path)
        given = {"config": ModelConfig(**SIZES, gelu="erf", interpolation="timm")}
    meta, state = import_file(path, **given)
    assert meta.model.distillation_token == "learned"
    ours = build_described(meta)
    ours.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(IMAGES), theirs(IMAGES), rtol=1e-5, atol=1e-5)
    swapped, zero = import_file(path, num_classes=7, **given)
    assert swapped.num_classes == 7 and not zero["head.dist.weight"].any() and zero["head.dist.bias"].shape == (7,)
    assert read_external(path, **given).config.distillation_token == "learned"


def test_the_released_ones_have_our_sizes() -> None:
    for name, variant in (("tiny", "Ti/16"), ("small", "S/16"), ("base", "B/16")):
        with torch.device("meta"):
            theirs = timm.create_model(f"deit_{name}_distilled_patch16_224")
        counted = account(
            ModelConfig(variant=variant, distillation_token="learned"), image_size=224, num_classes=1000, head="linear"
        )
        assert counted.parameters == sum(each.numel() for each in theirs.parameters())
        assert counted.tokens == 198


def test_a_swapped_head_is_a_zero_pair_and_a_higher_resolution_keeps_both_tokens() -> None:
    meta, model = ours_of()
    larger = resize_state(model.state_dict(), config=meta.model, from_image_size=24, to_image_size=36)
    assert larger["pos_embed"].shape == (1, 2 + 81, 48)
    assert torch.equal(larger["pos_embed"][:, :2], model.state_dict()["pos_embed"][:, :2])
    build_model(meta.model, image_size=36, num_classes=5, head="linear").load_state_dict(larger)
    replace_head(model, 3)
    assert isinstance(model.head, HeadPair)
    assert model(IMAGES).shape == (3, 3) and not model(IMAGES).any()


def test_it_starts_as_deits_and_every_weight_has_a_gradient() -> None:
    model = build_model(ModelConfig(**SIZES), image_size=24, num_classes=5, head="linear")
    initialise(model, seed=0, style="timm")
    assert isinstance(model, DistilledVit) and model.dist_token.std().item() == pytest.approx(0.02, rel=0.5)
    assert {name for name, _ in model.named_parameters() if "dist" in name} == {
        *("dist_token", "head.dist.weight", "head.dist.bias"),
    }
    model(IMAGES).square().sum().backward()
    assert [name for name, it in model.named_parameters() if it.grad is None or not it.grad.any()] == []


@pytest.mark.parametrize("more", [{"pool": "gap"}, {"registers": 2}, {"rope": "axial"}])
def test_with_what_deit_has_not_it_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="distillation_token"):
        ModelConfig(**SIZES, **more)


def test_what_timms_class_cannot_hold_is_saved_for_us_alone(tmp_path: Path) -> None:
    meta, ours = ours_of(class_token_position="none")
    assert timm_objection(meta) is not None
    save_model(tmp_path, ours.state_dict(), meta=meta)
    with torch.no_grad():
        assert torch.equal(build_from_saved(tmp_path)[1].eval()(IMAGES), ours(IMAGES))
