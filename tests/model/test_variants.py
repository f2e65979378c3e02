"""`model.variants` built: numbers of parameters against published figures and against arithmetic."""

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.variants import HYBRIDS, RESNETS, ResnetSizes, parse_variant
from model.vit import build_model


def _build(variant: str, *, head: str = "linear") -> nn.Module:
    with torch.device("meta"):
        return build_model(ModelConfig(variant=variant), image_size=224, num_classes=1000, head=head)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("variant", "num_parameters"),
    [
        ("B/16", 86_567_656),
        ("B/32", 88_224_232),
        ("L/16", 304_326_632),
        ("H/14", 632_045_800),
        ("R50+B/16", 98_659_112),
        ("R+Ti/16", 6_337_704),
    ],
)
def test_the_figures_of_google(variant: str, num_parameters: int) -> None:
    """google-research/vision_transformer, `models_test.py`."""
    assert _count(_build(variant)) == num_parameters


@pytest.mark.parametrize(
    ("variant", "millions"),
    [("R50x1", 25.5), ("R50x3", 217.3), ("R101x1", 44.5), ("R101x3", 387.9), ("R152x2", 236.3), ("R152x4", 936.5)],
)
def test_the_figures_of_bit(variant: str, millions: float) -> None:
    """google-research/big_transfer's models at 1000 classes, as timm's cards print them."""
    assert round(_count(_build(variant)) / 1e6, 1) == millions


def _residual_parameters(layers: tuple[int, ...], *, factor: int, pre_activation: bool) -> int:
    """A 7x7 root and bottleneck units, by hand: no convolution has a bias, every norm has two vectors."""
    channels = 64 * factor
    total = 7 * 7 * 3 * channels + (0 if pre_activation else 2 * channels)
    for stage, units in enumerate(layers):
        inner = 64 * factor * 2**stage
        outer = 4 * inner
        for unit in range(units):
            total += channels * inner + 3 * 3 * inner * inner + inner * outer
            total += 2 * (channels + inner + inner) if pre_activation else 2 * (inner + inner + outer)
            if unit == 0:
                total += channels * outer + (0 if pre_activation else 2 * outer)
            channels = outer
    return total + (2 * channels if pre_activation else 0)


@pytest.mark.parametrize("variant", RESNETS)
def test_resnets_have_what_arithmetic_says(variant: str) -> None:
    sizes = parse_variant(variant)
    assert isinstance(sizes, ResnetSizes)
    trunk = _residual_parameters(sizes.layers, factor=sizes.width_factor, pre_activation=True)
    width = 2048 * sizes.width_factor
    assert _count(_build(variant)) == trunk + (width + 1) * 1000
    assert _count(_build(variant, head="mlp")) == trunk + (width + 1) * width + (width + 1) * 1000


@pytest.mark.parametrize("variant", HYBRIDS)
def test_hybrids_have_what_arithmetic_says(variant: str) -> None:
    sizes = ModelConfig(variant=variant).sizes
    stem = _residual_parameters(sizes.resnet_layers, factor=1, pre_activation=False)
    width, mlp_dim, tokens = sizes.width, sizes.mlp_dim, 1 + (224 // sizes.patch_size) ** 2
    block = 4 * width * (width + 1) + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    assert sizes.resnet_layers is not None
    features = 256 * 2 ** (len(sizes.resnet_layers) - 1) if sizes.resnet_layers else 64
    assert sizes.stem_patch_size == (1 if sizes.resnet_layers else 8)
    trunk = (
        stem
        + (features * sizes.stem_patch_size**2 + 1) * width
        + (tokens + 1) * width
        + sizes.depth * block
        + 2 * width
    )
    assert _count(_build(variant)) == trunk + (width + 1) * 1000


def test_every_source_names_a_paper_or_a_file() -> None:
    assert all("arXiv" in variant.source for variant in RESNETS.values())
    assert all("ViT paper" in variant.source for variant in HYBRIDS.values())
