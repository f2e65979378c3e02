"""Classification heads: the pre-training MLP, the fine-tuning linear layer, and the swap between them.

ViT paper, section 3.1: "a MLP with one hidden layer at pre-training time and by a single linear layer at fine-tuning
time"; 3.2: "we remove the whole pre-trained prediction head and attach a zero-initialized D x K feedforward layer".
Pooling is the models' `forward_head`; `model.init` initialises the MLP head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from timm.models.resnetv2 import ResNetV2
    from timm.models.vision_transformer import VisionTransformer


class MlpHead(nn.Module):
    """Linear(width, width), tanh, Linear(width, num_classes): [B, width] -> [B, num_classes]; outputs zeros when fresh.

    `width` is Google's `representation_size` (released ImageNet-21k models; vision_transformer issue 124).
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(width, width)
        self.logits = zero_linear(width, num_classes)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.logits(torch.tanh(self.pre_logits(pooled)))


def zero_linear(
    in_features: int, out_features: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Linear:
    """Make a zero Linear without drawing random numbers."""
    device = device or torch.get_default_device()
    layer = nn.Linear(in_features, out_features, device="meta", dtype=dtype)  # `to_empty` would import sympy
    layer.weight = nn.Parameter(torch.zeros(out_features, in_features, device=device, dtype=dtype))
    layer.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
    return layer


class HeadPair(nn.Linear):
    """A linear head that has another beside it, `dist`, for the distillation token; both zero when fresh."""

    dist: nn.Linear


def zero_pair(
    in_features: int, out_features: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> HeadPair:
    """Make both heads without drawing random numbers."""
    head, dist = (zero_linear(in_features, out_features, device=device, dtype=dtype) for _ in range(2))
    head.__class__ = HeadPair  # `__class__`: the parameters and their place stay
    head = cast(HeadPair, head)
    head.dist = dist
    return head


def replace_head(model: VisionTransformer | ResNetV2, num_classes: int) -> None:
    """Replace the whole head by a trainable zero Linear of its device and dtype, or a zero pair; ValueError for no
    classes."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    old = next(model.head.parameters())
    make = zero_pair if isinstance(model.head, HeadPair) else zero_linear
    model.set_submodule("head", make(model.num_features, num_classes, device=old.device, dtype=old.dtype))
    model.num_classes = num_classes
