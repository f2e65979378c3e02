"""Our timm style of initial weights against the weights that timm's own constructors draw."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from scipy.stats import ks_2samp
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer

from model.config import ModelConfig
from model.init import initialise
from model.vit import build_model, timm_arguments
from model.vocabulary import Pool

CLASSES = 30


def _compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        value, their_value = ours[name].double().numpy(), tensor.double().numpy()
        assert value.shape == their_value.shape, name
        if their_value.std() == 0:
            assert np.array_equal(value, their_value), name
            continue
        count = value.size
        assert abs(value.std() / their_value.std() - 1) < 4.5 / np.sqrt(count), name
        assert ks_2samp(value.ravel(), their_value.ravel()).pvalue > 1e-3, name
        if count > 1000:
            assert np.abs(value).max() == pytest.approx(np.abs(their_value).max(), rel=0.25), name


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_a_transformer_starts_as_timms(pool: Pool) -> None:
    config = ModelConfig(width=96, depth=2, heads=3, mlp_dim=160, patch_size=8, pool=pool, layer_scale=1e-4)
    model = build_model(config, image_size=64, num_classes=CLASSES, head="linear")
    initialise(model, seed=0, style="timm")
    torch.manual_seed(0)
    theirs = VisionTransformer(**timm_arguments(config, image_size=64), num_classes=CLASSES)
    _compare(model.state_dict(), theirs.state_dict())


def test_a_hybrid_starts_as_timms() -> None:
    """timm's stem has other epsilons, but the same parameters."""
    config = ModelConfig(variant="R26+S/32")
    model = build_model(config, image_size=64, num_classes=CLASSES, head="linear")
    initialise(model, seed=0, style="timm")
    torch.manual_seed(0)
    theirs = timm.create_model("vit_small_r26_s32_224", img_size=64, num_classes=CLASSES)
    parts = ("patch_embed.backbone.stem", "patch_embed.backbone.stages.0", "patch_embed.backbone.stages.1.blocks.1")
    parts += ("patch_embed.proj", "head", "pos_embed", "blocks.0", "cls_token")

    def some(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in state.items() if name.startswith(parts)}

    _compare(some(model.state_dict()), some(theirs.state_dict()))


def test_a_pure_resnet_starts_as_timms() -> None:
    model = build_model(ModelConfig(resnet_layers=(1, 2)), image_size=16, num_classes=CLASSES, head="linear")
    initialise(model, seed=0, style="timm")
    torch.manual_seed(0)
    theirs = ResNetV2([1, 2], num_classes=CLASSES).state_dict()
    theirs = {name.replace("head.fc.", "head."): value for name, value in theirs.items()}
    theirs["head.weight"] = theirs["head.weight"].flatten(1)  # theirs is a 1 x 1 convolution
    _compare(model.state_dict(), theirs)
