"""Our interpolation of position embeddings against what Google calls: `scipy.ndimage.zoom(order=1)`."""

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from torch.nn import functional as F

from shardvit.model.positions.interpolation import interpolate_pos_embed
from tests.oracles.conftest import Measured

SEMANTIC, ORACLE = "interpolation of positions, kernel google", "scipy.ndimage.zoom, order 1"

IMAGE_SIZES, PATCH_SIZES = (224, 384, 512, 518), (14, 16, 32)
# Every grid that these images have (the patch size need not divide them: what is left over is no patch), from that of
# 224 pixels and back, and some small ones.
OF_IMAGES = {(224 // patch, size // patch) for patch in PATCH_SIZES for size in IMAGE_SIZES}
SMALL = {(2, 3), (4, 6), (6, 4), (1, 4), (3, 3), (2, 7), (5, 2)}
GRIDS = sorted(OF_IMAGES | {(new, old) for old, new in OF_IMAGES} | SMALL)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_equals_scipy_zoom(old: int, new: int, measured: Measured) -> None:
    pos_embed = torch.randn(1, 1 + old * old, 6, generator=torch.Generator().manual_seed(old * 100 + new))
    ours = interpolate_pos_embed(pos_embed, new_grid=(new, new), old_grid=(old, old))
    grid = pos_embed[0, 1:].reshape(old, old, 6).numpy()
    theirs = zoom(grid, (new / old, new / old, 1), order=1)
    assert theirs.shape == (new, new, 6)
    found = ours[0, 1:].reshape(new, new, 6)
    measured(
        "interpolation of positions, kernel google",
        "scipy.ndimage.zoom, order 1",
        "embeddings",
        found,
        theirs,
        below=1e-6,
    )


def test_equals_scipy_zoom_on_oblong_grids(measured: Measured) -> None:
    pos_embed = torch.randn(1, 1 + 5 * 8, 6, generator=torch.Generator().manual_seed(0))
    ours = interpolate_pos_embed(pos_embed, new_grid=(9, 6), old_grid=(5, 8))
    theirs = zoom(pos_embed[0, 1:].reshape(5, 8, 6).numpy(), (9 / 5, 6 / 8, 1), order=1)
    found = ours[0, 1:].reshape(9, 6, 6)
    measured(
        "interpolation of positions, kernel google",
        "scipy.ndimage.zoom, order 1",
        "embeddings",
        found,
        theirs,
        below=1e-6,
    )


def test_half_pixel_interpolation_would_be_noticed() -> None:
    """The kernel of timm's and open_clip's loaders is another one: the comparison above can tell."""
    grid = torch.randn(14, 14, 6, generator=torch.Generator().manual_seed(0))
    half_pixel = F.interpolate(grid.permute(2, 0, 1)[None], size=(24, 24), mode="bilinear", align_corners=False)
    theirs = zoom(grid.numpy(), (24 / 14, 24 / 14, 1), order=1)
    difference = np.abs(half_pixel[0].permute(1, 2, 0).numpy() - theirs).mean() / np.abs(theirs).mean()
    assert difference > 0.1
