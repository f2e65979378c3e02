"""Our interpolation of position embeddings against what Google calls: `scipy.ndimage.zoom(order=1)`."""

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from torch.nn import functional as F

from model.pos_embed import interpolate_pos_embed

GRIDS = [
    (14, 24),
    (14, 32),
    (16, 37),
    (24, 14),
    (7, 12),
    (2, 3),
    (4, 6),
    (6, 4),
    (1, 4),
    (3, 3),
    (2, 7),
    (5, 2),
]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_equals_scipy_zoom(old: int, new: int) -> None:
    pos_embed = torch.randn(1, 1 + old * old, 6, generator=torch.Generator().manual_seed(old * 100 + new))
    ours = interpolate_pos_embed(pos_embed, new_grid=(new, new), old_grid=(old, old))
    grid = pos_embed[0, 1:].reshape(old, old, 6).numpy()
    theirs = zoom(grid, (new / old, new / old, 1), order=1)
    assert theirs.shape == (new, new, 6)
    np.testing.assert_allclose(ours[0, 1:].reshape(new, new, 6).numpy(), theirs, rtol=1e-6, atol=1e-7)


def test_equals_scipy_zoom_on_oblong_grids() -> None:
    pos_embed = torch.randn(1, 1 + 5 * 8, 6, generator=torch.Generator().manual_seed(0))
    ours = interpolate_pos_embed(pos_embed, new_grid=(9, 6), old_grid=(5, 8))
    theirs = zoom(pos_embed[0, 1:].reshape(5, 8, 6).numpy(), (9 / 5, 6 / 8, 1), order=1)
    np.testing.assert_allclose(ours[0, 1:].reshape(9, 6, 6).numpy(), theirs, rtol=1e-6, atol=1e-7)


def test_half_pixel_interpolation_would_be_noticed() -> None:
    """The kernel of timm's and open_clip's loaders is another one: the comparison above can tell."""
    grid = torch.randn(14, 14, 6, generator=torch.Generator().manual_seed(0))
    half_pixel = F.interpolate(grid.permute(2, 0, 1)[None], size=(24, 24), mode="bilinear", align_corners=False)
    theirs = zoom(grid.numpy(), (24 / 14, 24 / 14, 1), order=1)
    difference = np.abs(half_pixel[0].permute(1, 2, 0).numpy() - theirs).mean() / np.abs(theirs).mean()
    assert difference > 0.1
