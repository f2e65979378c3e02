"""Position embeddings at another resolution: interpolation on the grid of patches.

ViT paper, section 3.2: "we therefore perform 2D interpolation of the pre-trained position embeddings,
according to their location in the original image". Two kernels, a model's configuration says which is its own:
- google: Google's code calls `scipy.ndimage.zoom(order=1)`, which is bilinear with the corners of both grids aligned;
  half-pixel kernels (timm, open_clip) give visibly other values.
- timm: bicubic, half-pixel, antialiased (timm.layers.resample_abs_pos_embed), for weights trained with that.

Both treat rows and columns apart, with weights whose sum is 1, so a learned 2-D embedding's two tables, resized each
along its one axis, give what the resized embedding of the grid would be. Costs milliseconds. Positions that are
computed, or absent, need nothing; relative ones are offsets in a sequence, which another grid lays out otherwise, so
nobody can say what they become.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import ModelConfig
from model.vocabulary import Interpolation

POS_EMBED_KEY = "pos_embed"  # timm's name of the parameter; other places and kinds are in model.position

# With the precision in which the original computes: scipy in float64, timm in float32.
_KERNELS: dict[Interpolation, tuple[torch.dtype, dict[str, Any]]] = {
    "google": (torch.float64, {"mode": "bilinear", "align_corners": True}),
    "timm": (torch.float32, {"mode": "bicubic", "antialias": True}),
}


def interpolate_pos_embed(
    pos_embed: Tensor,
    *,
    new_grid: tuple[int, int],
    old_grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    kernel: Interpolation = "google",
) -> Tensor:
    """Position embeddings [1, P + h*w, D] of `old_grid` (h, w) -> those of `new_grid`.

    The first `num_prefix_tokens` rows (the class token's) are kept bit for bit; the rest is interpolated in float64
    (google) or float32 (timm) and returned in the dtype that came in. The same grid returns the tensor itself.

    Raises:
        ValueError: the tensor is not [1, P + h*w, D] for `old_grid`, or a side of a grid is not positive.
    """
    (old_height, old_width), (new_height, new_width) = old_grid, new_grid
    if min(old_height, old_width, new_height, new_width) < 1:
        raise ValueError(f"position embeddings need grids of at least 1 x 1, not {old_grid} and {new_grid}")
    expected = num_prefix_tokens + old_height * old_width
    if pos_embed.ndim != 3 or pos_embed.shape[0] != 1 or pos_embed.shape[1] != expected:
        raise ValueError(
            f"position embeddings of shape {tuple(pos_embed.shape)} do not belong to a grid of "
            f"{old_height} x {old_width} patches and {num_prefix_tokens} more token(s), "
            f"which needs the shape (1, {expected}, D)"
        )
    if old_grid == new_grid:
        return pos_embed
    dtype, arguments = _KERNELS[kernel]
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    grid = grid.reshape(1, old_height, old_width, -1).permute(0, 3, 1, 2).to(dtype)
    grid = F.interpolate(grid, size=new_grid, **arguments)
    grid = grid.permute(0, 2, 3, 1).reshape(1, new_height * new_width, -1)
    return torch.cat([prefix, grid.to(pos_embed.dtype)], dim=1)


def resize_state(
    state_dict: Mapping[str, Tensor], *, config: ModelConfig, from_image_size: int, to_image_size: int
) -> dict[str, Tensor]:
    """A state dict trained on square images of `from_image_size` pixels -> one for `to_image_size`.

    Only learned positions differ; all other tensors are shared with the input, which stays as it is. `config` says
    where they are and with which kernel they are interpolated; a pure ResNet has none.

    Raises:
        ValueError: an image size that the model cannot take; position embeddings that are missing, of another grid
            or of one that is not square; relative positions and another grid.
    """
    old, new = config.grid_size(from_image_size), config.grid_size(to_image_size)
    resized = dict(state_dict)
    if config.kind == "resnet":
        return resized
    if config.position == "relative" and old != new:
        raise ValueError(
            f"relative positions cannot go from {from_image_size} to {to_image_size} pixels: they are offsets in the "
            f"sequence of a grid of {old} x {old} patches, undefined on one of {new} x {new}; "
            f"stay at {from_image_size} pixels, or take position learned_1d, learned_2d, sincos_2d or none"
        )
    for name in _learned_names(config):
        if name not in state_dict:
            raise ValueError(f"the state dict has no {name!r}, where {_described(config)} has its positions")
        tensor = state_dict[name]
        match name.rpartition(".")[2]:
            case "column" | "row":  # [grid, D/2]: a grid of one column
                resized[name] = _resize_axis(name, tensor, old=old, new=new, kernel=config.interpolation)
            case _:
                resized[name] = _resize_grid(name, tensor, old=old, new=new, config=config)
    return resized


def _learned_names(config: ModelConfig) -> list[str]:
    """The tensors of a state dict that have a row for each patch, or for each column or row of patches."""
    if config.position == "learned_1d" and config.position_at == "stem":
        return [POS_EMBED_KEY]
    tables = range(config.sizes.depth if config.position_at == "every_layer" else 1)
    match config.position:
        case "learned_1d":
            return [f"position.tables.{table}.embedding" for table in tables]
        case "learned_2d":
            return [f"position.tables.{table}.{axis}" for table in tables for axis in ("column", "row")]
        case "relative" | "sincos_2d" | "none":
            return []


def _resize_grid(name: str, tensor: Tensor, *, old: int, new: int, config: ModelConfig) -> Tensor:
    """[1, P + old^2, D] -> [1, P + new^2, D]."""
    num_prefix_tokens = int(config.pool == "cls")
    patches = tensor.shape[1] - num_prefix_tokens if tensor.ndim == 3 else -1
    side = math.isqrt(patches) if patches > 0 else 0
    if side**2 != patches:
        raise ValueError(
            f"{name!r} of shape {tuple(tensor.shape)} is not that of a square grid of patches and "
            f"{num_prefix_tokens} more token(s) (pool {config.pool}): only square images are supported"
        )
    if side != old:
        pixels = side * config.sizes.patch_size
        raise ValueError(
            f"{name!r} of shape {tuple(tensor.shape)} belongs to a grid of {side} x {side} patches, that of images of "
            f"{pixels} pixels, not to {old} x {old}: give {pixels} as the image size that it was trained with"
        )
    return interpolate_pos_embed(
        tensor,
        new_grid=(new, new),
        old_grid=(old, old),
        num_prefix_tokens=num_prefix_tokens,
        kernel=config.interpolation,
    )


def _resize_axis(name: str, tensor: Tensor, *, old: int, new: int, kernel: Interpolation) -> Tensor:
    """[old, D/2] -> [new, D/2]."""
    if tensor.ndim != 2 or len(tensor) != old:
        raise ValueError(
            f"{name!r} of shape {tuple(tensor.shape)} does not belong to a grid of {old} x {old} patches, "
            f"which needs the shape ({old}, D/2)"
        )
    if old == new:
        return tensor
    return interpolate_pos_embed(
        tensor[None], new_grid=(new, 1), old_grid=(old, 1), num_prefix_tokens=0, kernel=kernel
    )[0]


def _described(config: ModelConfig) -> str:
    return f"a model of position {config.position} at {config.position_at}"
