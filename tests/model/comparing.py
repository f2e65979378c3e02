"""What tests need that compare two models, ours or another library's: random weights, and a relative difference."""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)

SMALL_TOKENS = 0.01  # of variance about 1e-4, so that LayerNorm's epsilon matters

# What tokens are made of, in our (timm's), torchvision's and transformers' names.
_TOKENS = ("cls_token", "class_token", "pos_embed", "position_embeddings")
_PATCHES = ("patch_embed.proj.", "conv_proj.", "patch_embeddings.projection.")


def randomise(module: Module, *, scale: float = 0.2, token_scale: float | None = None) -> Module:
    """Draw every parameter, always the same numbers: heads, biases and class tokens start at zero, which would hide
    mistakes. Returns `module`.

    Args:
        module: of any library.
        scale: standard deviation; scales of norms are around 1.
        token_scale: that of class token, learned positions, patch embedding and all convolutions; None: as `scale`.
    """
    scales_of_norms = {id(each.weight) for each in module.modules() if isinstance(each, nn.LayerNorm | nn.GroupNorm)}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            small = parameter.ndim == 4 or any(part in name for part in (*_TOKENS, *_PATCHES))
            deviation = token_scale if small and token_scale is not None else scale
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
            if id(parameter) in scales_of_norms:
                parameter += 1
    return module


def relative_difference(ours: Any, theirs: Any) -> float:
    """The largest absolute difference over the largest absolute value of `theirs`; tensors or arrays of one shape."""
    one, other = (np.asarray(each.detach() if hasattr(each, "detach") else each, np.float64) for each in (ours, theirs))
    assert one.shape == other.shape, f"{one.shape} and {other.shape}"
    return float(np.abs(one - other).max() / np.abs(other).max())
