"""Attention that knows how far apart two tokens are: the relative variant of the ViT paper's appendix D.4, Table 8.

Each offset between a query's and a key's position has a learned embedding, used as a key; these logits are added to
those of the content before the softmax. What D.4 leaves open is taken from Google's Tensor2Tensor
(`common_attention.py`, dot_product_unmasked_self_attention_relative_v2; Music Transformer, arXiv 1809.04281):
- positions count tokens in sequence, a class token first: patches on neighbouring rows are a row's length apart.
- offsets run over all that occur, -(T - 1) to T - 1, none are merged.
- the heads of a layer share one table, each layer has its own (Tensor2Tensor has the first as an option).
- both kinds of logits have the factor 1 / sqrt(head size); values have no relative part.
- the initial table is normal with deviation 1 / sqrt(head size) (`model.init`).

Costs, beside plain attention, 2 T (2 T - 1) D FLOPs per image and layer, and memory for its heads x T x T logits. It
is for one number of tokens, and not defined on another grid.
"""

from __future__ import annotations

from typing import Any, ClassVar

from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F


class RelativeAttention(Attention):
    """[B, T, D] -> [B, T, D] with timm's parameters and `relative` [2 T - 1, head size], whose row T - 1 + j - i is
    the embedding of key j for query i. Take `relative_attention(T)`, which knows T."""

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
    """The class for sequences of this many tokens: timm's `attn_layer` has to be a class."""
    return type("RelativeAttention", (RelativeAttention,), {"num_tokens": num_tokens, "__module__": __name__})


def by_key(by_offset: Tensor) -> Tensor:
    """Logits [..., T, 2 T - 1] by offset -> [..., T, T] by key: out[i, j] = in[i, T - 1 + j - i].

    Rows are made one longer, laid end to end and cut to their old length, so that each begins one further left; unlike
    an indexed read's, the gradient is summed in a fixed order. The copy frees the offsets and aligns rows for CUDA.
    """
    tokens = by_offset.shape[-2]
    flat = F.pad(by_offset, (0, 1)).flatten(-2)
    skewed = flat[..., tokens - 1 : -1].unflatten(-1, (tokens, 2 * tokens - 1))
    return skewed[..., :tokens].contiguous()
