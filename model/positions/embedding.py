"""Position embeddings that timm's VisionTransformer lacks, compared in the ViT paper's appendix D.4, Table 8.

- learned_1d: a vector for each token.
- learned_2d: vectors of half the width for each column and row; a patch has its column's, then its row's. The class
  token has its own; with class_token_position none it has none, in either kind.
- sincos_2d: big_vision's fixed form (`models/vit.py`, after MoCo v3, arXiv 2104.02057); nothing for the class token.
- none, and relative: nothing is added to tokens.

D.4 adds learned ones "right after the stem"; "at the beginning of each layer", each with its own; or the same "shared
between layers". Each table is its own module, because ZeRO-3 gathers parameters when their module is called. Draws no
random numbers; learned tables are zero until filled.

relative: each offset between a query's and a key's position has a learned embedding, used as a key; its logits are
added to the content's before the softmax. Details that D.4 leaves open follow Google's Tensor2Tensor
(`common_attention.py`, dot_product_unmasked_self_attention_relative_v2; Music Transformer, arXiv 1809.04281):
- positions count tokens in sequence, class token first: patches on neighbouring rows are a row's length apart.
- offsets run from -(T - 1) to T - 1, unmerged.
- the heads of a layer share one table, each layer has its own (Tensor2Tensor can share it).
- both kinds of logits are scaled by 1 / sqrt(head size); values have no relative part.
- the initial table is normal with deviation 1 / sqrt(head size) (`model.init`).
- costs 2 T (2 T - 1) D FLOPs per image and layer more than plain attention, and memory for heads x T x T logits; fits
  one number of tokens only.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from shardvit.model.config import ModelConfig
from shardvit.model.positions.interpolation import along_side, on_grid
from shardvit.model.vocabulary import Interpolation, PositionAt

SINCOS_TEMPERATURE = 10_000.0  # big_vision, models/vit.py


class Learned1d(nn.Module):
    """Add `embedding` [1, T, D] to the last T tokens of [B, T + `without_row`, D]. Its first `rows_of_prefix` rows are
    of tokens before the patches; patches on another square grid get the others interpolated."""

    def __init__(
        self,
        num_tokens: int,
        width: int,
        *,
        rows_of_prefix: int = 0,
        without_row: int = 0,
        kernel: Interpolation = "google",
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(1, num_tokens, width))
        self.rows_of_prefix, self.without_row = rows_of_prefix, without_row
        self.kernel: Interpolation = kernel

    def forward(self, tokens: Tensor) -> Tensor:
        rows, without = self.rows_of_prefix, self.without_row
        return add_learned(self.embedding, tokens, rows_of_prefix=rows, without_row=without, kernel=self.kernel)


def add_learned(
    embedding: Tensor, tokens: Tensor, *, rows_of_prefix: int, without_row: int, kernel: Interpolation
) -> Tensor:
    """Add positions to tokens as `Learned1d`."""
    rows = tokens.shape[1] - without_row
    if rows != embedding.shape[1]:
        patches = rows - rows_of_prefix
        embedding = on_grid(embedding, patches=patches, num_prefix_tokens=rows_of_prefix, kernel=kernel)
    return tokens + _behind_others(embedding, tokens)


class Learned2d(nn.Module):
    """Add to each patch its `column`, then its `row` (both [grid_size, D/2]), and `prefix` [P, D] to the
    `num_prefix_tokens` before them (None if 0); nothing to the `without_row` before these. Patches on another square
    grid get columns and rows interpolated."""

    def __init__(
        self,
        grid_size: int,
        width: int,
        *,
        num_prefix_tokens: int,
        without_row: int = 0,
        kernel: Interpolation = "google",
    ) -> None:
        super().__init__()
        self.column = nn.Parameter(torch.zeros(grid_size, width // 2))
        self.row = nn.Parameter(torch.zeros(grid_size, width // 2))
        self.prefix = nn.Parameter(torch.zeros(num_prefix_tokens, width)) if num_prefix_tokens else None
        self.num_others = num_prefix_tokens + without_row
        self.kernel: Interpolation = kernel

    def forward(self, tokens: Tensor) -> Tensor:
        grid_size = math.isqrt(tokens.shape[1] - self.num_others)
        column, row = self.column, self.row
        if grid_size != len(row):
            column, row = (along_side(each, side=grid_size, kernel=self.kernel) for each in (column, row))
        columns = column.expand(grid_size, -1, -1)
        rows = row[:, None].expand(-1, grid_size, -1)
        embedding = torch.cat([columns, rows], dim=-1).flatten(0, 1)
        if self.prefix is not None:
            embedding = torch.cat([self.prefix, embedding])
        return tokens + _behind_others(embedding[None], tokens)


def _behind_others(embedding: Tensor, tokens: Tensor) -> Tensor:
    """Pad [1, t, D] in front with zeros, for tokens without a position."""
    return F.pad(embedding, (0, 0, tokens.shape[1] - embedding.shape[1], 0))


class SinCos2d(nn.Module):
    """Add the fixed `table` [P + grid_size^2, D], which no state dict holds; on another square grid, its own values."""

    table: Tensor

    def __init__(
        self, grid_size: int, width: int, *, num_prefix_tokens: int, law: Literal["big_vision", "mae"] = "big_vision"
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.law: Literal["big_vision", "mae"] = law
        self.register_buffer(
            "table", F.pad(sincos_2d(grid_size, width, law=law), (0, 0, num_prefix_tokens, 0)), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        # DeepSpeed's ZeRO-3 lowers the precision of parameters but not of buffers. Autocast changes neither, and adds
        # learned positions in float32; so does this.
        kind = tokens.device.type  # "meta" has no autocast
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        table = self.table
        if len(table) != tokens.shape[1]:  # images of another size
            grid_size = math.isqrt(tokens.shape[1] - self.num_prefix_tokens)
            patches = _sincos_there(grid_size, tokens.shape[2], law=self.law, device=table.device).to(table.dtype)
            table = F.pad(patches, (0, 0, self.num_prefix_tokens, 0))
        return tokens + (table if autocast else table.to(tokens.dtype))


class Position(nn.Module):
    """Position embedding of a `PositionedVit`, added to [B, T, D], class token first, at the stem or before blocks.
    `tables`: a module per layer ("every_layer"), one in total, or none."""

    at: PositionAt

    def __init__(self, tables: Sequence[nn.Module], *, at: PositionAt) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.at = at

    def at_stem(self, tokens: Tensor) -> Tensor:
        return self.tables[0](tokens) if self.at == "stem" and len(self.tables) else tokens

    def before_block(self, tokens: Tensor, *, layer: int) -> Tensor:
        if self.at == "stem":
            return tokens
        return self.tables[layer if self.at == "every_layer" else 0](tokens)


def make_position(config: ModelConfig, *, grid_size: int, depth: int) -> Position:
    """Make the position embedding for a square grid behind class token and registers. State: `tables.N.embedding`, or
    `tables.N.{column,row,prefix}`; N is 0, up to `depth` - 1 for "every_layer"."""
    width = config.sizes.width
    rows, kernel = config.prefix_rows, config.interpolation
    without_row = config.prefix_tokens - rows

    def table() -> nn.Module | None:
        match config.position:
            case "learned_1d":
                number = rows + grid_size**2
                return Learned1d(number, width, rows_of_prefix=rows, without_row=without_row, kernel=kernel)
            case "learned_2d":
                return Learned2d(grid_size, width, num_prefix_tokens=rows, without_row=without_row, kernel=kernel)
            case "sincos_2d":
                return SinCos2d(grid_size, width, num_prefix_tokens=config.prefix_tokens)
            case "relative" | "none":
                return None

    tables = [table() for _ in range(depth if config.position_at == "every_layer" else 1)]
    return Position([made for made in tables if made is not None], at=config.position_at)


def sincos_2d(grid_size: int, width: int, *, law: Literal["big_vision", "mae"] = "big_vision") -> Tensor:
    """Fixed embedding of a square grid, [grid_size^2, width], row by row, rounded from float64: a quarter of the width
    each for sin x, cos x, sin y, cos y. big_vision's frequencies go from 1 to 1 / 10000, those of MAE's
    `util/pos_embed.py` to just above it."""
    quarter = width // 4
    exponent = torch.arange(quarter, dtype=torch.float64) / (quarter if law == "mae" else max(1, quarter - 1))
    angles = torch.arange(grid_size, dtype=torch.float64)[:, None] * SINCOS_TEMPERATURE**-exponent
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns = waves.expand(grid_size, -1, -1)
    rows = waves[:, None].expand(-1, grid_size, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).to(torch.get_default_dtype())


@lru_cache(maxsize=4)
def _sincos_there(grid_size: int, width: int, *, law: Literal["big_vision", "mae"], device: torch.device) -> Tensor:
    """Make `sincos_2d` on a device; cached, as copying makes the host wait."""
    return sincos_2d(grid_size, width, law=law).to(device)


def fixed_numbers(config: ModelConfig, *, image_size: int) -> dict[str, Tensor]:
    """Fixed positions as `pos_embed`, float32 [1, T, D], for libraries that know only learned ones; else empty."""
    learned = config.with_learned_positions
    if learned is config:
        return {}
    grid, width = config.grid_size(image_size), config.sizes.width
    patches = sincos_2d(grid, width).float() if config.position == "sincos_2d" else torch.zeros(grid**2, width)
    return {"pos_embed": F.pad(patches, (0, 0, learned.prefix_rows, 0))[None]}


def starting_numbers(config: ModelConfig, *, image_size: int) -> dict[str, Tensor]:
    """`pos_embed` where a masked autoencoder's learned positions begin: its fixed ones; empty for other positions."""
    if config.position != "learned_1d" or config.position_at != "stem":
        return {}
    patches = sincos_2d(config.grid_size(image_size), config.sizes.width, law="mae").float()
    return {"pos_embed": F.pad(patches, (0, 0, config.prefix_rows, 0))[None]}


def without_numbers(state: Mapping[str, Tensor], *, config: ModelConfig, image_size: int) -> dict[str, Tensor]:
    """Drop `pos_embed` from a state dict if it equals `fixed_numbers`; a trained one stays."""
    fixed, state = fixed_numbers(config, image_size=image_size), dict(state)
    for name in fixed.keys() & state.keys():
        if state[name].shape == fixed[name].shape and torch.allclose(state[name].float(), fixed[name], atol=1e-3):
            del state[name]  # math libraries differ by 1e-7
    return state


class RelativeAttention(Attention):
    """[B, T, D] -> [B, T, D] with timm's parameters and `relative` [2 T - 1, head size], whose row T - 1 + j - i is for
    key j and query i. Use `relative_attention(T)`, which sets T."""

    num_tokens: ClassVar[int]

    def __init__(self, dim: int, **arguments: Any) -> None:
        super().__init__(dim, **arguments)
        self.relative = nn.Parameter(self.qkv.weight.new_zeros(2 * self.num_tokens - 1, self.head_dim))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        assert attn_mask is None and not is_causal, "nobody here masks attention"
        batch, tokens, _ = x.shape
        queries, keys, values = (
            self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        )
        by_offset = queries @ (self.scale * self.relative).T
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=by_key(by_offset))
        return self.proj_drop(self.proj(attended.transpose(1, 2).flatten(2)))


def relative_attention(num_tokens: int) -> type[RelativeAttention]:
    """Make the class for this many tokens, since timm's `attn_layer` must be a class."""
    return type("RelativeAttention", (RelativeAttention,), {"num_tokens": num_tokens, "__module__": __name__})


def by_key(by_offset: Tensor) -> Tensor:
    """Logits [..., T, 2 T - 1] by offset -> [..., T, T] by key: out[i, j] = in[i, T - 1 + j - i].

    Pads rows by one, lays them end to end and recuts them, so each starts one further left; the gradient is summed in a
    fixed order. The copy frees the offsets and aligns rows for CUDA.
    """
    tokens = by_offset.shape[-2]
    flat = F.pad(by_offset, (0, 1)).flatten(-2)
    skewed = flat[..., tokens - 1 : -1].unflatten(-1, (tokens, 2 * tokens - 1))
    return skewed[..., :tokens].contiguous()
