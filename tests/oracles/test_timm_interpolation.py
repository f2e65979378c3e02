"""Our interpolation of position embeddings by the kernel `timm` against timm's own function."""

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from model.positions.interpolation import interpolate_pos_embed
from tests.oracles.conftest import Measured

GRIDS = [(14, 24), (16, 37), (7, 12), (24, 14), (37, 16), (4, 3), (2, 7), (1, 4)]


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_the_kernel_is_timms(old: int, new: int, num_prefix_tokens: int, measured: Measured) -> None:
    pos_embed = torch.randn(1, num_prefix_tokens + old**2, 6, generator=torch.Generator().manual_seed(old))
    ours = interpolate_pos_embed(
        pos_embed, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=num_prefix_tokens, kernel="timm"
    )
    theirs = resample_abs_pos_embed(pos_embed, [new, new], [old, old], num_prefix_tokens=num_prefix_tokens)
    measured("interpolation of positions, kernel timm", "timm", "embeddings", ours, theirs, below=1e-6)
    if old > 1:  # one vector spread over a grid is that vector with any kernel
        google = interpolate_pos_embed(
            pos_embed, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=num_prefix_tokens
        )
        assert (google - theirs).abs().max() > 1e-2
