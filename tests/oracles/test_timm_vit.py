"""Our state dicts in models that timm builds by itself."""

import pytest
import timm
import torch

from model.config import ModelConfig, Regularisation
from model.vit import build_model
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured


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
