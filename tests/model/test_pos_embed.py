"""`model.pos_embed`: laws of the interpolation (its values are compared with scipy's in tests/oracles)."""

import pytest
import torch

from model.config import ModelConfig
from model.init import initialise
from model.pos_embed import interpolate_pos_embed, resize_state
from model.vit import build_vit


def test_a_plane_stays_a_plane_from_corner_to_corner() -> None:
    """Bilinear with aligned corners maps a linear ramp to the linear ramp between the same corner values."""
    rows, columns = torch.linspace(0, 1, 5)[:, None], torch.linspace(0, 1, 3)[None, :]
    ramp = (2 * rows - 3 * columns).reshape(1, 15, 1)
    pos_embed = torch.cat([torch.tensor([[[9.0]]]), ramp], dim=1)
    finer = interpolate_pos_embed(pos_embed, new_grid=(8, 6), old_grid=(5, 3))
    rows, columns = torch.linspace(0, 1, 8)[:, None], torch.linspace(0, 1, 6)[None, :]
    torch.testing.assert_close(finer[0, 1:, 0].reshape(8, 6), 2 * rows - 3 * columns)


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 2])
def test_the_rows_before_the_grid_are_kept_bit_for_bit(num_prefix_tokens: int) -> None:
    pos_embed = torch.randn(1, num_prefix_tokens + 16, 8)
    resized = interpolate_pos_embed(pos_embed, new_grid=(6, 6), old_grid=(4, 4), num_prefix_tokens=num_prefix_tokens)
    assert resized.shape == (1, num_prefix_tokens + 36, 8)
    assert torch.equal(resized[:, :num_prefix_tokens], pos_embed[:, :num_prefix_tokens])


def test_the_same_grid_changes_nothing() -> None:
    pos_embed = torch.randn(1, 17, 8)
    assert interpolate_pos_embed(pos_embed, new_grid=(4, 4), old_grid=(4, 4)) is pos_embed


def test_half_precision_is_rounded_only_once() -> None:
    pos_embed = torch.randn(1, 17, 8).to(torch.bfloat16)
    resized = interpolate_pos_embed(pos_embed, new_grid=(7, 7), old_grid=(4, 4))
    exact = interpolate_pos_embed(pos_embed.float(), new_grid=(7, 7), old_grid=(4, 4))
    assert resized.dtype == torch.bfloat16
    assert torch.equal(resized, exact.to(torch.bfloat16))


def test_a_resized_state_loads_into_a_model_of_the_new_resolution() -> None:
    config = ModelConfig(width=48, depth=1, heads=4, patch_size=4)
    model = build_vit(config, image_size=16, num_classes=3, head="linear")
    initialise(model, seed=0)
    state = model.state_dict()
    before = state["pos_embed"].clone()

    resized = resize_state(state, from_image_size=16, to_image_size=24, patch_size=4)

    larger = build_vit(config, image_size=24, num_classes=3, head="linear")
    larger.load_state_dict(resized, strict=True)
    assert larger(torch.randn(2, 3, 24, 24)).shape == (2, 3)
    assert state["pos_embed"].shape == (1, 17, 48) and torch.equal(state["pos_embed"], before)
    assert all(resized[name] is state[name] for name in state if name != "pos_embed")


def test_mistakes_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 17, 8\) do not belong to a grid of 5 x 5 patches"):
        interpolate_pos_embed(torch.zeros(1, 17, 8), new_grid=(4, 4), old_grid=(5, 5))
    with pytest.raises(ValueError, match="at least 1 x 1"):
        interpolate_pos_embed(torch.zeros(1, 17, 8), new_grid=(0, 4), old_grid=(4, 4))
    with pytest.raises(ValueError, match="image size 18 is not a multiple of the patch size 4"):
        resize_state({"pos_embed": torch.zeros(1, 17, 8)}, from_image_size=16, to_image_size=18, patch_size=4)
    with pytest.raises(ValueError, match="has no 'pos_embed'"):
        resize_state({}, from_image_size=16, to_image_size=24, patch_size=4)
