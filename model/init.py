"""Initial weights of every model, reproducible from one seed, in one of four styles.

google: google-research/vision_transformer `models_vit.py` and `models_resnet.py`, big_vision `models/vit.py` (attention
pooling), big_transfer `bit_jax/models.py` (pure ResNets), and flax's defaults. big_vision: the same, but learned
positions have deviation 1 / sqrt(D) (0.036 for B) instead of 0.02. timm: timm 1.0 with `weight_init=""`
(models/vision_transformer.py, models/resnetv2.py, else torch's defaults), and google's for what timm lacks. timm's
"jax" init is omitted: its Xavier on the fused q/k/v matrix (3D x D) has a bound sqrt(2) too small. mae: that of
facebookresearch/mae `models_mae.py`, with this bound, the patch embedding as a linear layer, tokens of deviation 0.02.

Each parameter's random stream is keyed by (seed, name), independent of device and other parameters: models that differ
in heads start from the same trunk. Costs a second for B/16, about 10 for H/14.
"""

import hashlib
import math
import re
from collections.abc import Callable

import torch
from timm.layers import GluMlp, LayerScale
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from shardvit.model.vocabulary import InitStyle

# Deviation of a unit normal truncated to [-2, 2]: flax divides by it (jax.nn.initializers.variance_scaling).
TRUNCATED_STD = 0.87962566103423978

# Fills zeros (float32, on the CPU) with initial values; the module owns the parameter.
Fill = Callable[[Tensor, torch.Generator, nn.Module], object]


def initialise(model: nn.Module, *, seed: int, head_bias: float = 0.0, style: InitStyle = "google") -> None:
    """Overwrite all parameters of a model by `model.vit` or `model.self_supervised`, drawn in float32 on the CPU.

    `head_bias` of the last layer: -10 for sigmoid pre-training with many classes (vision_transformer issue 2), -6.9 for
    ImageNet-1k, else 0. Its weights start at zero except in timm's style. ValueError for an unknown parameter.
    """
    gated = {f"{name}.fc1.weight" for name, module in model.named_modules() if isinstance(module, GluMlp)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("head.bias", "head.logits.bias", "head.dist.bias"):
                parameter.fill_(head_bias)
                continue
            kind = "resnet." if isinstance(model, ResNetV2) else "gated." if name in gated else ""
            fill = _fill_of(f"{kind}{name}", style=style)
            if fill is None:
                shape = tuple(parameter.shape)
                raise ValueError(f"no initial value is defined for the parameter {name!r} of shape {shape}")
            value = torch.zeros(parameter.shape, device="cpu", dtype=torch.float32)
            generator = torch.Generator().manual_seed(stream_seed(seed, name))
            fill(value, generator, model.get_submodule(name.rpartition(".")[0]))
            parameter.copy_(value)


def _zero(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    pass


def _one(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    value.fill_(1.0)


def _normal(std: float) -> Fill:
    return lambda value, generator, module: value.normal_(std=std, generator=generator)


def _unit_vectors(share: float = 1.0) -> Fill:
    """Normal with vectors of length 1 on average, if rows of `value` are this share of them."""
    return lambda value, generator, module: value.normal_(std=(value.shape[-1] / share) ** -0.5, generator=generator)


def _xavier(parts: int = 1) -> Fill:
    """Xavier on each D x D part of a fused matrix (q, k, v)."""

    def fill(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
        for part in value.chunk(parts):
            nn.init.xavier_uniform_(part, generator=generator)

    return fill


def _xavier_flat(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    nn.init.xavier_uniform_(value.view(len(value), -1), generator=generator)


def _xavier_query(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    """[1, 1, D]: flax's Xavier takes fans 1 and D, unlike torch's."""
    bound = math.sqrt(6.0 / sum(value.shape[-2:]))
    value.uniform_(-bound, bound, generator=generator)


def _lecun_normal(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    """flax's lecun_normal: variance 1 / fan_in, truncated at two (uncorrected) deviations."""
    _truncated_normal(value, generator, std=math.sqrt(1.0 / value[0].numel()) / TRUNCATED_STD)


def _truncated_query(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    _truncated_normal(value, generator, std=value.shape[-1] ** -0.5)


def _truncated_normal(value: Tensor, generator: torch.Generator, *, std: float) -> None:
    """Truncate at two deviations by inverse CDF: torch's `trunc_normal_` draws differ between 2.11 and 2.15."""
    edge = math.erf(math.sqrt(2.0))
    value.uniform_(-edge, edge, generator=generator)
    value.erfinv_().mul_(std * math.sqrt(2.0)).clamp_(-2.0 * std, 2.0 * std)


def _kaiming(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu", generator=generator)


def _torch_default(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    assert isinstance(module, nn.Conv2d)
    bound = math.sqrt(1.0 / module.weight[0].numel())
    value.uniform_(-bound, bound, generator=generator)


def _layer_scale(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    assert isinstance(module, LayerScale)
    value.fill_(module.init_values)


def _turned_frequencies(value: Tensor, generator: torch.Generator, module: nn.Module) -> None:
    """[2, heads, head size / 2]: RoPE-ViT's mixed frequencies, axial ones turned by a random angle for each head
    (naver-ai/rope-vit; timm's init_random_2d_freqs, temperature 10)."""
    pairs = value.shape[-1] // 2
    sizes = 10.0 ** -(torch.arange(pairs) / pairs)
    angles = 2 * math.pi * torch.rand(value.shape[1], 1, generator=generator)
    both = torch.cat([angles, angles + math.pi / 2], dim=1).repeat_interleave(pairs, dim=1)
    value.copy_(torch.stack([both.cos(), both.sin()]) * sizes.repeat(2))


_RESNET = r"(resnet|patch_embed\.backbone)"  # a pure ResNet (see `initialise`) or a hybrid's stem
_UNIT = rf"{_RESNET}\.stages\.\d+\.blocks\.\d+"
_VIT_NORM = r"norm|fc_norm|decoder\.norm|(decoder\.)?blocks\.\d+\.(norm[12]|attn\.[qk]_norm|mlp\.norm)|attn_pool\.norm"
_NORM = rf"({_VIT_NORM}|resnet\.norm|{_RESNET}\.stem\.norm|{_UNIT}\.(norm[123]|downsample\.norm))"
_BLOCK = r"(decoder\.)?blocks\.\d+"
_MLP = rf"({_BLOCK}|attn_pool)\.mlp\.fc[12]"
_TIMM_LINEAR: dict[InitStyle, Fill] = {"timm": _normal(0.02)}
_TIMM_RESNET_HEAD: dict[InitStyle, Fill] = {"timm": _normal(0.01)}

# Pattern of a parameter's full name; google's value; other styles' where they differ. The first match counts.
_VALUES: tuple[tuple[str, Fill, dict[InitStyle, Fill]], ...] = (
    (r"(decoder\.)?mask_token", _normal(0.02), {}),  # not in the paper; BERT initialises its own like positions
    # 0.02: BERT's, models_vit.py. Columns and rows, which big_vision lacks, get the deviation of the whole token.
    (r"pos_embed|position\.tables\.\d+\.(embedding|prefix)", _normal(0.02), {"big_vision": _unit_vectors()}),
    (r"position\.tables\.\d+\.(column|row)", _normal(0.02), {"big_vision": _unit_vectors(0.5)}),
    (r"cls_token", _zero, {"timm": _normal(1e-6), "mae": _normal(0.02)}),
    (r"dist_token", _normal(0.02), {}),  # DeiT's, as timm's
    (r"reg_token", _normal(1e-6), {}),  # timm's and DINOv2's; equal ones would stay equal
    (r"patch_embed\.proj\.weight", _lecun_normal, {"timm": _torch_default, "mae": _xavier_flat}),
    (r"patch_embed\.proj\.bias", _zero, {"timm": _torch_default, "mae": _torch_default}),
    (rf"{_BLOCK}\.attn\.qkv\.weight", _xavier(3), {**_TIMM_LINEAR, "mae": _xavier()}),
    (r"blocks\.\d+\.attn\.freqs", _turned_frequencies, {}),
    (r"decoder\.(embed|predict)\.weight", _xavier(), _TIMM_LINEAR),
    (r"decoder\.(embed|predict)\.bias", _zero, {}),
    (r"attn_pool\.kv\.weight", _xavier(2), _TIMM_LINEAR),  # big_vision's MAPHead; timm fuses keys and values
    (r"gated\..*", _xavier(2), _TIMM_LINEAR),  # SwiGLU's first layer (see `initialise`): gate and value
    (rf"({_BLOCK}\.attn\.proj|attn_pool\.(q|proj)|{_MLP})\.weight", _xavier(), _TIMM_LINEAR),
    (
        rf"{_MLP}\.bias",
        _normal(1e-6),
        {"timm": _zero, "mae": _zero},
    ),  # models_vit.py: nn.initializers.normal(stddev=1e-6)
    (rf"({_BLOCK}\.attn\.(qkv|proj)|attn_pool\.(q|kv|proj)|(resnet\.)?head\.pre_logits)\.bias", _zero, {}),
    (r"attn_pool\.latent", _xavier_query, {"timm": _truncated_query}),
    (r"blocks\.\d+\.attn\.relative", _unit_vectors(), {}),  # Tensor2Tensor, see shardvit.model.positions.embedding
    (r"blocks\.\d+\.ls[12]\.gamma", _layer_scale, {}),
    (r"head(\.logits|\.dist)?\.weight", _zero, _TIMM_LINEAR),
    (r"head\.pre_logits\.weight", _lecun_normal, _TIMM_LINEAR),
    (r"resnet\.head(\.logits)?\.weight", _zero, _TIMM_RESNET_HEAD),
    (r"resnet\.head\.pre_logits\.weight", _lecun_normal, _TIMM_RESNET_HEAD),
    (rf"({_RESNET}\.stem\.conv|{_UNIT}\.(conv[123]|downsample\.conv))\.weight", _lecun_normal, {"timm": _kaiming}),
    # each unit of a hybrid's stem starts as its shortcut; pure ResNet units end in a convolution
    (r"patch_embed\.backbone\.stages\.\d+\.blocks\.\d+\.norm3\.weight", _zero, {}),
    (rf"{_NORM}\.weight", _one, {}),
    (rf"{_NORM}\.bias", _zero, {}),
)


def _fill_of(name: str, *, style: InitStyle) -> Fill | None:
    for pattern, google, others in _VALUES:
        if re.fullmatch(pattern, name):
            return others.get(style, google)
    return None


def stream_seed(seed: int, name: str) -> int:
    """Seed of a parameter's random stream."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
