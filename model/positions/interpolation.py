"""Interpolate position embeddings to another resolution (ViT paper, section 3.2).

- google: `scipy.ndimage.zoom(order=1)`, bilinear with the corners of both grids aligned; half-pixel kernels (timm,
  open_clip) give visibly different values.
- timm: bicubic, half-pixel, antialiased (timm.layers.resample_abs_pos_embed), for weights trained with it.

Both are separable with weights that sum to 1, so resizing a learned 2-D embedding's two tables equals resizing the
grid. Relative positions are offsets in a sequence, undefined on another grid.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardvit.model.config import ModelConfig
from shardvit.model.vocabulary import Interpolation

POS_EMBED_KEY = "pos_embed"  # timm's parameter; other places and kinds are under model.position

# Precision as in the originals: scipy in float64, timm in float32.
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
    """Resize position embeddings [1, P + h*w, D], keeping the dtype; `num_prefix_tokens` rows stay bit-identical."""
    dtype, arguments = _KERNELS[kernel]
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    grid = grid.reshape(1, *old_grid, -1).permute(0, 3, 1, 2).to(dtype)
    grid = F.interpolate(grid, size=new_grid, **arguments)
    return torch.cat([prefix, grid.flatten(2).transpose(1, 2).to(pos_embed.dtype)], dim=1)


def on_grid(embedding: Tensor, *, patches: int, num_prefix_tokens: int, kernel: Interpolation) -> Tensor:
    """Learned positions [1, P + h*h, D] as `interpolate_pos_embed` takes them to a square grid of `patches`, up to
    rounding, within a forward pass: two matrix products in float64, as torch's own gradient of an interpolation sums in
    any order on a GPU, and autocast leaves float64 alone."""
    prefix, grid = embedding[:, :num_prefix_tokens], embedding[0, num_prefix_tokens:]
    old, new = math.isqrt(len(grid)), math.isqrt(patches)
    weights = side_weights(old, new, kernel=kernel, device=embedding.device)
    columns = weights @ grid.double().unflatten(0, (old, old))  # [old rows, new columns, D]
    rows = weights @ columns.flatten(1)  # [new rows, new columns * D]
    return torch.cat([prefix, rows.view(1, patches, -1).to(embedding.dtype)], dim=1)


def along_side(table: Tensor, *, side: int, kernel: Interpolation) -> Tensor:
    """The same for columns or rows: [old side, D] -> [side, D]."""
    weights = side_weights(len(table), side, kernel=kernel, device=table.device)
    return (weights @ table.double()).to(table.dtype)


@torch.no_grad()
def side_weights(old: int, new: int, *, kernel: Interpolation, device: torch.device) -> Tensor:
    """What `kernel` multiplies a side of the old grid by: float64 [new, old]."""
    units = torch.eye(old, dtype=torch.float64, device=device)[None]
    return interpolate_pos_embed(units, new_grid=(new, 1), old_grid=(old, 1), num_prefix_tokens=0, kernel=kernel)[0]


def resize_state(
    state_dict: Mapping[str, Tensor], *, config: ModelConfig, from_image_size: int, to_image_size: int
) -> dict[str, Tensor]:
    """Convert a state dict to square images of `to_image_size` pixels: only learned positions change, other tensors are
    shared with the input. ValueError for an impossible image size, positions that are missing or of another or
    non-square grid, and relative positions on another grid."""
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
            where = f"position {config.position} at {config.position_at}"
            raise ValueError(f"the state dict has no {name!r}, where a model of {where} has its positions")
        tensor, kernel = state_dict[name], config.interpolation
        _check_grid(name, tensor, grid_size=old, config=config)
        if old == new:
            continue
        if tensor.ndim == 2:  # columns or rows [grid, D/2]: a grid of one column
            resized[name] = interpolate_pos_embed(
                tensor[None], new_grid=(new, 1), old_grid=(old, 1), num_prefix_tokens=0, kernel=kernel
            )[0]
        else:  # [1, P + grid^2, D]
            rows = config.prefix_rows
            resized[name] = interpolate_pos_embed(
                tensor, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=rows, kernel=kernel
            )
    return resized


def _learned_names(config: ModelConfig) -> list[str]:
    leaves = {"learned_1d": ("embedding",), "learned_2d": ("column", "row")}.get(config.position, ())
    if config.position == "learned_1d" and config.position_at == "stem":
        return [POS_EMBED_KEY]
    tables = range(config.sizes.depth if config.position_at == "every_layer" else 1)
    return [f"position.tables.{table}.{leaf}" for table in tables for leaf in leaves]


def _check_grid(name: str, tensor: Tensor, *, grid_size: int, config: ModelConfig) -> None:
    if name.endswith((".column", ".row")):
        if tensor.ndim != 2 or len(tensor) != grid_size:
            raise ValueError(
                f"{name!r} of shape {tuple(tensor.shape)} does not belong to a grid of {grid_size} x {grid_size} "
                f"patches, which needs the shape ({grid_size}, D/2)"
            )
        return
    num_prefix_tokens = config.prefix_rows
    patches = tensor.shape[1] - num_prefix_tokens if tensor.ndim == 3 else -1
    side = math.isqrt(patches) if patches > 0 else 0
    if side**2 != patches:
        raise ValueError(
            f"{name!r} of shape {tuple(tensor.shape)} is not that of a square grid of patches and "
            f"{num_prefix_tokens} more token(s) (pool {config.pool}): only square images are supported"
        )
    if side != grid_size:
        pixels = side * config.sizes.patch_size
        raise ValueError(
            f"{name!r} of shape {tuple(tensor.shape)} belongs to a grid of {side} x {side} patches, that of images of "
            f"{pixels} pixels, not to {grid_size} x {grid_size}: give {pixels} as the image size that it was trained "
            "with"
        )
