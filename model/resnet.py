"""Google's ResNets, as timm's ResNetV2 around standardised convolutions: the hybrids' stem and the paper's baseline.

- Stem (google-research/vision_transformer, `models_resnet.py`; ViT paper, section 3.1 "Hybrid Architecture"):
  post-activation units, TensorFlow's SAME padding, root 7x7/2, norm, ReLU, max pool 3x3/2; a unit strides in its 3x3
  convolution; a stage's first unit projects its shortcut.
- Baseline "ResNet (BiT)" (ViT paper, section 4.1; arXiv 1912.11370; google-research/big_transfer): pre-activation
  units, fixed padding, no norm in the root, max pool padded with zeros, norm and ReLU before the global mean, our
  heads.

Weight standardisation (arXiv 1903.10520) is (w - mean) / (std + 1e-5) per output channel, as in `models_resnet.py`;
timm puts its epsilon under a root. GroupNorm has 32 groups and flax's epsilon 1e-6 (torch and timm: 1e-5). BiT's code
has other epsilons (1e-10 under the root, and 1e-5), which move a random model's logits by less than 1e-4 of the
largest. Costs one pass over the kernels per forward pass, and for uneven padding (stride 2) a copy of the input.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import GroupNormAct, HybridEmbed, get_same_padding, pad_same
from timm.models import FeatureInfo
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from torch.nn import functional as F

from shardvit.model.config import ModelConfig
from shardvit.model.layers.head import zero_linear
from shardvit.model.variants import ResnetSizes, resnet_stride
from shardvit.model.vocabulary import COLOUR_CHANNELS

GROUP_NORM_EPS = 1e-6  # flax's default, which models_resnet.py uses
STANDARDISATION_EPS = 1e-5  # models_resnet.py, added to the standard deviation

# same: ceil(input / stride) outputs; an odd zero goes right and bottom (TensorFlow, XLA).
# fixed: kernel - 1 zeros in total, for any input and stride (BiT, arXiv 1912.11370; usual in torch).
Padding = Literal["same", "fixed"]


class StandardisedConv2d(nn.Conv2d):
    """Convolution whose square kernel of odd size is standardised, in at least float32; no bias."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, pad: Padding, dilation: int = 1, **more: Any
    ) -> None:
        padding = dilation * (kernel_size - 1) // 2  # "fixed", and "same" where both sides get equally many zeros
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "padding": padding, "dilation": dilation}
        super().__init__(in_channels, out_channels, bias=False, **sizes, **more)
        self.pad = pad

    def forward(self, input: Tensor) -> Tensor:
        weight = standardise(self.weight)
        if self.pad == "same":
            sizes = zip(input.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
            height, width = (get_same_padding(*of_axis) for of_axis in sizes)
            if (height, width) != (2 * self.padding[0], 2 * self.padding[1]):
                input = pad_same(input, list(self.kernel_size), list(self.stride), list(self.dilation))
                return F.conv2d(input, weight, None, self.stride, 0, self.dilation, self.groups)
        return F.conv2d(input, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pad={self.pad}"


def standardise(weight: Tensor) -> Tensor:
    """Standardise each output channel of a kernel [out, in, H, W] by its population deviation, in its own dtype."""
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(exact, dim=(1, 2, 3), correction=0, keepdim=True)
    return ((exact - mean) / (std + STANDARDISATION_EPS)).to(weight.dtype)


class BitResnet(ResNetV2):
    """A pre-activation ResNetV2 that pools here, before `head` (a Linear or an `MlpHead`)."""

    head: nn.Module

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features [B, C, H, W] -> logits [B, num_classes], or with `pre_logits` the pooled features [B, C]."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.head(pooled)


def stem_embedding(config: ModelConfig, *, image_size: int) -> Callable[..., HybridEmbed]:
    """Make a hybrid's `embed_layer` for timm's VisionTransformer: images [B, channels, S, S] -> tokens [B, N, D].
    In its module `backbone` is the ResNet and `proj` projects its features."""
    layers = config.sizes.resnet_layers
    assert layers is not None, "no ResNet stem"
    backbone = ResNetV2(
        **_timm_arguments(layers, width_factor=config.sizes.resnet_width_factor, preact=False), in_chans=config.channels
    )
    # Given the sizes, timm skips its forward pass, and asks a FeatureInfo for the channels.
    info = FeatureInfo(backbone.feature_info, out_indices=(len(layers),))
    backbone.feature_info = info  # pyright: ignore[reportAttributeAccessIssue] -- as timm itself does
    stride = resnet_stride(layers)
    return partial(HybridEmbed, backbone=backbone, feature_size=image_size // stride, feature_ratio=stride)


def build_resnet(sizes: ResnetSizes, *, num_classes: int, channels: int = COLOUR_CHANNELS) -> BitResnet:
    """Build a pure ResNet with a zero linear head, which BiT uses in both stages."""
    model = BitResnet(**_timm_arguments(sizes.layers, width_factor=sizes.width_factor, preact=True), in_chans=channels)
    model.set_submodule("head", zero_linear(model.num_features, num_classes))
    model.num_classes = num_classes
    return model


def _timm_arguments(layers: tuple[int, ...], *, width_factor: int, preact: bool) -> dict[str, Any]:
    pad: Padding = "fixed" if preact else "same"
    return {
        "layers": list(layers),
        "width_factor": width_factor,
        "preact": preact,
        "stem_type": pad,  # the max pool's; timm uses the same two names
        "conv_layer": partial(StandardisedConv2d, pad=pad),
        "norm_layer": partial(GroupNormAct, num_groups=32, eps=GROUP_NORM_EPS),
        "num_classes": 0,
        "global_pool": "",
    }
