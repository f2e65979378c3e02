"""Google's initialisation of the Vision Transformer, reproducible from one seed.

Sources: google-research/vision_transformer `models_vit.py` and flax's defaults. timm's own "jax" init
differs: it applies Xavier to the fused q/k/v matrix (3D x D), whose bound is sqrt(2) too small for each D x D
part. Every parameter has its own random stream, derived from (seed, parameter name): its values depend
neither on the global generator, nor on the device, nor on which other parameters there are, so a from-scratch
model with a linear head starts from the very trunk of one with an MLP head. Costs a second for B/16, about 10
for H/14. It does not initialise modules that it does not know: an unknown parameter is an error, not a
default.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

POS_EMBED_STD = 0.02  # BERT's, models_vit.py: nn.initializers.normal(stddev=0.02)
MLP_BIAS_STD = 1e-6  # models_vit.py: nn.initializers.normal(stddev=1e-6)
# The standard deviation of a unit normal truncated to [-2, 2]: flax divides by it, so that the drawn values
# have the variance asked for (jax.nn.initializers.variance_scaling).
TRUNCATED_STD = 0.87962566103423978


def initialise(model: VisionTransformer, *, seed: int, head_bias: float = 0.0) -> None:
    """Overwrite every parameter of `model`, built by `build_vit`, with Google's initial values, in place.

    Args:
        model: on any device and in any floating dtype; values are drawn in float32 on the CPU.
        seed: any integer; the same seed gives the same weights, whatever was drawn before.
        head_bias: constant bias of the last layer: -10 for sigmoid pre-training with many classes
            (vision_transformer issue 2), -6.9 for ImageNet-1k, 0 otherwise.

    Raises:
        ValueError: the model has a parameter that this project's models do not have.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(_stream_seed(seed, name))
            parameter.copy_(_initial_value(name, parameter.shape, generator=generator, head_bias=head_bias))


def _initial_value(name: str, shape: torch.Size, *, generator: torch.Generator, head_bias: float) -> Tensor:
    """The initial value, float32 on the CPU, of a parameter of the given name and shape."""
    value = torch.zeros(shape, device="cpu", dtype=torch.float32)
    match name.split("."):
        case ["cls_token"] | ["head", "weight"] | ["head", "logits", "weight"] | ["head", "pre_logits", "bias"]:
            return value
        case ["head", "bias"] | ["head", "logits", "bias"]:
            return value.fill_(head_bias)
        case ["pos_embed"]:
            return value.normal_(std=POS_EMBED_STD, generator=generator)
        case ["patch_embed", "proj", "weight"] | ["head", "pre_logits", "weight"]:
            return _lecun_normal(value, generator=generator)
        case ["blocks", _, "attn", "qkv", "weight"]:
            for part in value.chunk(3):  # rows of q, of k, of v: Xavier on each D x D
                nn.init.xavier_uniform_(part, generator=generator)
            return value
        case ["blocks", _, "attn", "proj", "weight"] | ["blocks", _, "mlp", "fc1" | "fc2", "weight"]:
            return nn.init.xavier_uniform_(value, generator=generator)
        case ["blocks", _, "mlp", "fc1" | "fc2", "bias"]:
            return value.normal_(std=MLP_BIAS_STD, generator=generator)
        case ["patch_embed", "proj", "bias"] | ["blocks", _, "attn", "qkv" | "proj", "bias"]:
            return value
        case ["norm", "weight"] | ["blocks", _, "norm1" | "norm2", "weight"]:
            return value.fill_(1.0)
        case ["norm", "bias"] | ["blocks", _, "norm1" | "norm2", "bias"]:
            return value
        case _:
            raise ValueError(f"no initial value is defined for the parameter {name!r} of shape {tuple(shape)}")


def _lecun_normal(value: Tensor, *, generator: torch.Generator) -> Tensor:
    """Fill with flax's lecun_normal: of variance 1 / fan_in, cut off at two (uncorrected) deviations."""
    fan_in = value[0].numel()
    std = math.sqrt(1.0 / fan_in) / TRUNCATED_STD
    return nn.init.trunc_normal_(value, std=std, a=-2.0 * std, b=2.0 * std, generator=generator)


def _stream_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream of one parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
