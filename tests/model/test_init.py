"""`model.init`: reproducible from one seed and nothing else (flax and timm are the oracles of its distributions)."""

import hashlib
import math
from typing import Any, get_args

import pytest
import torch
from scipy.stats import truncnorm
from torch import nn

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind, InitStyle

# The first numbers of the streams of seed 7, as they were when the project had only standard models. Truncated normals
# are not among them: their law is torch's to keep, not its way of drawing them.
FIRST_NUMBERS = {
    "pos_embed": [-0.013724408, -0.0079274997, 0.016191937],
    "blocks.0.attn.qkv.weight": [0.22295049, 0.1633794, -0.12919825],
    "blocks.0.attn.proj.weight": [0.008161217, -0.23264876, -0.16886914],
    "blocks.0.mlp.fc1.weight": [-0.020004712, -0.12627217, 0.11702703],
    "blocks.0.mlp.fc1.bias": [6.2291669e-08, -1.545347e-06, 2.1225676e-06],
    "blocks.0.mlp.fc2.weight": [0.17840162, -0.18715997, 0.10617243],
    "blocks.0.mlp.fc2.bias": [-1.0353073e-06, 1.7711372e-07, 5.767787e-08],
    "blocks.1.attn.qkv.weight": [-0.010489196, -0.16766834, -0.21027106],
    "blocks.1.mlp.fc2.weight": [-0.16587904, 0.1065198, 0.067785323],
}
EVERYTHING = [
    {"pool": "map", "layer_scale": 1e-5, "position": "learned_2d", "position_at": "every_layer"},
    {"position": "learned_2d"},
    {"position": "learned_1d", "position_at": "every_layer_shared"},
    {"position": "relative", "pool": "gap"},
    {"resnet_layers": (1, 2), "patch_size": 8},
]


def _state(
    *, seed: int, head: HeadKind = "mlp", depth: int = 2, image_size: int = 16, head_bias: float = 0.0
) -> dict[str, torch.Tensor]:
    config = ModelConfig(width=48, depth=depth, heads=4, patch_size=4)
    model = build_model(config, image_size=image_size, num_classes=5, head=head)
    initialise(model, seed=seed, head_bias=head_bias)
    return model.state_dict()


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(1)
    first = _state(seed=7)
    torch.manual_seed(2)
    second = _state(seed=7)
    other = _state(seed=8)
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name, value in first.items() if value.unique().numel() > 1]
    assert len(drawn) == 2 + 2 * 6 + 1
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_a_parameter_does_not_depend_on_what_else_there_is() -> None:
    mlp, linear, deeper = (
        _state(seed=7),
        _state(seed=7, head="linear"),
        _state(seed=7, depth=3, image_size=24),
    )
    assert all(torch.equal(mlp[name], linear[name]) for name in mlp if not name.startswith("head."))
    assert all(torch.equal(mlp[name], deeper[name]) for name in mlp if name != "pos_embed")


def test_no_two_parameters_share_their_numbers() -> None:
    state = _state(seed=7)
    assert not torch.equal(state["blocks.0.mlp.fc1.weight"], state["blocks.1.mlp.fc1.weight"])
    q, k, v = state["blocks.0.attn.qkv.weight"].chunk(3)
    assert not torch.equal(q, k) and not torch.equal(k, v)


@pytest.mark.parametrize(("head", "last"), [("mlp", "head.logits"), ("linear", "head")])
def test_the_last_layer_is_zero_with_the_bias_asked_for(head: HeadKind, last: str) -> None:
    state = _state(seed=7, head=head, head_bias=-10.0)
    assert not state[f"{last}.weight"].any()
    assert torch.equal(state[f"{last}.bias"], torch.full((5,), -10.0))
    assert not _state(seed=7, head=head)[f"{last}.bias"].any()


def test_half_precision_gets_the_rounded_float32_values() -> None:
    model = build_model(
        ModelConfig(width=48, depth=2, heads=4, patch_size=4), image_size=16, num_classes=5, head="mlp"
    ).to(torch.bfloat16)
    initialise(model, seed=7)
    full = _state(seed=7)
    assert all(torch.equal(value, full[name].to(torch.bfloat16)) for name, value in model.state_dict().items())


@pytest.mark.parametrize("style", get_args(InitStyle))
@pytest.mark.parametrize("name", ["surprise", "attn_pool.surprise", "blocks.0.attn.surprise"])
def test_an_unknown_parameter_is_an_error(style: InitStyle, name: str) -> None:
    config = ModelConfig(width=48, depth=1, heads=4, patch_size=4, pool="map")
    model = build_model(config, image_size=16, num_classes=5, head="mlp")
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner).register_parameter(last, nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=f"no initial value is defined for the parameter '{name}' of shape"):
        initialise(model, seed=0, style=style)


def test_a_seed_gives_the_weights_that_it_always_gave() -> None:
    config = ModelConfig(width=48, depth=2, heads=4, mlp_dim=80, patch_size=4)
    model = build_model(config, image_size=16, num_classes=5, head="mlp")
    initialise(model, seed=7)
    for name, numbers in FIRST_NUMBERS.items():
        torch.testing.assert_close(
            model.get_parameter(name).detach().flatten()[:3], torch.tensor(numbers), rtol=1e-5, atol=0
        )
    kernel = model.get_parameter("patch_embed.proj.weight")
    stream = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(b"7/patch_embed.proj.weight", digest_size=8).digest(), "big") >> 1
    )
    std = math.sqrt(1 / 48) / 0.87962566103423978
    share = torch.rand(48, 3, 4, 4, generator=stream)  # of the distribution, below each number
    expected = truncnorm(-2, 2, scale=std).ppf(share.double().numpy())
    torch.testing.assert_close(kernel.detach().double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("style", get_args(InitStyle))
@pytest.mark.parametrize("more", EVERYTHING, ids=str)
def test_every_parameter_of_every_model_is_overwritten(style: InitStyle, more: dict[str, object]) -> None:
    config = ModelConfig.model_validate({"width": 32, "depth": 2, "heads": 2, "patch_size": 4} | more)
    model = build_model(config, image_size=16, num_classes=5, head="mlp")
    _forget(model)
    initialise(model, seed=0, style=style, head_bias=-3.0)
    state = model.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values())
    assert torch.equal(state["head.logits.bias"], torch.full((5,), -3.0))
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(2, 3, 16, 16))).all()


@pytest.mark.parametrize("style", get_args(InitStyle))
def test_a_pure_resnet_and_a_mask_token_are_known(style: InitStyle) -> None:
    resnet = build_model(ModelConfig(resnet_layers=(1, 2)), image_size=16, num_classes=5, head="linear")
    masked = build_masked_patch(ModelConfig(width=32, depth=1, heads=2, patch_size=4), image_size=16)
    for model in (resnet, masked):
        _forget(model)
        initialise(model, seed=0, style=style)
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert masked.mask_token.std().item() == pytest.approx(0.02, rel=0.5)
    assert resnet.get_parameter("head.weight").any() == (style == "timm")


@pytest.mark.parametrize("style", get_args(InitStyle))
def test_layer_scale_starts_at_the_value_asked_for(style: InitStyle) -> None:
    config = ModelConfig(width=32, depth=2, heads=2, patch_size=4, layer_scale=0.03)
    model: Any = build_model(config, image_size=16, num_classes=5, head="linear")
    _forget(model)
    initialise(model, seed=0, style=style)
    for block in model.blocks:
        for scale in (block.ls1.gamma, block.ls2.gamma):
            assert torch.equal(scale, torch.full((32,), 0.03))


@pytest.mark.parametrize("style", get_args(InitStyle))
def test_a_hybrids_units_start_as_their_shortcuts_and_a_resnets_do_not(style: InitStyle) -> None:
    hybrid = build_model(
        ModelConfig(width=32, depth=1, heads=2, patch_size=8, resnet_layers=(1, 2)),
        image_size=16,
        num_classes=5,
        head="linear",
    )
    resnet = build_model(ModelConfig(resnet_layers=(1, 2)), image_size=16, num_classes=5, head="linear")
    for model, last_scale in ((hybrid, 0.0), (resnet, 1.0)):
        initialise(model, seed=0, style=style)
        scales = {
            name: value.unique().tolist()
            for name, value in model.named_parameters()
            if "stages" in name and "norm" in name and name.endswith("weight")
        }
        assert len(scales) == {0.0: 3 * 3 + 2, 1.0: 3 * 3}[last_scale]
        for name, values in scales.items():
            assert values == [last_scale if "norm3" in name else 1.0], name


def test_timms_style_draws_other_numbers_and_starts_no_layer_at_zero() -> None:
    """The head too is drawn; position embeddings have almost the same distribution, but streams of their own."""
    config = ModelConfig(width=48, depth=1, heads=4, patch_size=4)
    states = []
    for style in ("google", "timm"):
        model = build_model(config, image_size=16, num_classes=5, head="linear")
        initialise(model, seed=7, style=style)
        states.append(model.state_dict())
    google, timm = states
    assert timm["head.weight"].std().item() == pytest.approx(0.02, rel=0.2) and not google["head.weight"].any()
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "cls_token", "patch_embed.proj.bias"):
        assert not torch.equal(google[name], timm[name]), name


@pytest.mark.parametrize("more", [{}, {"position": "learned_2d"}, {"position_at": "every_layer"}])
def test_big_visions_learned_positions_have_the_deviation_of_unit_vectors(more: dict[str, str]) -> None:
    """models/vit.py: 1 / sqrt(D); all else is as in vision_transformer."""
    config = ModelConfig.model_validate({"width": 256, "depth": 2, "heads": 4, "patch_size": 4} | more)
    states = []
    for style in ("google", "big_vision"):
        model = build_model(config, image_size=64, num_classes=5, head="linear")
        initialise(model, seed=7, style=style)
        states.append(model.state_dict())
    google, big_vision = states
    positions = [name for name in google if name == "pos_embed" or name.startswith("position.")]
    assert len(positions) == {"position": 3, "position_at": 2}.get(next(iter(more), ""), 1)
    for name in google:
        if name in positions:
            assert big_vision[name].std().item() == pytest.approx(1 / 16, rel=0.15), name
            assert google[name].std().item() == pytest.approx(0.02, rel=0.15), name
        else:
            assert torch.equal(google[name], big_vision[name]), name


def _forget(model: nn.Module) -> None:
    """Values that would be noticed if they stayed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
