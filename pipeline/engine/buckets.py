"""Cut the trained parameters into the buckets in which ZeRO 1 and 2 average gradients and gather weights. Pure.

A bucket holds whole units of the model (a Transformer block, the last norm, the head) in the order in which the forward
pass reaches them, so that the backward pass completes one bucket after the other, from the last to the first, and the
next forward pass waits for one after the other. A ViT's other parameters (embeddings) are needed from the start. Of
other models (ResNets, a user's own) each parameter is a unit of its own, and all are needed from the start.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_AFTER_BLOCKS = ("norm", "attn_pool", "fc_norm", "head")  # timm's names; each is called once, after the blocks


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name the modules that a ViT's forward pass calls one after the other, and only calls; {} for other models."""
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(model, VisionTransformer):
        return {}
    later = {name: module for name, module in model.named_children() if name in _AFTER_BLOCKS}
    blocks = {f"blocks.{name}": block for name, block in model.get_submodule("blocks").named_children()}
    return blocks | {name: later[name] for name in _AFTER_BLOCKS if name in later}


def turns_of(model: nn.Module) -> dict[str, int]:
    """Number each parameter's turn in the forward pass: its unit's, or its own in order of registration."""
    units, names = units_of(model), [name for name, _ in model.named_parameters()]
    if not units:
        return {name: turn for turn, name in enumerate(names)}
    turns = {f"{unit}.": turn for turn, unit in enumerate(units, start=1)}
    return {name: next((turn for unit, turn in turns.items() if name.startswith(unit)), 0) for name in names}


def cut_buckets(
    groups: Sequence[Mapping[str, Any]], *, turns: Mapping[str, int], most_elements: float
) -> list[list[tuple[str, nn.Parameter]]]:
    """Cut the members of `parameter_groups` into buckets of at most `most_elements` (`math.inf`: one bucket) or one
    turn. Within a bucket they keep the groups' order, so that parameters of one rule stay neighbours. Muon's matrices,
    which have another moment than AdamW's parameters, get buckets of their own."""
    kinds = ([group for group in groups if group.get("orthogonal", False) is kind] for kind in (False, True))
    buckets = [bucket for kind in kinds for bucket in _cut(kind, turns=turns, most_elements=most_elements)]
    return sorted(buckets, key=lambda bucket: min(turns[name] for name, _ in bucket))


def _cut(
    groups: Sequence[Mapping[str, Any]], *, turns: Mapping[str, int], most_elements: float
) -> list[list[tuple[str, nn.Parameter]]]:
    members = [member for group in groups for member in group["params"]]
    sizes = Counter[int]()
    for name, parameter in members:
        sizes[turns[name]] += parameter.numel()
    bucket_of, number, filled = dict[int, int](), -1, math.inf
    for turn, size in sorted(sizes.items()):
        if number < 0 or filled + size > most_elements:
            number, filled = number + 1, 0
        filled += size
        bucket_of[turn] = number
    buckets: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(number + 1)]
    for name, parameter in members:
        buckets[bucket_of[turns[name]]].append((name, parameter))
    return buckets
