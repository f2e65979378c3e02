"""Our hybrids and ResNets against timm's: names, shapes, and numbers once the epsilons are the same."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import StdConv2d, StdConv2dSame
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from model import resnet
from model.config import ModelConfig
from model.vit import build_model
from tests.model.comparing import relative_difference
from tests.oracles.conftest import Measured

HYBRIDS = {
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
}
RESNETS = {
    "R50x1": "resnetv2_50x1_bit",
    "R50x3": "resnetv2_50x3_bit",
    "R101x1": "resnetv2_101x1_bit",
    "R101x3": "resnetv2_101x3_bit",
    "R152x2": "resnetv2_152x2_bit",
    "R152x4": "resnetv2_152x4_bit",
}


@pytest.mark.parametrize(("variant", "theirs"), [*HYBRIDS.items(), *RESNETS.items()])
def test_names_and_shapes_are_timms(variant: str, theirs: str) -> None:
    with torch.device("meta"):
        ours = build_model(ModelConfig(variant=variant), image_size=224, num_classes=1000, head="linear")
        other = timm.create_model(theirs, num_classes=1000)
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    expected = {name.replace("head.fc", "head"): value.shape for name, value in other.state_dict().items()}
    if variant == "R+Ti/16":  # theirs is the root alone, ours a ResNet of no stages
        expected = {name.replace("backbone.", "backbone.stem."): shape for name, shape in expected.items()}
    if variant in RESNETS:  # theirs is a 1x1 convolution after the pooling
        assert expected["head.weight"] == (1000, ours.num_features, 1, 1)
        expected["head.weight"] = shapes["head.weight"]
    assert shapes == expected


def _randomise(network: nn.Module) -> None:
    """Random weights everywhere, no norm's scale near zero; kernels of the size of initial ones, so that epsilons
    matter as little as they do in practice."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))


def _hybrid(theirs: str) -> tuple[nn.Module, nn.Module, Tensor]:
    variant = next(variant for variant, name in HYBRIDS.items() if name == theirs)
    size = 2 * ModelConfig(variant=variant).sizes.patch_size
    ours = build_model(ModelConfig(variant=variant), image_size=size, num_classes=7, head="linear").eval()
    _randomise(ours)
    other = timm.create_model(theirs, img_size=size, num_classes=7, act_layer="gelu_tanh").eval()
    other.load_state_dict(ours.state_dict(), strict=True)
    return ours, other, torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


def _bit() -> tuple[nn.Module, nn.Module, Tensor]:
    layers: Any = (2, 1, 1, 2)
    ours = build_model(ModelConfig(resnet_layers=layers), image_size=64, num_classes=7, head="linear").eval()
    _randomise(ours)
    other = ResNetV2(layers=layers, num_classes=7, stem_type="fixed", conv_layer=StdConv2d).eval()
    state = {name.replace("head.", "head.fc."): value for name, value in ours.state_dict().items()}
    state["head.fc.weight"] = state["head.fc.weight"][:, :, None, None]
    other.load_state_dict(state, strict=True)
    return ours, other, torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def _logits(ours: nn.Module, theirs: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        expected = theirs(images)
        assert expected.abs().mean() > 0.1
        return ours(images), expected


def _set_epsilons(network: nn.Module, *, standardisation: float, group_norm: float) -> None:
    """timm's: the first under a root, so that no value of it is ours; where it vanishes the formulas are one."""
    for module in network.modules():
        if isinstance(module, StdConv2d | StdConv2dSame):
            module.eps = standardisation
        elif isinstance(module, nn.GroupNorm):
            module.eps = group_norm


@pytest.mark.parametrize("name", ["vit_small_r26_s32_224", "resnetv2_bit"])
def test_numbers_differ_by_the_epsilons_alone(name: str, monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    ours, theirs, images = _bit() if name == "resnetv2_bit" else _hybrid(name)

    with monkeypatch.context() as patch:
        patch.setattr(resnet, "STANDARDISATION_EPS", 0.0)
        _set_epsilons(theirs, standardisation=1e-30, group_norm=1e-6)
        semantic = "ResNet baseline (BiT)" if name == "resnetv2_bit" else "hybrid R26+S/32"
        measured(f"{semantic}, epsilons made equal", "timm", "logits", *_logits(ours, theirs, images))

    # what a user of timm's own model sees, with the weights of ours
    _set_epsilons(theirs, standardisation=1e-8, group_norm=1e-5)
    assert 1e-5 < relative_difference(*_logits(ours, theirs, images)) < 1e-3
