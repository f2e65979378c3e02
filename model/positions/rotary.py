"""Attention that rotates queries and keys by the patches' places (RoPE in two dimensions), by timm's modules.

Half of each head's channels turn with a patch's row, half with its column, in pairs; scores then depend on the offset
of two patches. Class and register tokens are not rotated. Kinds, as in released models (timm 1.0, models/eva.py):
- axial: columns first, places counted in patches, temperature 100 (RoPE-ViT, arXiv 2403.13298). A larger image has new
  places beyond the known ones.
- mixed: the same, but each head of each block learns `freqs`, two-dimensional, from temperature 10 and a random turn.
- eva: rows first, temperature 10000, any grid stretched over 16 places (EVA-02, arXiv 2303.11331; timm's
  vit_*_rope_reg*_gap).
- dinov3: any grid's patch centres at -1..1, temperature 100, pairs half a head apart (arXiv 2508.10104); its random
  shifts in training are left out.
So no weight changes with the resolution. The rotations are computed in float32 and in no state dict; a head's size is a
multiple of 4. Costs four elementwise products of q and k, and copies of both.
"""

import math
from typing import Any, ClassVar

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.layers.pos_embed_sincos import create_rope_embed, get_mixed_freqs, get_mixed_grid
from torch import Tensor, nn

from shardvit.model.config import ModelConfig
from shardvit.model.vocabulary import Rope

_EVA_PLACES = 16  # along a side: 224 pixels in patches of 14
_TIMMS: dict[Rope, dict[str, Any]] = {  # by the names of Eva's arguments
    "axial": {"rope_type": "cat", "rope_grid_indexing": "xy", "rope_temperature": 100.0},
    "mixed": {"rope_type": "mixed", "rope_grid_indexing": "xy", "rope_temperature": 10.0},
    "eva": {"rope_type": "cat", "rope_grid_indexing": "ij", "rope_temperature": 10_000.0},
    "dinov3": {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True},
}


def eva_arguments(rope: Rope) -> dict[str, Any]:
    """Arguments with which timm's Eva rotates as `rope`."""
    more = {"ref_feat_shape": [_EVA_PLACES, _EVA_PLACES]} if rope == "eva" else {}
    return {"use_rot_pos_emb": True, "rope_rotate_half": False, **_TIMMS[rope], **more}


class RotaryAttention(AttentionRope):
    """[B, T, D] -> [B, T, D] with timm's parameters and, for `mixed`, `freqs` [2, heads, head size / 2], rotating the
    last grid_size^2 tokens. Use `rotary_attention`, which sets the rest."""

    kind: ClassVar[Rope]
    grid_size: int
    prefix_tokens: ClassVar[int]
    columns: Tensor
    rows: Tensor
    turns: Tensor  # sines and cosines, [patches, 2 head size]

    def __init__(self, dim: int, **arguments: Any) -> None:
        half = self.kind == "dinov3"
        super().__init__(dim, num_prefix_tokens=self.prefix_tokens, rotate_half=half, **arguments)
        if self.kind == "mixed":
            self.freqs = nn.Parameter(torch.zeros(2, self.num_heads, self.head_dim // 2))
        self.set_grid(self.grid_size)

    def set_grid(self, grid_size: int) -> None:
        """Rotate on another square grid from now on."""
        self.grid_size, grid = grid_size, [grid_size, grid_size]
        like = next(self.buffers(recurse=False), self.proj.weight)
        if self.kind == "mixed":
            made = dict(zip(("columns", "rows"), get_mixed_grid(grid, grid_indexing="xy"), strict=True))
        else:
            made = {"turns": self._turns(grid)}
        for name, tensor in made.items():
            self.register_buffer(name, tensor.to(like.device), persistent=False)

    def _turns(self, grid: list[int]) -> Tensor:
        named = {name.removeprefix("rope_"): value for name, value in eva_arguments(self.kind).items()}
        del named["use_rot_pos_emb"]
        more = {"in_pixels": False} if named.pop("type") == "cat" else {}
        kind = _TIMMS[self.kind]["rope_type"]
        made: Any = create_rope_embed(
            kind, dim=self.attn_dim, num_heads=self.num_heads, feat_shape=grid, **named, **more
        )
        return made.get_embed()

    def rotation(self) -> Tensor:
        return get_mixed_freqs(self.freqs, self.columns, self.rows) if self.kind == "mixed" else self.turns

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [B, heads, T, head size]."""
        patches = apply_rot_embed_cat(x[:, :, self.num_prefix_tokens :], self.rotation(), half=self.rotate_half)
        return torch.cat([x[:, :, : self.num_prefix_tokens], patches], dim=2)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, rope=self.rotation(), attn_mask=attn_mask, is_causal=is_causal)


def turn_to(blocks: nn.Sequential, *, patches: int) -> None:
    """Let all blocks rotate on the square grid of so many patches, if they rotate at all."""
    for block in blocks:
        attention = block.attn
        if not isinstance(attention, RotaryAttention) or attention.grid_size**2 == patches:
            return
        attention.set_grid(math.isqrt(patches))


def rotary_attention(config: ModelConfig, *, grid_size: int) -> type[RotaryAttention]:
    """Make the class for this grid, since timm's `attn_layer` must be a class."""
    own = {"kind": config.rope, "grid_size": grid_size, "prefix_tokens": config.prefix_tokens}
    return type("RotaryAttention", (RotaryAttention,), {**own, "__module__": __name__})
