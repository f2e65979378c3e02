"""Our model against a ViT made of flax's own parts, every kind of position included: logits and every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import Gelu, HeadKind, Pool, PositionAt, PositionKind
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured
from tests.oracles.flax_vit import CLASSES, FlaxVit, leaves, to_flax

DEPTH, HEADS = 4, 4
SIZES: dict[str, Any] = {"width": 48, "depth": DEPTH, "heads": HEADS, "mlp_dim": 80, "patch_size": 4}


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
    config = ModelConfig(**SIZES, pool=pool, position=position, gelu=gelu)
    _compare(measured, f"ViT: {pool}, {head} head, {position}, {gelu} GELU", config, head=head)


@pytest.mark.parametrize(
    ("pool", "position", "at"),
    [
        ("cls", "none", "stem"),
        ("cls", "sincos_2d", "stem"),
        ("cls", "learned_2d", "stem"),
        ("gap", "relative", "stem"),
        ("cls", "relative", "stem"),
        ("cls", "learned_1d", "every_layer"),
        ("gap", "learned_2d", "every_layer"),
        ("cls", "learned_1d", "every_layer_shared"),
        ("cls", "learned_2d", "every_layer_shared"),
    ],
)
def test_positions_of_the_papers_table_8(
    pool: Pool, position: PositionKind, at: PositionAt, measured: Measured
) -> None:
    config = ModelConfig(**SIZES, pool=pool, position=position, position_at=at)
    _compare(measured, f"positions: {position} at {at}", config, head="linear")


@pytest.mark.parametrize(
    ("position", "at"), [("learned_1d", "stem"), ("learned_2d", "stem"), ("learned_1d", "every_layer")]
)
def test_a_class_token_without_position(position: PositionKind, at: PositionAt, measured: Measured) -> None:
    """big_vision's: positions are added to the patches."""
    config = ModelConfig(**SIZES, position=position, position_at=at, class_token_position="none")
    _compare(measured, f"class token without position: {position} at {at}", config, head="linear")


def _compare(measured: Measured, semantic: str, config: ModelConfig, *, head: HeadKind) -> None:
    model = randomise(build_model(config, image_size=24, num_classes=CLASSES, head=head), token_scale=SMALL_TOKENS)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 24, 24, generator=generator)
    weights = torch.randn(3, CLASSES, generator=generator)

    logits = model(images)
    (logits * weights).sum().backward()

    theirs = FlaxVit(
        48,
        DEPTH,
        HEADS,
        80,
        4,
        head,
        config.pool,
        config.position,
        config.gelu,
        position_at=config.position_at,
        class_token_position=config.class_token_position,
    )
    parameters = to_flax(dict(model.named_parameters()), depth=DEPTH, heads=HEADS)
    pixels = jnp.asarray(images.numpy().transpose(0, 2, 3, 1))

    def weighted_sum(tree: Any) -> tuple[Any, Any]:
        output = theirs.apply({"params": tree}, pixels)
        return (output * jnp.asarray(weights.numpy())).sum(), output

    (_, their_logits), their_gradients = jax.value_and_grad(weighted_sum, has_aux=True)(parameters)

    assert np.abs(their_logits).mean() > 0.1
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
    config = ModelConfig(**SIZES)
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    logits = []
    for gelu in ("tanh", "erf"):
        model = build_model(
            config.model_copy(update={"gelu": gelu}), image_size=24, num_classes=CLASSES, head="linear"
        ).eval()
        randomise(model, token_scale=SMALL_TOKENS)
        with torch.no_grad():
            logits.append(model(images))
    assert (logits[0] - logits[1]).abs().max() > 1e-4
