"""Group parameters by weight decay, learning rate factor, and what Muon and LAMB need.

Uses names and module types, so it works for every model here. Sources: big_vision's masks (decay on flax's `kernel`s),
timm's `param_groups_weight_decay` and `param_groups_layer_decay`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.vocabulary import OptimizerName

_TOKENS = ("cls_token", "reg_token", "dist_token", "mask_token", "decoder.mask_token")
_EMBEDDED = ("pos_embed", "position.", *_TOKENS)  # as in timm: no decay, layer 0
_DIMENSIONS_QKV = 4  # of flax's kernels of q, k and v: which, heads, channels of a head, inputs
_EMBEDDING = ("patch_embed.", "stem.")  # reads the pixels: not for Muon


@dataclass(frozen=True)
class _Rule:
    weight_decay: float  # as the optimizer takes it: multiplied by the group's learning rate
    lr_scale: float  # the group's learning rate over the schedule's
    decays: bool  # of a kind that decays, perhaps by 0
    hidden: bool  # a kernel between embedding and head


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Make a torch optimizer's groups, kernels first; `lr_scale` multiplies the schedule's learning rate."""
    kernels, exempt = kernel_names(model), set[str](getattr(model, "no_weight_decay", set)())
    layers = layer_numbers(model) if config.layer_decay != 1.0 else {}
    last = max(layers.values(), default=0)
    head_kernel = next((name for name in reversed([*model.state_dict()]) if name in kernels and is_head(name)), None)
    groups: dict[_Rule, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = name in kernels if config.weight_decay_on == "kernels" else _is_matrix(name, parameter)
        decays = decays and name not in exempt
        decays = decays or (config.weight_decay_on == "matrices_and_tokens" and name in _TOKENS)
        own = config.head_weight_decay if name in (head_kernel, "head.weight") else None  # a pair has both
        decay = (config.weight_decay if own is None else own) if decays else 0.0
        scale = config.layer_decay ** (last - layers.get(name, last)) * (
            config.head_lr_factor if is_head(name) else 1.0
        )
        if config.weight_decay_unit == "schedule":
            decay /= config.lr * scale
        hidden = name in kernels and not is_head(name) and not name.startswith(_EMBEDDING)
        rule = _Rule(decay, scale, decays, hidden=hidden and config.name == "muon")
        groups.setdefault(rule, []).append((name, parameter))
    shapes = flax_shapes(model) if config.name in ("adafactor", "lamb") else {}
    return [
        {
            "params": members,
            "weight_decay": rule.weight_decay,
            "lr_scale": rule.lr_scale,
            **_own_keys(config.name, rule, members, shapes),
        }
        for rule, members in sorted(groups.items(), key=lambda each: not each[0].decays)
    ]


def _own_keys(
    name: OptimizerName, rule: _Rule, members: list[tuple[str, nn.Parameter]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    match name:
        case "lamb":  # norms and biases take Adam's update, as in LAMB's own code
            parts = [shapes[name][0] if len(shapes.get(name, ())) == _DIMENSIONS_QKV else 1 for name, _ in members]
            return {"adapts": rule.decays, "parts": parts}
        case "muon":
            return {"orthogonal": rule.hidden}
        case "adafactor":
            return {"shapes": [shapes.get(name, tuple(parameter.shape)) for name, parameter in members]}
        case "adamw" | "sgd" | "custom":
            return {}


def kernel_names(model: nn.Module) -> set[str]:
    """Name the weights of linear and convolution layers (flax's `kernel`s)."""
    return {
        f"{prefix}.weight".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Number each parameter's layer as timm does: embedding 0, then the blocks, then the head."""
    from timm.models import group_parameters

    matcher: Any = model.group_matcher
    numbers: Any = group_parameters(model, matcher(coarse=False), reverse=True)
    return {name: 0 if name.startswith(_EMBEDDED) else number for name, number in numbers.items()}


def is_head(name: str) -> bool:
    """True for parameters of the head, of one layer or two."""
    return name.startswith("head.")


def _is_matrix(name: str, parameter: Tensor) -> bool:
    named = name.startswith(_EMBEDDED) or name.endswith((".bias", ".relative", ".freqs"))
    return parameter.ndim >= 2 and not named


def flax_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Map attention parameters to flax's shapes, whose heads dimension changes Adafactor's factors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if heads is None:
            continue
        for name in ("qkv", "q", "kv", "proj"):
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear):
                width_in, width_out = layer.in_features, layer.out_features
                if name == "proj":
                    shapes[f"{prefix}.{name}.weight"] = (width_out, heads, width_in // heads)
                else:
                    parts = {"qkv": 3, "kv": 2, "q": 1}[name]
                    split = (parts, heads, width_out // parts // heads)
                    shapes[f"{prefix}.{name}.weight"] = (*split, width_in)
                    shapes[f"{prefix}.{name}.bias"] = split
    return shapes
