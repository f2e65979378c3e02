"""Initial weights of every model of this project, reproducible from one seed: Google's values, or timm's.

Sources of the google style: google-research/vision_transformer `models_vit.py` and `models_resnet.py`, big_vision
`models/vit.py` (attention pooling), big_transfer `bit_jax/models.py` (pure ResNets), and flax's defaults. timm's own
"jax" init differs: it applies Xavier to the fused q/k/v matrix (3D x D), whose bound is sqrt(2) too small for each
D x D part. Every parameter has its own random stream, derived from (seed, parameter name): its values depend
neither on the global generator, nor on the device, nor on which other parameters there are, so a from-scratch
model with a linear head starts from the very trunk of one with an MLP head. Costs a second for B/16, about 10
for H/14. It does not initialise modules that it does not know: an unknown parameter is an error, not a
default.
"""

from __future__ import annotations

import hashlib
import math

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from model.config import InitStyle

POS_EMBED_STD = 0.02  # BERT's, models_vit.py: nn.initializers.normal(stddev=0.02)
# The ViT paper does not say how; BERT initialises the mask token, one of its words, as its position embeddings.
MASK_TOKEN_STD = 0.02
MLP_BIAS_STD = 1e-6  # models_vit.py: nn.initializers.normal(stddev=1e-6)
# The standard deviation of a unit normal truncated to [-2, 2]: flax divides by it, so that the drawn values
# have the variance asked for (jax.nn.initializers.variance_scaling).
TRUNCATED_STD = 0.87962566103423978
STEM_PREFIX = "patch_embed.backbone."  # a hybrid's ResNet


def initialise(model: nn.Module, *, seed: int, head_bias: float = 0.0, style: InitStyle = "google") -> None:
    """Overwrite every parameter of `model`, one of `model.build` or `model.masked_patch`, in place.

    Args:
        model: on any device and in any floating dtype; values are drawn in float32 on the CPU.
        seed: any integer; the same seed gives the same weights, whatever was drawn before.
        head_bias: constant bias of the last layer: -10 for sigmoid pre-training with many classes
            (vision_transformer issue 2), -6.9 for ImageNet-1k, 0 otherwise.
        style: google, or timm's default (`model.init_timm`). Google's last layer starts at zero, timm's does not.

    Raises:
        ValueError: the model has a parameter that this project's models do not have.
    """
    from model.init_timm import timm_value

    value_of = {"google": google_value, "timm": timm_value}[style]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(_stream_seed(seed, name))
            value = torch.zeros(parameter.shape, device="cpu", dtype=torch.float32)
            if name in ("head.bias", "head.logits.bias"):
                parameter.fill_(head_bias)
            else:
                parameter.copy_(value_of(name, value, model=model, generator=generator))


def google_value(name: str, value: Tensor, *, model: nn.Module, generator: torch.Generator) -> Tensor:
    """Fill `value`, zeros of float32 on the CPU, with Google's initial value of a parameter, and return it.

    Args:
        name: of the parameter in `model`; biases of the last layer are not asked for here.
        value: of the parameter's shape.
        model: asked for what a name does not tell, such as a layer scale's initial value.
        generator: on the CPU.

    Raises:
        ValueError: no such parameter is known.
    """
    match name.split("."):
        case ["cls_token"] | ["head", "weight"] | ["head", "logits", "weight"] | ["head", "pre_logits", "bias"]:
            return value
        case ["mask_token"]:
            return value.normal_(std=MASK_TOKEN_STD, generator=generator)
        case ["pos_embed"] | ["position", "tables", _, "embedding" | "column" | "row" | "prefix"]:
            return value.normal_(std=POS_EMBED_STD, generator=generator)
        case ["patch_embed", "proj", "weight"] | ["head", "pre_logits", "weight"]:
            return _lecun_normal(value, generator=generator)
        case ["blocks", _, "attn", "qkv", "weight"]:
            return _xavier_parts(value, parts=3, generator=generator)
        case ["blocks", _, "attn", "relative"]:  # Tensor2Tensor, see model.relative_attention
            return value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        case ["blocks", _, "attn", "proj", "weight"] | ["blocks", _, "mlp", "fc1" | "fc2", "weight"]:
            return nn.init.xavier_uniform_(value, generator=generator)
        case ["blocks", _, "mlp", "fc1" | "fc2", "bias"]:
            return value.normal_(std=MLP_BIAS_STD, generator=generator)
        case ["patch_embed", "proj", "bias"] | ["blocks", _, "attn", "qkv" | "proj", "bias"]:
            return value
        case ["blocks", _, "ls1" | "ls2", "gamma"]:
            layer_scale = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(layer_scale, LayerScale)
            return value.fill_(layer_scale.init_values)
        case ["norm", "weight"] | ["blocks", _, "norm1" | "norm2", "weight"]:
            return value.fill_(1.0)
        case ["norm", "bias"] | ["blocks", _, "norm1" | "norm2", "bias"]:
            return value
        case ["attn_pool", *parts]:
            return _pooling_value(name, parts, value, generator=generator)
        case _:
            return _resnet_value(name, value, generator=generator)


def _pooling_value(name: str, parts: list[str], value: Tensor, *, generator: torch.Generator) -> Tensor:
    """Attention pooling, big_vision's MAPHead: timm has its keys and values in one matrix, and names its probe so."""
    match parts:
        case ["latent"]:  # [1, 1, D]: flax's Xavier takes the last two axes, 1 and D, for the fans; torch other ones
            bound = math.sqrt(6.0 / sum(value.shape[-2:]))
            return value.uniform_(-bound, bound, generator=generator)
        case ["q" | "proj", "weight"] | ["mlp", "fc1" | "fc2", "weight"]:
            return nn.init.xavier_uniform_(value, generator=generator)
        case ["kv", "weight"]:
            return _xavier_parts(value, parts=2, generator=generator)
        case ["mlp", "fc1" | "fc2", "bias"]:
            return value.normal_(std=MLP_BIAS_STD, generator=generator)
        case ["norm", "weight"]:
            return value.fill_(1.0)
        case ["q" | "kv" | "proj" | "norm", "bias"]:
            return value
        case _:
            raise _unknown(name, value)


def _resnet_value(name: str, value: Tensor, *, generator: torch.Generator) -> Tensor:
    """A hybrid's stem, whose units' last norm has scale zero and so starts as its shortcut, or a pure ResNet, whose
    norms all have scale one: its units end in a convolution."""
    if is_resnet_kernel(name):
        return _lecun_normal(value, generator=generator)
    match name.removeprefix(STEM_PREFIX).split("."):
        case ["stages", _, "blocks", _, "norm3", "weight"] if name.startswith(STEM_PREFIX):
            return value
        case (
            ["stem", "norm", "weight" | "bias" as kind]
            | ["stages", _, "blocks", _, "norm1" | "norm2" | "norm3", "weight" | "bias" as kind]
            | ["stages", _, "blocks", _, "downsample", "norm", "weight" | "bias" as kind]
        ):
            return value.fill_(1.0) if kind == "weight" else value
        case _:
            raise _unknown(name, value)


def is_resnet_kernel(name: str) -> bool:
    """Whether a parameter of this name is a convolution's in a hybrid's stem or a pure ResNet."""
    match name.removeprefix(STEM_PREFIX).split("."):
        case (
            ["stem", "conv", "weight"]
            | ["stages", _, "blocks", _, "conv1" | "conv2" | "conv3", "weight"]
            | ["stages", _, "blocks", _, "downsample", "conv", "weight"]
        ):
            return True
        case _:
            return False


def _xavier_parts(value: Tensor, *, parts: int, generator: torch.Generator) -> Tensor:
    """Xavier on each D x D of a fused matrix: the rows of q, of k, of v."""
    for part in value.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)
    return value


def _lecun_normal(value: Tensor, *, generator: torch.Generator) -> Tensor:
    """Fill with flax's lecun_normal: of variance 1 / fan_in, cut off at two (uncorrected) deviations."""
    fan_in = value[0].numel()
    std = math.sqrt(1.0 / fan_in) / TRUNCATED_STD
    return nn.init.trunc_normal_(value, std=std, a=-2.0 * std, b=2.0 * std, generator=generator)


def _unknown(name: str, value: Tensor) -> ValueError:
    return ValueError(f"no initial value is defined for the parameter {name!r} of shape {tuple(value.shape)}")


def _stream_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream of one parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
