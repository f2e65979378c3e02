"""Position embeddings at another resolution: 2-D bilinear interpolation on the grid of patches.

ViT paper, section 3.2: "we therefore perform 2D interpolation of the pre-trained position embeddings,
according to their location in the original image". Google's code does it with `scipy.ndimage.zoom(order=1)`,
which is bilinear with the corners of both grids aligned; half-pixel kernels (timm, open_clip) give visibly
other values. Costs milliseconds. It does not handle position embeddings that are not on a grid.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

POS_EMBED_KEY = "pos_embed"  # timm's name of the parameter


def interpolate_pos_embed(
    pos_embed: Tensor, *, new_grid: tuple[int, int], old_grid: tuple[int, int], num_prefix_tokens: int = 1
) -> Tensor:
    """Position embeddings [1, P + h*w, D] of `old_grid` (h, w) -> those of `new_grid`.

    The first `num_prefix_tokens` rows (the class token's) are kept bit for bit; the rest is interpolated in
    float64, as scipy does, and returned in the dtype that came in. The same grid returns the tensor itself.

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
    prefix, grid = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    grid = grid.reshape(1, old_height, old_width, -1).permute(0, 3, 1, 2).double()
    grid = F.interpolate(grid, size=new_grid, mode="bilinear", align_corners=True)
    grid = grid.permute(0, 2, 3, 1).reshape(1, new_height * new_width, -1)
    return torch.cat([prefix, grid.to(pos_embed.dtype)], dim=1)


def resize_state(
    state_dict: Mapping[str, Tensor], *, from_image_size: int, to_image_size: int, patch_size: int
) -> dict[str, Tensor]:
    """A state dict trained on square images of `from_image_size` pixels -> one for `to_image_size`.

    Only "pos_embed" differs; all other tensors are shared with the input, which stays as it is.

    Raises:
        ValueError: an image size is no multiple of the patch size, "pos_embed" is missing or of another grid.
    """
    for image_size in (from_image_size, to_image_size):
        if image_size <= 0 or image_size % patch_size:
            raise ValueError(f"image size {image_size} is not a multiple of the patch size {patch_size}")
    if POS_EMBED_KEY not in state_dict:
        raise ValueError(
            f"the state dict has no {POS_EMBED_KEY!r}: it is not that of a Vision Transformer of this project"
        )
    old, new = from_image_size // patch_size, to_image_size // patch_size
    resized = dict(state_dict)
    resized[POS_EMBED_KEY] = interpolate_pos_embed(state_dict[POS_EMBED_KEY], new_grid=(new, new), old_grid=(old, old))
    return resized
