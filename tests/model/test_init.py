"""`model.init`: reproducible from one seed and nothing else (flax is the oracle of its distributions)."""

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.head import HeadKind
from model.init import initialise
from model.vit import build_vit


def _state(
    *, seed: int, head: HeadKind = "mlp", depth: int = 2, image_size: int = 16, head_bias: float = 0.0
) -> dict[str, torch.Tensor]:
    config = ModelConfig(width=48, depth=depth, heads=4, patch_size=4)
    model = build_vit(config, image_size=image_size, num_classes=5, head=head)
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
    model = build_vit(
        ModelConfig(width=48, depth=2, heads=4, patch_size=4), image_size=16, num_classes=5, head="mlp"
    ).to(torch.bfloat16)
    initialise(model, seed=7)
    full = _state(seed=7)
    assert all(torch.equal(value, full[name].to(torch.bfloat16)) for name, value in model.state_dict().items())


def test_an_unknown_parameter_is_an_error() -> None:
    model = build_vit(ModelConfig(width=48, depth=1, heads=4, patch_size=4), image_size=16, num_classes=5, head="mlp")
    model.register_parameter("surprise", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="no initial value is defined for the parameter 'surprise'"):
        initialise(model, seed=0)
