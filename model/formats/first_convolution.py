"""Fit a model's first convolution to another number of channels of an image, by the usual rule.

Weights of three channels are repeated in turn and scaled by 3 / channels, so that an image with equal channels gives
the same sums; for one channel they are summed (timm's `adapt_input_conv`). No rule is usual for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardvit.model.config import ModelConfig
from shardvit.model.vocabulary import COLOUR_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor


def channels_objection(theirs: ModelConfig, *, channels: int) -> str | None:
    """Why weights of `theirs` cannot go to a model of so many channels, or None."""
    if theirs.channels in (channels, COLOUR_CHANNELS) and (theirs.channels == channels or theirs.custom is None):
        return None
    return (
        f"weights of {theirs.channels} channels cannot go to {channels}: only those of {COLOUR_CHANNELS} are repeated"
    )


def with_channels(state: Mapping[str, Tensor], *, config: ModelConfig, channels: int) -> dict[str, Tensor]:
    """Adapt the weights of `config`, sharing all others. ValueError as `channels_objection`."""
    from timm.models import adapt_input_conv

    if objection := channels_objection(config, channels=channels):
        raise ValueError(objection)
    if config.channels == channels:
        return dict(state)
    name = "stem.conv.weight" if config.kind == "resnet" else "patch_embed.proj.weight"
    if config.kind == "vit" and config.sizes.resnet_layers is not None:
        name = "patch_embed.backbone.stem.conv.weight"
    return {**state, name: adapt_input_conv(channels, state[name])}
