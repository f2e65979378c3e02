"""ResNets made of flax's own parts, and the way from our parameters to theirs, for the oracles beside this file.

Written from the architectures' descriptions: standardised kernels by hand, XLA's own SAME padding, flax's GroupNorm and
max_pool. The parameters have our names, so that weights and gradients are compared after a change of layout only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

HEADS = 4


class FlaxStdConv(nn.Module):
    features: int
    size: int
    stride: int = 1
    padding: str | int = "SAME"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        kernel = (kernel - kernel.mean(axis=(0, 1, 2))) / (jnp.std(kernel, axis=(0, 1, 2)) + 1e-5)
        padding = self.padding if isinstance(self.padding, str) else [(self.padding, self.padding)] * 2
        return jax.lax.conv_general_dilated(
            x, kernel, (self.stride, self.stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


def post_activation_unit(x: jax.Array, prefix: str, *, features: int, stride: int) -> jax.Array:
    shortcut = x
    if x.shape[-1] != 4 * features or stride != 1:
        shortcut = FlaxStdConv(4 * features, 1, stride, name=f"{prefix}.downsample.conv")(x)
        shortcut = nn.GroupNorm(32, name=f"{prefix}.downsample.norm")(shortcut)
    x = FlaxStdConv(features, 1, name=f"{prefix}.conv1")(x)
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}.norm1")(x))
    x = FlaxStdConv(features, 3, stride, name=f"{prefix}.conv2")(x)
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}.norm2")(x))
    x = FlaxStdConv(4 * features, 1, name=f"{prefix}.conv3")(x)
    return nn.relu(shortcut + nn.GroupNorm(32, name=f"{prefix}.norm3")(x))


def stem(x: jax.Array, prefix: str, *, layers: tuple[int, ...]) -> jax.Array:
    x = FlaxStdConv(64, 7, 2, name=f"{prefix}stem.conv")(x)
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}stem.norm")(x))
    x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    for stage, units in enumerate(layers):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            x = post_activation_unit(x, f"{prefix}stages.{stage}.blocks.{unit}", features=64 * 2**stage, stride=stride)
    return x


def pre_activation_unit(x: jax.Array, prefix: str, *, features: int, stride: int) -> jax.Array:
    """BiT's: whatever the unit sees is normed and rectified once, for the branch and for the projection."""
    shortcut, projected = x, x.shape[-1] != 4 * features or stride != 1
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}.norm1")(x))
    if projected:
        shortcut = FlaxStdConv(4 * features, 1, stride, padding=0, name=f"{prefix}.downsample.conv")(x)
    x = FlaxStdConv(features, 1, padding=0, name=f"{prefix}.conv1")(x)
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}.norm2")(x))
    x = FlaxStdConv(features, 3, stride, padding=1, name=f"{prefix}.conv2")(x)
    x = nn.relu(nn.GroupNorm(32, name=f"{prefix}.norm3")(x))
    return shortcut + FlaxStdConv(4 * features, 1, padding=0, name=f"{prefix}.conv3")(x)


def to_flax(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Our layouts -> flax's: copies and transposes, so it serves weights and gradients alike."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        array = tensor.detach().numpy()
        module, _, kind = name.rpartition(".")
        if not module:  # cls_token, pos_embed
            tree[name] = array
        elif module.endswith((".attn.qkv", ".attn.proj")):
            continue
        elif array.ndim == 1:
            is_scale = kind == "weight"
            tree.setdefault(module, {})["scale" if is_scale else "bias"] = array
        else:
            tree.setdefault(module, {})["kernel"] = array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)
    for name in [name for name in tensors if name.endswith(".attn.qkv.weight")]:
        attention = name.removesuffix(".qkv.weight")
        weight, bias, out, out_bias = (
            tensors[f"{attention}.{part}"].detach().numpy()
            for part in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
        )
        width = weight.shape[1]
        tree[attention] = {"out": {"kernel": out.T.reshape(HEADS, -1, width), "bias": out_bias}}
        for part, rows, shift in zip(("query", "key", "value"), np.split(weight, 3), np.split(bias, 3), strict=True):
            tree[attention][part] = {"kernel": rows.T.reshape(width, HEADS, -1), "bias": shift.reshape(HEADS, -1)}
    return tree


def compare(
    measured: Measured,
    semantic: str,
    *,
    model: torch.nn.Module,
    theirs: nn.Module,
    image_size: int,
    classes: int,
    dtype: torch.dtype,
) -> None:
    """Hold the logits of `model` against flax's: within 1e-5 in float32; in float64, with every gradient, within 1e-9.

    A ReLU's gradient jumps: in float32, now and then, the two libraries round a value to different sides of zero, and
    whole gradients differ by percents. In float64 that does not happen, so every difference would be a mistake.
    """
    randomise(model, token_scale=SMALL_TOKENS)
    model.to(dtype)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2, 3, image_size, image_size, generator=generator, dtype=dtype)
    weights = torch.randn(2, classes, generator=generator, dtype=dtype)
    logits = model(images)

    with jax.enable_x64(dtype == torch.float64):
        pixels, parameters = channels_last(images), to_flax(dict(model.named_parameters()))
        expected = jax.jit(theirs.apply)({"params": parameters}, pixels)
    assert np.abs(expected).mean() > 0.1
    if dtype == torch.float32:
        measured(semantic, "flax", "logits", logits, expected)
        return
    measured(semantic, "flax", "logits in float64", logits, expected, below=1e-9)

    (logits * weights).sum().backward()
    with jax.enable_x64(True):
        derive = jax.jit(jax.grad(lambda tree: (theirs.apply({"params": tree}, pixels) * weights.numpy()).sum()))
        gradients = dict(_leaves(derive(parameters)))
    ours = dict(_leaves(to_flax({name: parameter.grad for name, parameter in model.named_parameters()})))
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # a key's bias shifts all scores of a row alike: its gradient is zero but for rounding
        if name.endswith("['key']['bias']"):
            assert np.abs(ours[name] - gradient).max() < 1e-9, name
        else:
            measured(semantic, "flax", "gradients in float64", ours[name], gradient, below=1e-9)


def _leaves(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf)


def channels_last(images: torch.Tensor) -> jax.Array:
    return jnp.asarray(images.numpy().transpose(0, 2, 3, 1))
