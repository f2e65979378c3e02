"""Google's ResNets with group normalisation and standardised convolutions: the hybrids' stem, and the paper's baseline.

Both are timm's ResNetV2, with its parameter names, around `model.resnet.standardised_conv`:
- the stem (google-research/vision_transformer, `models_resnet.py`; ViT paper, section 3.1 "Hybrid Architecture"):
  post-activation units, TensorFlow's SAME padding, the root 7x7/2, norm, ReLU, max pool 3x3/2; a unit's stride is in
  its 3x3 convolution; a stage's first unit projects its shortcut.
- the baseline "ResNet (BiT)" of the ViT paper, section 4.1 (arXiv 1912.11370; google-research/big_transfer):
  pre-activation units, fixed padding, no norm in the root, a zero rather than nothing around the max pool, norm and
  ReLU before the mean over all positions, then our heads.

GroupNorm has 32 groups and flax's epsilon 1e-6 (torch's and timm's is 1e-5). BiT's published code has other epsilons
(1e-10 under the root, and 1e-5), which move a random model's logits by less than 1e-4 of the largest. Building draws no
random numbers and gives placeholder weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import GroupNormAct, HybridEmbed
from timm.models import FeatureInfo
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from model.config import ModelConfig
from model.layers.head import MlpHead, zero_linear
from model.layers.regularisation import NO_REGULARISATION, Regularisation
from model.resnet.standardised_conv import Padding, StandardisedConv2d
from model.variants import resnet_stride
from model.vocabulary import HeadKind

GROUP_NORM_EPS = 1e-6  # flax's default, which models_resnet.py uses


class BitResnet(ResNetV2):
    """A pre-activation ResNetV2 whose `head` (a Linear or an `MlpHead`) sees features that are pooled here."""

    head: nn.Module

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features [B, C, H, W] -> logits [B, num_classes], or with `pre_logits` the pooled features [B, C]."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.head(pooled)


def stem_embedding(config: ModelConfig, *, image_size: int) -> Callable[..., HybridEmbed]:
    """Make `embed_layer` of timm's VisionTransformer for a hybrid: images [B, 3, S, S] -> tokens [B, N, D].

    The ResNet is `backbone` of the module it makes, the projection of its features `proj`. It serves one model. Raises
    ValueError if `image_size`, in pixels, is no multiple of the patch size.
    """
    config.grid_size(image_size)
    layers = config.sizes.resnet_layers
    assert layers is not None, "no ResNet stem"
    with torch.random.fork_rng(devices=[]):
        backbone = ResNetV2(**_timm_arguments(layers, width_factor=config.sizes.resnet_width_factor, preact=False))
    # Given the sizes, timm finds them without a forward pass, and then asks a FeatureInfo for the channels.
    info = FeatureInfo(backbone.feature_info, out_indices=(len(layers),))
    backbone.feature_info = info  # pyright: ignore[reportAttributeAccessIssue] -- as timm itself does
    stride = resnet_stride(layers)
    return partial(HybridEmbed, backbone=backbone, feature_size=image_size // stride, feature_ratio=stride)


def build_resnet(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    regularisation: Regularisation = NO_REGULARISATION,
) -> BitResnet:
    """Build the pure ResNet: images [B, 3, image_size, image_size] -> logits [B, num_classes].

    `image_size` leaves no trace in the weights. `head`: BiT's own is "linear" in both stages.

    Raises:
        ValueError: an argument out of range, an image size that is no multiple of the network's stride (32 for four
            stages), or any regularisation.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    regularisation.check(config)
    config.grid_size(image_size)
    sizes = config.resnet
    with torch.random.fork_rng(devices=[]):
        model = BitResnet(**_timm_arguments(sizes.layers, width_factor=sizes.width_factor, preact=True))
        make_head = MlpHead if head == "mlp" else zero_linear
        model.set_submodule("head", make_head(model.num_features, num_classes))
    model.num_classes = num_classes
    return model


def _timm_arguments(layers: tuple[int, ...], *, width_factor: int, preact: bool) -> dict[str, Any]:
    pad: Padding = "fixed" if preact else "same"
    return {
        "layers": list(layers),
        "width_factor": width_factor,
        "preact": preact,
        "stem_type": pad,  # of the max pool; timm has the same two names
        "conv_layer": partial(StandardisedConv2d, pad=pad),
        "norm_layer": partial(GroupNormAct, num_groups=32, eps=GROUP_NORM_EPS),
        "num_classes": 0,
        "global_pool": "",
    }
