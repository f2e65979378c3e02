"""Our interpolation of position embeddings against what Google calls: `scipy.ndimage.zoom(order=1)`."""

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from torch.nn import functional as F

from model.config import ModelConfig
from model.positions.interpolation import interpolate_pos_embed, resize_state
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


@pytest.mark.parametrize(("old", "new"), [(14, 24), (16, 37), (37, 16), (7, 12)])
def test_a_table_of_columns_and_one_of_rows_are_the_zoomed_grid(old: int, new: int, measured: Measured) -> None:
    config = ModelConfig(width=8, depth=1, heads=1, patch_size=2, position="learned_2d")
    generator = torch.Generator().manual_seed(0)
    column, row = torch.randn(old, 4, generator=generator), torch.randn(old, 4, generator=generator)
    names = ("position.tables.0.column", "position.tables.0.row")
    resized = resize_state(
        dict(zip(names, (column, row), strict=True)), config=config, from_image_size=2 * old, to_image_size=2 * new
    )

    def grid(columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
        shape = (len(rows), len(columns), 4)
        return np.concatenate([np.broadcast_to(columns, shape), np.broadcast_to(rows[:, None], shape)], axis=-1)

    ours = grid(*(resized[name].numpy() for name in names))
    theirs = zoom(grid(column.numpy(), row.numpy()), (new / old, new / old, 1), order=1)
    measured(
        "interpolation of positions, kernel google, learned_2d",
        "scipy.ndimage.zoom, order 1",
        "embeddings",
        ours,
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
