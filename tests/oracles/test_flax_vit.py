"""Our model against a ViT made of flax's own parts: logits and every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model.config import Gelu, ModelConfig, Pool, PositionKind
from model.head import HeadKind
from model.vit import build_vit
from tests.oracles.conftest import Measured
from tests.oracles.flax_vit import CLASSES, FlaxVit, leaves, to_flax

DEPTH, HEADS = 4, 4


def _randomise(model: torch.nn.Module) -> None:
    """Random weights everywhere (heads and biases start at zero, which would hide mistakes). Tokens are small,
    of variance about 1e-4, so that LayerNorm's epsilon matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.01 if name in ("pos_embed", "cls_token") or name.startswith("patch_embed") else 0.2
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(
    ("pool", "head", "position", "gelu"),
    [
        ("cls", "mlp", "learned_1d", "tanh"),
        ("cls", "linear", "learned_1d", "erf"),
        ("gap", "mlp", "sincos_2d", "tanh"),
        ("gap", "linear", "learned_1d", "tanh"),
        ("map", "mlp", "learned_1d", "erf"),
        ("map", "linear", "learned_1d", "tanh"),
    ],
)
def test_logits_and_all_gradients(
    pool: Pool, head: HeadKind, position: PositionKind, gelu: Gelu, measured: Measured
) -> None:
    config = ModelConfig(
        width=48, depth=DEPTH, heads=HEADS, mlp_dim=80, patch_size=4, pool=pool, position=position, gelu=gelu
    )
    model = build_vit(config, image_size=24, num_classes=CLASSES, head=head)
    _randomise(model)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 24, 24, generator=generator)
    weights = torch.randn(3, CLASSES, generator=generator)

    logits = model(images)
    (logits * weights).sum().backward()

    theirs = FlaxVit(48, DEPTH, HEADS, 80, 4, head, pool, position, gelu)  # pyright: ignore
    parameters = to_flax(dict(model.named_parameters()), depth=DEPTH, heads=HEADS)
    pixels = jnp.asarray(images.numpy().transpose(0, 2, 3, 1))

    def weighted_sum(tree: Any) -> tuple[Any, Any]:
        output = theirs.apply({"params": tree}, pixels)
        return (output * jnp.asarray(weights.numpy())).sum(), output

    (_, their_logits), their_gradients = jax.value_and_grad(weighted_sum, has_aux=True)(parameters)

    assert np.abs(their_logits).mean() > 0.1
    semantic = f"ViT: {pool}, {head} head, {position}, {gelu} GELU"
    measured(semantic, "flax", "logits", logits, their_logits)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = dict(leaves(to_flax(gradients, depth=DEPTH, heads=HEADS)))
    for name, gradient in leaves(their_gradients):
        # a key's bias shifts all scores of a row alike: its gradient is zero but for rounding
        if name.endswith("['key']['bias']"):
            assert np.abs(ours[name] - gradient).max() < 1e-4, name
        else:
            measured(semantic, "flax", "gradients, the worst of all", ours[name], gradient, below=1e-4)


def test_the_other_gelu_would_be_noticed() -> None:
    config = ModelConfig(width=48, depth=DEPTH, heads=HEADS, mlp_dim=80, patch_size=4)
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    logits = []
    for gelu in ("tanh", "erf"):
        model = build_vit(
            config.model_copy(update={"gelu": gelu}), image_size=24, num_classes=CLASSES, head="linear"
        ).eval()
        _randomise(model)
        with torch.no_grad():
            logits.append(model(images))
    assert (logits[0] - logits[1]).abs().max() > 1e-4
