"""A model of the user's own: built by the function or class that `model.custom` names, with the recipe's other keys.

Nothing here loads a file: whoever trusts one allows its digest (`pipeline.own_code`), and only then is it built. Costs
are measured on one image, on the meta device if the model's code runs there, else on the CPU.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shardvit.model.config import ModelConfig
from shardvit.model.layers.head import zero_linear
from shardvit.model.own.allowed import ALLOWED


class OwnModel(Protocol):
    """An nn.Module that the recipe's function returns: images [B, 3, H, W] -> logits [B, classes]; with the key
    `in_chans` of so many channels. The function gets `image_size`, `num_classes` and the recipe's other keys under
    `model`. Of these members only `head` is usual."""

    head: nn.Module
    """The last layer: its weights are named `head.*` (head_lr_factor, frozen). swap_head replaces an nn.Linear."""

    def replace_head(self, num_classes: int) -> None:
        """Attach a new head of zeros; needed for swap_head if `head` is no nn.Linear."""
        ...

    def resize_state(
        self, state: Mapping[str, Tensor], *, from_image_size: int, to_image_size: int
    ) -> dict[str, Tensor]:
        """Fit weights to another image size; needed if finetune's differs and shapes depend on it."""
        ...

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay."""
        ...


def build_custom(config: ModelConfig, *, image_size: int, num_classes: int, seed: int = 0) -> nn.Module:
    """Build the model with its own initial weights, the same for a seed. ValueError if its file is not allowed here, or
    what it returns is no model to train."""
    assert config.custom is not None
    file, _, rest = config.custom.partition(".py@")
    digest, _, name = rest.partition(":")
    label = f"{file.rpartition('/')[2]}.py:{name}"
    if digest not in ALLOWED:
        other = ", and what is trusted here is another text" if ALLOWED else ""
        raise ValueError(
            f"the model is own code, {label} (SHA-256 {digest[:12]}...), which looking at it does not run{other}: read "
            f"the file, and if you trust it give --trust PATH, such as --trust {file}.py"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ALLOWED[digest](name)(image_size=image_size, num_classes=num_classes, **config.options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.custom {label} returns {type(model).__name__}, not an nn.Module")
    if lasting := [each for each in model.state_dict() if each not in dict(model.named_parameters())]:
        raise ValueError(
            f"model.custom {label}: {lasting[0]} is a buffer that would be saved: training keeps parameters only, so "
            "take GroupNorm or LayerNorm for BatchNorm, and register other buffers with persistent=False"
        )
    return model


def replace_own_head(model: nn.Module, num_classes: int) -> None:
    """Attach a head of zeros; ValueError if the model says not how."""
    head = getattr(model, "head", None)
    if callable(replace := getattr(model, "replace_head", None)):
        replace(num_classes)
    elif isinstance(head, nn.Linear):
        model.set_submodule(
            "head", zero_linear(head.in_features, num_classes, device=head.weight.device, dtype=head.weight.dtype)
        )
    else:
        raise ValueError("swap_head: the own model has neither `head`, an nn.Linear, nor replace_head(num_classes)")


def resized_own_state(
    model: nn.Module, state: dict[str, Tensor], *, from_image_size: int, to_image_size: int
) -> dict[str, Tensor]:
    """Fit weights to `model`, of another image size; ValueError if they do not fit and it says not how."""
    if from_image_size != to_image_size and callable(resize := getattr(model, "resize_state", None)):
        fitted: Any = resize(state, from_image_size=from_image_size, to_image_size=to_image_size)
        return fitted
    theirs = {name: each.shape for name, each in model.state_dict().items()}
    if wrong := [name for name, each in state.items() if theirs.get(name) != each.shape]:
        raise ValueError(
            f"finetune.image_size {to_image_size}: {wrong[0]} has another shape than at {from_image_size} px: give the "
            "own model resize_state(state, from_image_size=, to_image_size=), or keep the size"
        )
    return state


def measure(config: ModelConfig, *, image_size: int, num_classes: int) -> tuple[int, int, int]:
    """Count parameters, forward FLOPs of an image, and bytes in bf16 that autograd keeps of it. ValueError as
    `build_custom`, and if the logits have another shape."""
    return _measure(json.dumps(config.model_dump(mode="json"), sort_keys=True), image_size, num_classes)


@lru_cache(maxsize=64)
def _measure(config: str, image_size: int, num_classes: int) -> tuple[int, int, int]:
    try:
        return _measured_on("meta", config, image_size, num_classes)
    except (RuntimeError, NotImplementedError):  # its code reads values
        return _measured_on("cpu", config, image_size, num_classes)


def _measured_on(device: str, config: str, image_size: int, num_classes: int) -> tuple[int, int, int]:
    kept: dict[int, Tensor] = {}

    def keep(saved: Tensor) -> Tensor:
        if not isinstance(saved, nn.Parameter):
            kept[id(saved)] = saved
        return saved

    with torch.device(device), torch.random.fork_rng(devices=[]):
        model = build_custom(
            config_of := ModelConfig.model_validate_json(config), image_size=image_size, num_classes=num_classes
        )
        images = torch.zeros(1, config_of.channels, image_size, image_size)
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda saved: saved):
            logits = model(images)
    if not isinstance(logits, Tensor) or logits.shape != (1, num_classes):
        got = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"model.custom gives {got} for one image, not logits [1, {num_classes}]")
    parameters = sum(each.numel() for each in model.parameters())
    return parameters, counter.get_total_flops(), sum(2 * each.numel() for each in kept.values())
