"""Initial weights of every model of this project, reproducible from one seed: Google's values (two sets), or timm's.

google: google-research/vision_transformer `models_vit.py` and `models_resnet.py`, big_vision `models/vit.py` (attention
pooling), big_transfer `bit_jax/models.py` (pure ResNets), and flax's defaults. big_vision: the same but for learned
positions, of deviation 1 / sqrt(D) there (0.036 for B) in place of 0.02. timm's own "jax" init applies
Xavier to the fused q/k/v matrix (3D x D), whose bound is sqrt(2) too small for each D x D part.
Each parameter has a random stream from (seed, its name), whatever the device and the other parameters: models with
different heads start from the same trunk. Costs a second for B/16, about 10 for H/14.
"""

from __future__ import annotations

import hashlib
import math

import torch
from timm.layers import LayerScale
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from model.vocabulary import InitStyle

POS_EMBED_STD = 0.02  # BERT's, models_vit.py: nn.initializers.normal(stddev=0.02)
MASK_TOKEN_STD = 0.02  # the paper does not say; BERT initialises its mask token as its position embeddings
MLP_BIAS_STD = 1e-6  # models_vit.py: nn.initializers.normal(stddev=1e-6)
# Of a unit normal truncated to [-2, 2]: flax divides by it (jax.nn.initializers.variance_scaling).
TRUNCATED_STD = 0.87962566103423978
# timm 1.0, models/vision_transformer.py and models/resnetv2.py
TIMM_LINEAR_STD = 0.02  # of position embeddings too; timm cuts them off at 100 deviations
TIMM_CLS_TOKEN_STD = 1e-6
TIMM_RESNET_HEAD_STD = 0.01
STEM_PREFIX = "patch_embed.backbone."  # a hybrid's ResNet


def initialise(model: nn.Module, *, seed: int, head_bias: float = 0.0, style: InitStyle = "google") -> None:
    """Overwrite every parameter of `model`, one of `model.vit` or `model.masked_patch`, in place.

    Values are drawn in float32 on the CPU, whatever the model's device and dtype. `head_bias`, of the last layer: -10
    for sigmoid pre-training with many classes (vision_transformer issue 2), -6.9 for ImageNet-1k, else 0. Google's last
    layer starts at zero, timm's (`timm_value`) does not. Raises ValueError if the model has a parameter that this
    project's models do not have.
    """
    value_of = {"google": google_value, "big_vision": big_vision_value, "timm": timm_value}[style]
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

    The last layer's biases are not asked for here. `model` tells what a name does not (a layer scale's initial value).
    Raises ValueError if no such parameter is known.
    """
    if is_resnet_kernel(name):
        return _lecun_normal(value, generator=generator)
    match name.removeprefix(STEM_PREFIX).split("."):
        case ["mask_token"]:
            return value.normal_(std=MASK_TOKEN_STD, generator=generator)
        case ["pos_embed"] | ["position", "tables", _, "embedding" | "column" | "row" | "prefix"]:
            return value.normal_(std=POS_EMBED_STD, generator=generator)
        case ["patch_embed", "proj", "weight"] | ["head", "pre_logits", "weight"]:
            return _lecun_normal(value, generator=generator)
        case ["blocks", _, "attn", "qkv", "weight"]:
            return _xavier_parts(value, parts=3, generator=generator)
        case ["attn_pool", "kv", "weight"]:  # big_vision's MAPHead: timm has its keys and values in one matrix
            return _xavier_parts(value, parts=2, generator=generator)
        case (
            ["blocks", _, "attn", "proj", "weight"]
            | ["attn_pool", "q" | "proj", "weight"]
            | ["blocks", _, "mlp", "fc1" | "fc2", "weight"]
            | ["attn_pool", "mlp", "fc1" | "fc2", "weight"]
        ):
            return nn.init.xavier_uniform_(value, generator=generator)
        case ["blocks", _, "mlp", "fc1" | "fc2", "bias"] | ["attn_pool", "mlp", "fc1" | "fc2", "bias"]:
            return value.normal_(std=MLP_BIAS_STD, generator=generator)
        case ["attn_pool", "latent"]:  # [1, 1, D]: flax's Xavier takes 1 and D for the fans; torch other ones
            bound = math.sqrt(6.0 / sum(value.shape[-2:]))
            return value.uniform_(-bound, bound, generator=generator)
        case ["blocks", _, "attn", "relative"]:  # Tensor2Tensor, see model.positions.embedding
            return value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        case ["blocks", _, "ls1" | "ls2", "gamma"]:
            layer_scale = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(layer_scale, LayerScale)
            return value.fill_(layer_scale.init_values)
        case ["stages", _, "blocks", _, "norm3", "weight"] if name.startswith(STEM_PREFIX):
            return value  # each unit of a hybrid's stem starts as its shortcut; a pure ResNet's end in a convolution
        case (
            ["norm", "weight" | "bias" as kind]
            | ["blocks", _, "norm1" | "norm2", "weight" | "bias" as kind]
            | ["attn_pool" | "stem", "norm", "weight" | "bias" as kind]
            | ["stages", _, "blocks", _, "norm1" | "norm2" | "norm3", "weight" | "bias" as kind]
            | ["stages", _, "blocks", _, "downsample", "norm", "weight" | "bias" as kind]
        ):
            return value.fill_(1.0) if kind == "weight" else value
        case (
            ["cls_token"]
            | ["head", "weight"]
            | ["head", "logits", "weight"]
            | ["head", "pre_logits", "bias"]
            | ["patch_embed", "proj", "bias"]
            | ["blocks", _, "attn", "qkv" | "proj", "bias"]
            | ["attn_pool", "q" | "kv" | "proj", "bias"]
        ):
            return value
        case _:
            raise ValueError(f"no initial value is defined for the parameter {name!r} of shape {tuple(value.shape)}")


def big_vision_value(name: str, value: Tensor, *, model: nn.Module, generator: torch.Generator) -> Tensor:
    """Fill `value` with big_vision's initial value of a parameter: arguments and errors are those of `google_value`.

    Only learned positions differ (models/vit.py, get_posemb). Those of columns and rows, which it does not have, take
    the deviation of the whole token.
    """
    match name.split("."):
        case ["pos_embed"] | ["position", "tables", _, "embedding" | "prefix"]:
            return value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        case ["position", "tables", _, "column" | "row"]:
            return value.normal_(std=(2 * value.shape[-1]) ** -0.5, generator=generator)
        case _:
            return google_value(name, value, model=model, generator=generator)


def timm_value(name: str, value: Tensor, *, model: nn.Module, generator: torch.Generator) -> Tensor:
    """Fill `value` with timm's initial value of a parameter: arguments and errors are those of `google_value`.

    Handles what timm 1.0 (`weight_init=""`) does otherwise than Google; scales, zero biases, the last norm of a
    hybrid's units, and what timm lacks (mask token, `model.positions`) are Google's.
    Sources: models/vision_transformer.py (init_weights_vit_timm), models/resnetv2.py, else torch's defaults.
    """
    match name.split("."):
        case ["pos_embed"]:
            return value.normal_(std=TIMM_LINEAR_STD, generator=generator)
        case ["cls_token"]:
            return value.normal_(std=TIMM_CLS_TOKEN_STD, generator=generator)
        case ["attn_pool", "latent"]:
            return _truncated_normal(value, std=value.shape[-1] ** -0.5, generator=generator)
        case ["patch_embed", "proj", "weight" | "bias"]:  # torch's default
            bound = math.sqrt(1.0 / model.get_parameter("patch_embed.proj.weight")[0].numel())
            return value.uniform_(-bound, bound, generator=generator)
        case ["head", "weight"] | ["head", "pre_logits" | "logits", "weight"] if isinstance(model, ResNetV2):
            return value.normal_(std=TIMM_RESNET_HEAD_STD, generator=generator)
        case (
            ["head", "weight"]
            | ["head", "pre_logits" | "logits", "weight"]
            | ["blocks", _, "attn", "qkv" | "proj", "weight"]
            | ["attn_pool", "q" | "kv" | "proj", "weight"]
            | ["blocks", _, "mlp", "fc1" | "fc2", "weight"]
            | ["attn_pool", "mlp", "fc1" | "fc2", "weight"]
        ):
            return value.normal_(std=TIMM_LINEAR_STD, generator=generator)
        case ["blocks", _, "mlp", "fc1" | "fc2", "bias"] | ["attn_pool", "mlp", "fc1" | "fc2", "bias"]:
            return value
        case _ if is_resnet_kernel(name):
            return nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu", generator=generator)
        case _:
            return google_value(name, value, model=model, generator=generator)


def is_resnet_kernel(name: str) -> bool:
    """True for a convolution's kernel in a hybrid's stem or a pure ResNet."""
    match name.removeprefix(STEM_PREFIX).split("."):
        case ["stem", "conv", "weight"]:
            return True
        case ["stages", _, "blocks", _, "conv1" | "conv2" | "conv3", "weight"]:
            return True
        case ["stages", _, "blocks", _, "downsample", "conv", "weight"]:
            return True
        case _:
            return False


def _xavier_parts(value: Tensor, *, parts: int, generator: torch.Generator) -> Tensor:
    """Xavier on each D x D of a fused matrix: the rows of q, of k, of v."""
    for part in value.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)
    return value


def _lecun_normal(value: Tensor, *, generator: torch.Generator) -> Tensor:
    """flax's lecun_normal: variance 1 / fan_in, cut off at two (uncorrected) deviations."""
    fan_in = value[0].numel()
    return _truncated_normal(value, std=math.sqrt(1.0 / fan_in) / TRUNCATED_STD, generator=generator)


def _truncated_normal(value: Tensor, *, std: float, generator: torch.Generator) -> Tensor:
    """A normal of deviation `std`, cut off at two of them, by the inverse of its distribution function: torch's own
    (`trunc_normal_`) draws other numbers in 2.15 than in 2.11."""
    edge = math.erf(math.sqrt(2.0))
    value.uniform_(-edge, edge, generator=generator)
    return value.erfinv_().mul_(std * math.sqrt(2.0)).clamp_(-2.0 * std, 2.0 * std)


def _stream_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
