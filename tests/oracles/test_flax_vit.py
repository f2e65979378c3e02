"""Our model against a ViT made of flax's own parts: logits, every gradient, and initial distributions.

flax is the library Google's code is made of, so its defaults (LayerNorm epsilon, tanh GELU, lecun_normal,
fans of multi-head kernels) are the reference. The flax model is written here from the architecture's description.
"""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from model.config import ModelConfig
from model.head import HeadKind
from model.init import initialise
from model.vit import build_vit

CLASSES = 5


class FlaxBlock(nn.Module):
    heads: int
    mlp_dim: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=self.heads, kernel_init=nn.initializers.xavier_uniform(), name="attn"
        )(y, y)
        y = nn.LayerNorm(name="norm2")(x)
        kernel, bias = nn.initializers.xavier_uniform(), nn.initializers.normal(stddev=1e-6)
        y = nn.gelu(nn.Dense(self.mlp_dim, kernel_init=kernel, bias_init=bias, name="fc1")(y))
        return x + nn.Dense(x.shape[-1], kernel_init=kernel, bias_init=bias, name="fc2")(y)


class FlaxVit(nn.Module):
    width: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    head: HeadKind
    head_bias: float = 0.0

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="patch_embed")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        cls = self.param("cls_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("pos_embed", nn.initializers.normal(stddev=0.02), (1, x.shape[1], self.width))
        for i in range(self.depth):
            x = FlaxBlock(self.heads, self.mlp_dim, name=f"block{i}")(x)
        x = nn.LayerNorm(name="norm")(x)[:, 0]
        if self.head == "mlp":
            x = jnp.tanh(nn.Dense(self.width, name="pre_logits")(x))
        bias = nn.initializers.constant(self.head_bias)
        return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros, bias_init=bias, name="logits")(x)


def _to_flax(tensors: dict[str, torch.Tensor], *, depth: int, heads: int) -> dict[str, Any]:
    """timm's names and layouts -> flax's: copies and transposes, so it serves weights and gradients alike."""
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}

    def dense(name: str) -> dict[str, np.ndarray]:
        return {"kernel": arrays[f"{name}.weight"].T, "bias": arrays[f"{name}.bias"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def attention(name: str) -> dict[str, Any]:
        width = arrays[f"{name}.proj.weight"].shape[0]
        per_head = width // heads
        parts = {}
        rows = zip(
            ("query", "key", "value"),
            np.split(arrays[f"{name}.qkv.weight"], 3),
            np.split(arrays[f"{name}.qkv.bias"], 3),
            strict=True,
        )
        for part, weight, bias in rows:
            parts[part] = {
                "kernel": weight.T.reshape(width, heads, per_head),
                "bias": bias.reshape(heads, per_head),
            }
        out = dense(f"{name}.proj")
        parts["out"] = {"kernel": out["kernel"].reshape(heads, per_head, width), "bias": out["bias"]}
        return parts

    tree: dict[str, Any] = {
        "patch_embed": {
            "kernel": arrays["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
            "bias": arrays["patch_embed.proj.bias"],
        },
        "cls_token": arrays["cls_token"],
        "pos_embed": arrays["pos_embed"],
        "norm": norm("norm"),
        "logits": dense("head" if "head.weight" in arrays else "head.logits"),
    }
    if "head.pre_logits.weight" in arrays:
        tree["pre_logits"] = dense("head.pre_logits")
    for i in range(depth):
        tree[f"block{i}"] = {
            "norm1": norm(f"blocks.{i}.norm1"),
            "attn": attention(f"blocks.{i}.attn"),
            "norm2": norm(f"blocks.{i}.norm2"),
            "fc1": dense(f"blocks.{i}.mlp.fc1"),
            "fc2": dense(f"blocks.{i}.mlp.fc2"),
        }
    return tree


def _leaves(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf)


def _randomise(model: torch.nn.Module) -> None:
    """Random weights everywhere (heads and biases start at zero, which would hide mistakes). Tokens are small,
    of variance about 1e-4, so that LayerNorm's epsilon matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.01 if name in ("pos_embed", "cls_token") or name.startswith("patch_embed") else 0.2
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_logits_and_all_gradients(head: HeadKind) -> None:
    config = ModelConfig(width=48, depth=3, heads=4, mlp_dim=80, patch_size=4)
    model = build_vit(config, image_size=24, num_classes=CLASSES, head=head)
    _randomise(model)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 24, 24, generator=generator)
    weights = torch.randn(3, CLASSES, generator=generator)

    logits = model(images)
    (logits * weights).sum().backward()

    theirs = FlaxVit(48, 3, 4, 80, 4, head)
    parameters = _to_flax(dict(model.named_parameters()), depth=3, heads=4)
    pixels = jnp.asarray(images.numpy().transpose(0, 2, 3, 1))

    def weighted_sum(tree: Any) -> tuple[Any, Any]:
        output = theirs.apply({"params": tree}, pixels)
        return (output * jnp.asarray(weights.numpy())).sum(), output

    (_, their_logits), their_gradients = jax.value_and_grad(weighted_sum, has_aux=True)(parameters)

    assert np.abs(their_logits).mean() > 0.1
    np.testing.assert_allclose(logits.detach().numpy(), their_logits, rtol=1e-5, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = dict(_leaves(_to_flax(gradients, depth=3, heads=4)))
    for name, gradient in _leaves(their_gradients):
        # a key's bias shifts all scores of a row alike: its gradient is zero but for rounding
        scale = max(np.abs(gradient).max(), 1.0 if name.endswith("['key']['bias']") else 0.0)
        assert np.abs(ours[name] - gradient).max() < 1e-4 * scale, name


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_initial_weights_have_flaxs_distributions(head: HeadKind) -> None:
    config = ModelConfig(width=96, depth=2, heads=3, mlp_dim=160, patch_size=8)
    model = build_vit(config, image_size=128, num_classes=CLASSES, head=head)
    initialise(model, seed=0, head_bias=-10.0)
    ours = dict(_leaves(_to_flax(dict(model.named_parameters()), depth=2, heads=3)))

    theirs = FlaxVit(96, 2, 3, 160, 8, head, head_bias=-10.0)
    variables = theirs.init(jax.random.PRNGKey(0), jnp.zeros((1, 128, 128, 3)))
    reference = dict(_leaves(variables["params"]))

    assert ours.keys() == reference.keys()
    for name, theirs_value in reference.items():
        value = ours[name]
        assert value.shape == theirs_value.shape, name
        if theirs_value.std() == 0:  # zeros, ones, the constant bias
            assert np.array_equal(value, theirs_value), name
            continue
        count = value.size
        # The relative error of a sample's standard deviation is at most 1 / sqrt(2 n) for these distributions,
        # that of the quotient of two of them 1 / sqrt(n).
        assert abs(value.std() / theirs_value.std() - 1) < 4.5 / np.sqrt(count), name
        assert abs(value.mean() - theirs_value.mean()) < 4.5 * theirs_value.std() * np.sqrt(2 / count), name
        assert ks_2samp(value.ravel(), theirs_value.ravel()).pvalue > 1e-3, name
        if count > 1000:  # the ends: uniform 1.7, truncated 2.3, normal 3.5 to 4.5 deviations
            assert np.abs(value).max() == pytest.approx(np.abs(theirs_value).max(), rel=0.25), name
