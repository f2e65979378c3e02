"""Our pure ResNet against one made of flax's own parts: logits and every gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.vit import build_model
from tests.oracles.conftest import Measured
from tests.oracles.flax_resnet import FlaxStdConv, compare, pre_activation_unit

LAYERS, CLASSES = (2, 1), 5


class FlaxBit(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = FlaxStdConv(64, 7, 2, padding=3, name="stem.conv")(images)
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # zeros, larger than negative features
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="VALID")
        for stage, units in enumerate(LAYERS):
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                x = pre_activation_unit(x, f"stages.{stage}.blocks.{unit}", features=64 * 2**stage, stride=stride)
        x = nn.relu(nn.GroupNorm(32, name="norm")(x)).mean(axis=(1, 2))
        x = jnp.tanh(nn.Dense(x.shape[-1], name="head.pre_logits")(x))
        return nn.Dense(CLASSES, name="head.logits")(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_all_gradients(dtype: torch.dtype, measured: Measured) -> None:
    model = build_model(ModelConfig(resnet_layers=LAYERS), image_size=48, num_classes=CLASSES, head="mlp")
    semantic = "ResNet baseline (BiT)"
    compare(measured, semantic, model=model, theirs=FlaxBit(), image_size=48, classes=CLASSES, dtype=dtype)
