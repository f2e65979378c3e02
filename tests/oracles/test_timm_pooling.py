"""Models that timm builds from `timm_arguments`, our state dict in them: every pooling, GELU and layer scale."""

import json
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from model.config import ModelConfig
from model.vit import build_model, timm_arguments
from model.vocabulary import Gelu, Pool
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured


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
