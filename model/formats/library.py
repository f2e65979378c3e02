"""Shared by readers and writers for other libraries: names by tables of prefixes, and what a plain ViT lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from model.config import ModelConfig
    from model.saved.model_folder import SavedModelMeta


@dataclass(frozen=True)
class Names:
    """A library's names."""

    outside: Mapping[str, str]  # prefix of theirs -> of ours, of what is in no block
    block: str  # before a block's parts, with {} for its number
    inside: Mapping[str, str]  # prefix of theirs -> of ours, of a block's parts
    other_blocks: tuple[str, ...] = ()  # these two: in other releases of the library, which are read too
    other_inside: Mapping[str, str] | None = None

    def ours(self, name: str) -> str:
        """Our name of a parameter; a name that is not theirs stays."""
        for block in (self.block, *self.other_blocks):
            if match := re.match(re.escape(block).replace(r"\{\}", r"(\d+)"), name):
                part = _changed(name[match.end() :], {**self.inside, **(self.other_inside or {})})
                return f"blocks.{match[1]}.{part}" if part else name
        return _changed(name, self.outside) or name

    def theirs(self, name: str) -> str:
        if not name.startswith("blocks."):
            return _changed(name, {ours: theirs for theirs, ours in self.outside.items()}) or name
        _, index, part = name.split(".", 2)
        return self.block.format(index) + str(_changed(part, {ours: theirs for theirs, ours in self.inside.items()}))


def _changed(name: str, prefixes: Mapping[str, str]) -> str | None:
    return next((new + name[len(old) :] for old, new in prefixes.items() if name.startswith(old)), None)


def add_qkv_biases(state: dict[str, Tensor]) -> list[str]:
    """Give a model without biases of q, k and v zeros in their place; returns notes."""
    weights = [name for name in state if name.endswith(".attn.qkv.weight")]
    if not weights or any(name.endswith(".attn.qkv.bias") for name in state):
        return []
    for name in weights:
        state[name.replace(".weight", ".bias")] = state[name].new_zeros(state[name].shape[0])
    return ["q, k and v have no biases: they became zeros, which training would move"]


def move_class_row(state: Mapping[str, Tensor], *, config: ModelConfig) -> dict[str, Tensor]:
    """Position embeddings of N or 1 + N rows -> with as many for the class token as `config` has; the same logits.

    A missing row becomes zeros; one too many is added to the token itself, in float32, as big_vision does to files.
    """
    from torch.nn import functional

    state = dict(state)
    if "cls_token" not in state or "pos_embed" not in state:
        return state
    has_row = math.isqrt(state["pos_embed"].shape[1]) ** 2 != state["pos_embed"].shape[1]
    if config.class_token_rows and not has_row:
        state["pos_embed"] = functional.pad(state["pos_embed"], (0, 0, 1, 0))
    elif has_row and not config.class_token_rows:
        of_class, state["pos_embed"] = (part.float() for part in state["pos_embed"].tensor_split([1], dim=1))
        state["cls_token"] = state["cls_token"].float() + of_class
    return state


def with_all_positions(state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> dict[str, Tensor]:
    """The weights with a position in `pos_embed` for every token: fixed ones, and zeros for a class token without."""
    from model.positions.embedding import fixed_numbers

    state = {**state, **fixed_numbers(meta.model, image_size=meta.image_size)}
    config = meta.model.with_learned_positions.model_copy(update={"class_token_position": "learned"})
    return move_class_row(state, config=config)


def plain_vit_objection(config: ModelConfig, *, whose: str) -> str | None:
    """Why a ViT with only a class token and learned 1-D positions cannot be this trunk; None: it can."""
    config = config.with_learned_positions
    if config.kind == "resnet" or config.sizes.resnet_layers is not None:
        return f"{whose} is neither a hybrid nor a ResNet of Google's kind"
    if config.pool != "cls":
        return f"{whose} has no pooling {config.pool}, only the class token"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"{whose} has no position embedding {config.position} at {config.position_at}"
    if config.layer_scale is not None:
        return f"{whose} has no layer scale"
    return None
