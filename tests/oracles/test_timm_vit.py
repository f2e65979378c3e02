"""timm's own models, functions and initial weights: our state dicts in them, and our numbers beside theirs."""

import json
from typing import Any

import numpy as np
import pytest
import timm
import torch
from scipy.stats import ks_2samp
from timm.layers import StdConv2d, StdConv2dSame, resample_abs_pos_embed
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from shardvit.model import resnet
from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.init import initialise
from shardvit.model.positions.interpolation import interpolate_pos_embed
from shardvit.model.vit import build_model, timm_arguments
from shardvit.model.vocabulary import Gelu, Pool
from tests.model.comparing import SMALL_TOKENS, randomise, relative_difference
from tests.oracles.conftest import Measured

CLASSES = 30
GRIDS = [(14, 24), (16, 37), (7, 12), (24, 14), (37, 16), (4, 3), (2, 7), (1, 4)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_named_timm_model_loads_our_weights_strictly_and_agrees(dropout: float, measured: Measured) -> None:
    """Dropout adds no parameter; the tanh GELU is the one thing timm must be told."""
    ours = build_model(
        ModelConfig(variant="Ti/16"),
        image_size=32,
        num_classes=7,
        head="linear",
        regularisation=Regularisation(dropout=dropout),
    )
    randomise(ours, scale=0.1, token_scale=SMALL_TOKENS)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))

    def logits(**arguments: str) -> torch.Tensor:
        theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, **arguments).eval()
        theirs.load_state_dict(ours.state_dict(), strict=True)
        with torch.no_grad():
            return theirs(images)

    with torch.no_grad():
        expected = ours.eval()(images)
    measured("ViT: Ti/16 by name", "timm", "logits", expected, logits(act_layer="gelu_tanh"))
    assert (logits() - expected).abs().max() > 1e-4  # timm's default is the erf GELU


@pytest.mark.parametrize(
    ("variant", "theirs"),
    [
        ("Ti/16", "vit_tiny_patch16_224"),
        ("S/16", "vit_small_patch16_224"),
        ("H/14", "vit_huge_patch14_224"),
        ("g/14", "vit_giant_patch14_224"),
        ("G/14", "vit_gigantic_patch14_224"),
    ],
)
def test_the_table_of_variants_is_timms(variant: str, theirs: str) -> None:
    config = ModelConfig(variant=variant)
    with torch.device("meta"):
        ours = build_model(config, image_size=224, num_classes=1000, head="linear")
        other = timm.create_model(theirs, num_classes=1000)
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    assert shapes == {name: value.shape for name, value in other.state_dict().items()}
    assert config.sizes.heads == other.blocks[0].attn.num_heads


def _timms(config: ModelConfig, state: dict[str, Any]) -> torch.nn.Module:
    arguments = json.loads(json.dumps(timm_arguments(config, image_size=24)))
    theirs = VisionTransformer(**arguments, num_classes=5)
    theirs.load_state_dict(state, strict=True)
    return theirs.eval()


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize(("gelu", "layer_scale"), [("tanh", None), ("erf", None), ("tanh", 0.1)])
def test_timms_model_loads_our_state_strictly_and_agrees(
    pool: Pool, gelu: Gelu, layer_scale: float | None, measured: Measured
) -> None:
    config = ModelConfig(
        width=48, depth=4, heads=4, mlp_dim=80, patch_size=4, pool=pool, gelu=gelu, layer_scale=layer_scale
    )
    ours = randomise(build_model(config, image_size=24, num_classes=5, head="linear"), token_scale=SMALL_TOKENS).eval()
    theirs = _timms(config, ours.state_dict())
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(images)
        assert expected.abs().mean() > 0.1
        scale = ", layer scale" if layer_scale else ""
        measured(f"ViT: {pool}, linear head, learned_1d, {gelu} GELU{scale}", "timm", "logits", ours(images), expected)
        torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images))  # pyright: ignore


def test_another_pooling_would_be_noticed() -> None:
    """The mean of the normed tokens is not the norm of the mean, timm's own habit."""
    config = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4, pool="gap")
    ours = randomise(build_model(config, image_size=24, num_classes=5, head="linear"), token_scale=SMALL_TOKENS).eval()
    state = ours.state_dict()
    arguments = timm_arguments(config, image_size=24) | {"fc_norm": True}
    theirs = VisionTransformer(**arguments, num_classes=5)
    theirs.load_state_dict({name.replace("norm.", "fc_norm.", name.startswith("norm.")): state[name] for name in state})
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        assert (ours(images) - theirs.eval()(images)).abs().max() > 1e-2


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_the_kernel_is_timms(old: int, new: int, num_prefix_tokens: int, measured: Measured) -> None:
    pos_embed = torch.randn(1, num_prefix_tokens + old**2, 6, generator=torch.Generator().manual_seed(old))
    ours = interpolate_pos_embed(
        pos_embed, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=num_prefix_tokens, kernel="timm"
    )
    theirs = resample_abs_pos_embed(pos_embed, [new, new], [old, old], num_prefix_tokens=num_prefix_tokens)
    measured("interpolation of positions, kernel timm", "timm", "embeddings", ours, theirs, below=1e-6)
    if old > 1:  # one vector spread over a grid is that vector with any kernel
        google = interpolate_pos_embed(
            pos_embed, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=num_prefix_tokens
        )
        assert (google - theirs).abs().max() > 1e-2


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
