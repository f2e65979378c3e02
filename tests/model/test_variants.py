"""`model.variants` built: numbers of parameters against published figures and against arithmetic."""

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.variants import HYBRIDS, RESNETS
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


def test_every_source_names_a_paper_or_a_file() -> None:
    assert all("arXiv" in variant.source for variant in RESNETS.values())
    assert all("ViT paper" in variant.source for variant in HYBRIDS.values())
