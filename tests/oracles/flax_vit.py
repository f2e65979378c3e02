"""A ViT made of flax's own parts, and the way from our parameters to its, for the oracles beside this file.

flax is the library Google's code is made of, so its defaults (LayerNorm epsilon, tanh GELU, lecun_normal,
fans of multi-head kernels) are the reference. The flax model is written here from the architecture's description.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

CLASSES = 5

_XAVIER = nn.initializers.xavier_uniform()


class FlaxMlp(nn.Module):
    mlp_dim: int
    gelu: Literal["tanh", "erf"]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = nn.initializers.normal(stddev=1e-6)
        y = nn.Dense(self.mlp_dim, kernel_init=_XAVIER, bias_init=bias, name="fc1")(x)
        y = nn.gelu(y) if self.gelu == "tanh" else nn.gelu(y, approximate=False)
        return nn.Dense(x.shape[-1], kernel_init=_XAVIER, bias_init=bias, name="fc2")(y)


class FlaxBlock(nn.Module):
    heads: int
    mlp_dim: int
    gelu: Literal["tanh", "erf"]
    relative: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention: Any = nn.dot_product_attention
        if self.relative:
            shape = (2 * x.shape[1] - 1, x.shape[2] // self.heads)
            attention = partial(_relative_attention, self.param("relative", nn.initializers.normal(), shape))
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=self.heads, kernel_init=_XAVIER, attention_fn=attention, name="attn"
        )(y, y)
        return x + FlaxMlp(self.mlp_dim, self.gelu, name="mlp")(nn.LayerNorm(name="norm2")(x))


def _relative_attention(table: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Each query [B, T, heads, d] against the embedding of each offset j - i, one row of `table` after the other."""
    tokens = query.shape[1]
    rows = [[tokens - 1 + j - i for j in range(tokens)] for i in range(tokens)]
    bias = jnp.einsum("bihd,ijd->bhij", query, table[np.array(rows)]) / np.sqrt(query.shape[-1])
    return nn.dot_product_attention(query, key, value, bias=bias)


class FlaxPosition(nn.Module):
    """Adds what is learned: a vector for each token, or for each column and each row of the patches' grid.

    `of_patches`: the tokens before the patches are set aside meanwhile.
    """

    kind: Literal["learned_1d", "learned_2d"]
    grid: int
    of_patches: bool
    deviation: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        draw, width = nn.initializers.normal(stddev=self.deviation), x.shape[2]
        others = x[:, : x.shape[1] - self.grid**2]
        if self.of_patches:
            x = x[:, others.shape[1] :]
        x = self.added(x, draw, width)
        return jnp.concatenate([others, x], axis=1) if self.of_patches else x

    def added(self, x: jax.Array, draw: Any, width: int) -> jax.Array:
        if self.kind == "learned_1d":
            return x + self.param("embedding", draw, (1, x.shape[1], width))
        column = self.param("column", draw, (self.grid, width // 2))
        row = self.param("row", draw, (self.grid, width // 2))
        patches = [jnp.concatenate([column[x], row[y]]) for y in range(self.grid) for x in range(self.grid)]
        prefix = x.shape[1] - len(patches)
        others = [self.param("prefix", draw, (prefix, width))] if prefix else []
        return x + jnp.concatenate([*others, jnp.stack(patches)])


class FlaxAttentionPooling(nn.Module):
    """big_vision's: one learned query over all tokens, no norm before it, then an MLP beside a shortcut."""

    heads: int
    mlp_dim: int
    gelu: Literal["tanh", "erf"]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        probe = self.param("probe", _XAVIER, (1, 1, x.shape[-1]))
        probe = jnp.tile(probe, (x.shape[0], 1, 1))
        x = nn.MultiHeadDotProductAttention(num_heads=self.heads, kernel_init=_XAVIER, name="attn")(probe, x)
        return (x + FlaxMlp(self.mlp_dim, self.gelu, name="mlp")(nn.LayerNorm(name="norm")(x)))[:, 0]


class FlaxVit(nn.Module):
    """Images [B, S, S, 3] -> logits [B, CLASSES]."""

    width: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    head: Literal["mlp", "linear"]
    pool: Literal["cls", "gap", "map"] = "cls"
    position: Literal["learned_1d", "learned_2d", "relative", "sincos_2d", "none"] = "learned_1d"
    gelu: Literal["tanh", "erf"] = "tanh"
    head_bias: float = 0.0
    position_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    class_token_position: Literal["learned", "none"] = "learned"
    position_deviation: float = 0.02

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="patch_embed")(images)
        if self.position == "sincos_2d":  # added to the patches only
            x = x + _sincos(x.shape[1], x.shape[2], self.width)
        grid = x.shape[1]
        x = x.reshape(x.shape[0], -1, self.width)
        if self.pool == "cls":
            cls = self.param("cls_token", nn.initializers.zeros, (1, 1, self.width))
            x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        # one table, or one for each layer; none if nothing is learned
        of_patches = self.class_token_position == "none"
        learned = self.position in ("learned_1d", "learned_2d")
        number = (self.depth if self.position_at == "every_layer" else 1) if learned else 0
        tables = [
            FlaxPosition(self.position, grid, of_patches, self.position_deviation, name=f"position{i}")
            for i in range(number)
        ]
        if tables and self.position_at == "stem":
            x = tables[0](x)
        for i in range(self.depth):
            if tables and self.position_at != "stem":
                x = tables[i % number](x)
            x = FlaxBlock(self.heads, self.mlp_dim, self.gelu, self.position == "relative", name=f"block{i}")(x)
        x = nn.LayerNorm(name="norm")(x)
        if self.pool == "cls":
            x = x[:, 0]
        elif self.pool == "gap":
            x = x.mean(axis=1)
        else:
            x = FlaxAttentionPooling(self.heads, self.mlp_dim, self.gelu, name="pooling")(x)
        if self.head == "mlp":
            x = jnp.tanh(nn.Dense(self.width, name="pre_logits")(x))
        bias = nn.initializers.constant(self.head_bias)
        return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros, bias_init=bias, name="logits")(x)


def _sincos(height: int, width: int, features: int) -> jax.Array:
    """Number by number: [height, width, features]."""
    quarter = features // 4
    table = np.zeros((height, width, features))
    for y in range(height):
        for x in range(width):
            for i in range(quarter):
                frequency = 10_000.0 ** (-i / (quarter - 1))
                table[y, x, i], table[y, x, quarter + i] = np.sin(x * frequency), np.cos(x * frequency)
                table[y, x, 2 * quarter + i] = np.sin(y * frequency)
                table[y, x, 3 * quarter + i] = np.cos(y * frequency)
    return jnp.asarray(table, jnp.float32)


def to_flax(tensors: Mapping[str, torch.Tensor | None], *, depth: int, heads: int) -> dict[str, Any]:
    """timm's names and layouts -> flax's: copies and transposes, so it serves weights and gradients alike."""
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items() if tensor is not None}

    def dense(name: str) -> dict[str, np.ndarray]:
        return {"kernel": arrays[f"{name}.weight"].T, "bias": arrays[f"{name}.bias"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def mlp(name: str) -> dict[str, Any]:
        return {"fc1": dense(f"{name}.fc1"), "fc2": dense(f"{name}.fc2")}

    def attention(name: str, *fused: str) -> dict[str, Any]:
        """`fused` are the matrices that hold query, key and value, in this order."""
        width = arrays[f"{name}.proj.weight"].shape[0]
        per_head = width // heads
        weights = np.concatenate([arrays[f"{name}.{part}.weight"] for part in fused])
        biases = np.concatenate([arrays[f"{name}.{part}.bias"] for part in fused])
        parts = {}
        rows = zip(("query", "key", "value"), np.split(weights, 3), np.split(biases, 3), strict=True)
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
        "norm": norm("norm"),
        "logits": dense("head" if "head.weight" in arrays else "head.logits"),
    }
    if "cls_token" in arrays:
        tree["cls_token"] = arrays["cls_token"]
    if "pos_embed" in arrays:
        tree["position0"] = {"embedding": arrays["pos_embed"]}
    for name in arrays:
        if name.startswith("position.tables."):
            _, _, table, leaf = name.split(".")
            tree.setdefault(f"position{table}", {})[leaf] = arrays[name]
    if "head.pre_logits.weight" in arrays:
        tree["pre_logits"] = dense("head.pre_logits")
    if "attn_pool.latent" in arrays:
        tree["pooling"] = {
            "probe": arrays["attn_pool.latent"],
            "attn": attention("attn_pool", "q", "kv"),
            "norm": norm("attn_pool.norm"),
            "mlp": mlp("attn_pool.mlp"),
        }
    for i in range(depth):
        tree[f"block{i}"] = {
            "norm1": norm(f"blocks.{i}.norm1"),
            "attn": attention(f"blocks.{i}.attn", "qkv"),
            "norm2": norm(f"blocks.{i}.norm2"),
            "mlp": mlp(f"blocks.{i}.mlp"),
        }
        if f"blocks.{i}.attn.relative" in arrays:
            tree[f"block{i}"]["relative"] = arrays[f"blocks.{i}.attn.relative"]
    return tree


def leaves(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Each array of a tree with its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf)
