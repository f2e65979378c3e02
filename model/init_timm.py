"""timm's default initial weights, with this project's reproducible streams (`model.init`).

What timm 1.0 does when a model is made with its default `weight_init=""` (`models/vision_transformer.py`:
init_weights_vit_timm; `models/resnetv2.py`; torch's defaults for the rest), and what of it differs from Google's:
- linear layers, the last one and those of attention and MLP included: normal of deviation 0.02, biases zero; in a pure
  ResNet 0.01.
- the convolution of the patch embedding: torch's default, uniform with bound 1 / sqrt(fan in), its bias too.
- class token: normal of deviation 1e-6; query of attention pooling: normal of deviation 1 / sqrt(D), cut off at two.
- convolutions of a ResNet: normal of variance 2 / fan out.
Scales, zero biases, layer scale, the zero last norm of a hybrid's units, and all that timm does not have (mask token,
positions of `model.position` and `model.relative_attention`) are as in Google's style.
"""

from __future__ import annotations

import math

import torch
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from model.init import google_value, is_resnet_kernel

LINEAR_STD = 0.02
POS_EMBED_STD = 0.02
CLS_TOKEN_STD = 1e-6
RESNET_HEAD_STD = 0.01


def timm_value(name: str, value: Tensor, *, model: nn.Module, generator: torch.Generator) -> Tensor:
    """Fill `value` with timm's initial value of a parameter: arguments and errors are those of `google_value`."""
    match name.split("."):
        case ["pos_embed"]:
            return nn.init.trunc_normal_(value, std=POS_EMBED_STD, generator=generator)
        case ["cls_token"]:
            return value.normal_(std=CLS_TOKEN_STD, generator=generator)
        case ["attn_pool", "latent"]:
            std = value.shape[-1] ** -0.5
            return nn.init.trunc_normal_(value, std=std, a=-2.0 * std, b=2.0 * std, generator=generator)
        case ["patch_embed", "proj", "weight" | "bias"]:
            bound = math.sqrt(1.0 / model.get_parameter("patch_embed.proj.weight")[0].numel())
            return value.uniform_(-bound, bound, generator=generator)
        case ["head", "weight"] | ["head", "pre_logits" | "logits", "weight"] if isinstance(model, ResNetV2):
            return value.normal_(std=RESNET_HEAD_STD, generator=generator)
        case (
            ["head", "weight"]
            | ["head", "pre_logits" | "logits", "weight"]
            | ["blocks", _, "attn", "qkv" | "proj", "weight"]
            | ["attn_pool", "q" | "kv" | "proj", "weight"]
            | ["blocks", _, "mlp", "fc1" | "fc2", "weight"]
            | ["attn_pool", "mlp", "fc1" | "fc2", "weight"]
        ):
            return nn.init.trunc_normal_(value, std=LINEAR_STD, generator=generator)
        case ["blocks", _, "mlp", "fc1" | "fc2", "bias"] | ["attn_pool", "mlp", "fc1" | "fc2", "bias"]:
            return value
        case _ if is_resnet_kernel(name):
            return nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu", generator=generator)
        case _:
            return google_value(name, value, model=model, generator=generator)
