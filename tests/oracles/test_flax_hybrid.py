"""Our hybrids against a ResNet stem and a ViT made of flax's own parts: logits and every gradient."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.resnet import StandardisedConv2d, stem_embedding
from shardvit.model.vit import build_model
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured
from tests.oracles.flax_resnet import (
    HEADS,
    FlaxStdConv,
    channels_last,
    compare,
    stem,
    to_flax,
)

HYBRID = ModelConfig(width=48, depth=4, heads=HEADS, mlp_dim=80, patch_size=16, resnet_layers=(2, 1))
CLASSES = 5


class FlaxStem(nn.Module):
    layers: tuple[int, ...]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return stem(images, "", layers=self.layers)


class FlaxHybrid(nn.Module):
    layers: tuple[int, ...]
    patch_size: int  # in features

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = stem(images, "patch_embed.backbone.", layers=self.layers)
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(48, patch, strides=patch, padding="VALID", name="patch_embed.proj")(x)
        x = x.reshape(x.shape[0], -1, 48)
        cls = self.param("cls_token", nn.initializers.zeros, (1, 1, 48))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("pos_embed", nn.initializers.zeros, x[:1].shape)
        for i in range(4):
            y = nn.LayerNorm(name=f"blocks.{i}.norm1")(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, name=f"blocks.{i}.attn")(y, y)
            y = nn.LayerNorm(name=f"blocks.{i}.norm2")(x)
            y = nn.gelu(nn.Dense(80, name=f"blocks.{i}.mlp.fc1")(y))
            x = x + nn.Dense(48, name=f"blocks.{i}.mlp.fc2")(y)
        x = nn.LayerNorm(name="norm")(x)[:, 0]
        x = jnp.tanh(nn.Dense(48, name="head.pre_logits")(x))
        return nn.Dense(CLASSES, name="head.logits")(x)


@pytest.mark.parametrize("layers", [(2, 1), ()], ids=["two stages", "the root alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_all_gradients(dtype: torch.dtype, layers: tuple[int, ...], measured: Measured) -> None:
    config = HYBRID.model_copy(update={"resnet_layers": layers})
    model = build_model(config, image_size=48, num_classes=CLASSES, head="mlp")
    theirs = FlaxHybrid(layers=layers, patch_size=2 if layers else 4)
    compare(measured, "hybrid", model=model, theirs=theirs, image_size=48, classes=CLASSES, dtype=dtype)


@pytest.mark.parametrize("size", [(32, 32), (37, 50), (50, 37), (33, 35)])
def test_the_stem_pads_as_xla_does_at_any_size(size: tuple[int, int], measured: Measured) -> None:
    """A hybrid only meets even sizes; that its padding is SAME and not something equal there is seen at odd ones."""
    ours = stem_embedding(HYBRID, image_size=48).keywords["backbone"]
    randomise(ours, token_scale=SMALL_TOKENS)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
    parameters = {"params": to_flax(dict(ours.named_parameters()))}
    theirs = jax.jit(FlaxStem(layers=(2, 1)).apply)(parameters, channels_last(images))
    with torch.no_grad():
        features = ours(images).numpy().transpose(0, 2, 3, 1)
    assert features.shape == theirs.shape
    measured("SAME padding of the ResNet stem, odd sizes", "flax", "features", features, theirs)


@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_one_convolution_and_its_gradients(kernel_size: int, stride: int, measured: Measured) -> None:
    generator = torch.Generator().manual_seed(3)
    conv = StandardisedConv2d(6, 8, kernel_size, stride=stride, pad="same")
    for size in ((9, 10), (2, 5)):
        torch.nn.init.normal_(conv.weight, mean=0.1, std=0.02, generator=generator)
        images = torch.randn(2, 6, *size, generator=generator, requires_grad=True)
        output = conv(images)
        gradients = torch.autograd.grad(output.square().sum(), (images, conv.weight))

        def energy(pixels: Any, kernel: Any) -> tuple[Any, Any]:
            module = FlaxStdConv(8, kernel_size, stride)
            y = module.apply({"params": {"kernel": kernel}}, pixels)
            return jnp.square(y).sum(), y

        kernel = jnp.asarray(conv.weight.detach().numpy().transpose(2, 3, 1, 0))
        (_, expected), theirs = jax.jit(jax.value_and_grad(energy, argnums=(0, 1), has_aux=True))(
            channels_last(images.detach()), kernel
        )
        measured("standardised convolution", "flax", "features", output.permute(0, 2, 3, 1), expected)
        measured(
            "standardised convolution", "flax", "gradients", gradients[0].permute(0, 2, 3, 1), theirs[0], below=1e-4
        )
        measured(
            "standardised convolution", "flax", "gradients", gradients[1].permute(2, 3, 1, 0), theirs[1], below=1e-4
        )
