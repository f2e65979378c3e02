"""The convolution of Google's ResNets: its kernels are standardised before each use, its padding is TensorFlow's.

Weight standardisation (arXiv 1903.10520) brings every output channel to (w - mean) / (std + 1e-5), as in
google-research/vision_transformer `models_resnet.py`; timm has an epsilon under a root instead. Costs one pass over the
kernel per forward, and a padded copy of the input if the padding is uneven (stride 2). It has no bias.
"""

from __future__ import annotations

from typing import Literal

import torch
from timm.layers import get_same_padding, pad_same
from torch import Tensor, nn
from torch.nn import functional as F

STANDARDISATION_EPS = 1e-5  # models_resnet.py, added to the standard deviation

# same: ceil(input / stride) positions come out; an odd zero goes to the right and the bottom (TensorFlow, XLA).
# fixed: kernel - 1 zeros in all, whatever the input and the stride (BiT, arXiv 1912.11370; also torch's habit).
Padding = Literal["same", "fixed"]


class StandardisedConv2d(nn.Conv2d):
    """[B, in_channels, H, W] -> [B, out_channels, H', W'], both sides of a kernel equal and odd.

    `weight` is the kernel as it is trained; it is standardised in float32 at least.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        *,
        pad: Padding,
        dilation: int = 1,
        groups: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding=dilation * (kernel_size - 1) // 2,  # "fixed", and "same" where its zeros are as many on both sides
            dilation=dilation,
            groups=groups,
            bias=False,
            device=device,
            dtype=dtype,
        )
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
    """A kernel [out, in, H, W] with each output channel brought to (w - mean) / (std + 1e-5), in its own dtype.

    The standard deviation is the population's (numpy's, ddof 0). Bfloat16 kernels are rounded only once.
    """
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(exact, dim=(1, 2, 3), correction=0, keepdim=True)
    return ((exact - mean) / (std + STANDARDISATION_EPS)).to(weight.dtype)
