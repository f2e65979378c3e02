"""Laws of the interpolation of positions (its values are compared with scipy's and timm's in tests/oracles)."""

from typing import Any, get_args

import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.positions.interpolation import interpolate_pos_embed, resize_state
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import Interpolation, Pool


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


def test_half_precision_is_rounded_only_once() -> None:
    pos_embed = torch.randn(1, 17, 8).to(torch.bfloat16)
    resized = interpolate_pos_embed(pos_embed, new_grid=(7, 7), old_grid=(4, 4))
    exact = interpolate_pos_embed(pos_embed.float(), new_grid=(7, 7), old_grid=(4, 4))
    assert resized.dtype == torch.bfloat16
    assert torch.equal(resized, exact.to(torch.bfloat16))


LEARNED = [
    {"position": "learned_1d"},
    {"position": "learned_1d", "position_at": "every_layer"},
    {"position": "learned_1d", "position_at": "every_layer_shared"},
    {"position": "learned_2d"},
    {"position": "learned_2d", "position_at": "every_layer"},
    {"position": "learned_2d", "position_at": "every_layer_shared"},
]
NOT_LEARNED = [{"position": "sincos_2d"}, {"position": "none"}]


def _config(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"width": 16, "depth": 2, "heads": 2, "patch_size": 4} | more)


def _state(config: ModelConfig, *, image_size: int) -> dict[str, torch.Tensor]:
    model = build_model(config, image_size=image_size, num_classes=3, head="linear")
    initialise(model, seed=0)
    return model.state_dict()


@pytest.mark.parametrize(("old", "new"), [(16, 24), (24, 16), (16, 16)])
@pytest.mark.parametrize("pool", get_args(Pool))
@pytest.mark.parametrize("more", LEARNED + NOT_LEARNED, ids=lambda more: "-".join(more.values()))
def test_a_resized_state_loads_into_a_model_of_the_new_resolution(
    more: dict[str, str], pool: Pool, old: int, new: int
) -> None:
    config = _config(pool=pool, **more)
    state = _state(config, image_size=old)
    before = {name: value.clone() for name, value in state.items()}

    resized = resize_state(state, config=config, from_image_size=old, to_image_size=new)

    other = build_model(config, image_size=new, num_classes=3, head="linear")
    other.load_state_dict(resized, strict=True)
    assert other(torch.randn(2, 3, new, new)).shape == (2, 3)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    changed = {name for name in state if resized[name] is not state[name]}
    if old == new or more in NOT_LEARNED:
        assert not changed
    else:
        suffixes = ("embedding", "pos_embed", "column", "row")
        assert changed == {name for name in state if name.endswith(suffixes)}


@pytest.mark.parametrize("more", LEARNED, ids=lambda more: "-".join(more.values()))
def test_patches_resize_alike_whether_the_class_token_has_a_position_or_not(more: dict[str, str]) -> None:
    sizes = {"from_image_size": 16, "to_image_size": 24}
    config, without = _config(**more), _config(**more, class_token_position="none")
    state = _state(config, image_size=16)
    bare = {
        name: value[:, 1:] if name.endswith(("embedding", "pos_embed")) else value
        for name, value in state.items()
        if not name.endswith("prefix")
    }
    with_row, resized = resize_state(state, config=config, **sizes), resize_state(bare, config=without, **sizes)
    build_model(without, image_size=24, num_classes=3, head="linear").load_state_dict(resized, strict=True)
    for name, value in resized.items():
        assert torch.equal(value, with_row[name][:, -value.shape[1] :] if value.ndim == 3 else with_row[name]), name


@pytest.mark.parametrize("kernel", get_args(Interpolation))
@pytest.mark.parametrize(("old", "new"), [(16, 36), (36, 16), (20, 28)])
def test_two_resized_tables_are_the_resized_grid(kernel: Interpolation, old: int, new: int) -> None:
    """What a learned 2-D embedding adds to the patches, before and after, against the 2-D kernel on just that."""
    config = _config(position="learned_2d", interpolation=kernel)
    state = _state(config, image_size=old)

    def added(state: dict[str, torch.Tensor], *, image_size: int) -> torch.Tensor:
        model = build_model(config, image_size=image_size, num_classes=3, head="linear")
        model.load_state_dict(state)
        with torch.no_grad():
            return model.position.at_stem(torch.zeros(1, 1 + config.grid_size(image_size) ** 2, 16))

    ours = added(resize_state(state, config=config, from_image_size=old, to_image_size=new), image_size=new)
    grids = {"old_grid": (old // 4, old // 4), "new_grid": (new // 4, new // 4)}
    theirs = interpolate_pos_embed(added(state, image_size=old), kernel=kernel, **grids)
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_configurations_kernel_is_used() -> None:
    states = {}
    for kernel in get_args(Interpolation):
        config = _config(interpolation=kernel)
        state = _state(config, image_size=16)
        states[kernel] = resize_state(state, config=config, from_image_size=16, to_image_size=24)["pos_embed"]
        expected = interpolate_pos_embed(state["pos_embed"], new_grid=(6, 6), old_grid=(4, 4), kernel=kernel)
        assert torch.equal(states[kernel], expected)
    assert not torch.equal(states["google"], states["timm"])


def test_a_hybrid_has_the_grid_of_its_whole_stem_and_a_resnet_none() -> None:
    hybrid = _config(patch_size=8, resnet_layers=(1, 1))
    state = _state(hybrid, image_size=16)
    resized = resize_state(state, config=hybrid, from_image_size=16, to_image_size=32)
    assert state["pos_embed"].shape == (1, 1 + 4, 16) and resized["pos_embed"].shape == (1, 1 + 16, 16)
    resnet = ModelConfig(resnet_layers=(1, 1))
    state = _state(resnet, image_size=16)
    resized = resize_state(state, config=resnet, from_image_size=16, to_image_size=32)
    assert resized == state


def test_relative_positions_have_no_other_grid() -> None:
    config = _config(position="relative")
    state = _state(config, image_size=16)
    assert resize_state(state, config=config, from_image_size=16, to_image_size=16) == state
    with pytest.raises(ValueError, match=r"from 16 to 24 pixels.* stay at 16 pixels, or take position learned_1d"):
        resize_state(state, config=config, from_image_size=16, to_image_size=24)


@pytest.mark.parametrize(
    ("state", "sizes", "says"),
    [
        ({"pos_embed": (1, 17, 16)}, (16, 18), "image size 18 is not a multiple of the patch size 4"),
        ({}, (16, 24), "has no 'pos_embed', where a model of position learned_1d at stem has its positions"),
        ({"pos_embed": (1, 1 + 4 * 6, 16)}, (16, 24), r"not that of a square grid of patches and 1 more token\(s\)"),
        ({"pos_embed": (1, 16, 16)}, (16, 24), r"square grid of patches and 1 more token\(s\) \(pool cls\)"),
        ({"pos_embed": (17, 16)}, (16, 24), "is not that of a square grid"),
        (
            {"pos_embed": (1, 37, 16)},
            (16, 32),
            "grid of 6 x 6 patches, that of images of 24 pixels, not to 4 x 4: give 24",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused_in_words(
    state: dict[str, tuple[int, ...]], sizes: tuple[int, int], says: str
) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in state.items()}
    with pytest.raises(ValueError, match=says):
        resize_state(tensors, config=_config(), from_image_size=sizes[0], to_image_size=sizes[1])


def test_a_2d_table_of_another_grid_is_refused_in_words() -> None:
    config = _config(position="learned_2d")
    state = _state(config, image_size=24)
    with pytest.raises(ValueError, match=r"'position.tables.0.column' of shape \(6, 8\).* needs the shape \(4, D/2\)"):
        resize_state(state, config=config, from_image_size=16, to_image_size=32)
