"""`model.layers.head`: the swap drops the whole head, and a new head says nothing yet."""

import pytest
import torch
from torch import nn

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.layers.head import MlpHead, replace_head
from shardvit.model.vit import build_model

SMALL = ModelConfig(width=48, depth=1, heads=4, patch_size=4)


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_replace_head_drops_every_layer_of_the_old_head(head: str) -> None:
    model = build_model(SMALL, image_size=16, num_classes=7, head=head)
    initialise(model, seed=0, head_bias=-10.0)
    trunk = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("head.")}

    replace_head(model, 3)

    assert type(model.head) is nn.Linear
    assert model.num_classes == 3
    after = model.state_dict()
    assert {name for name in after if name.startswith("head.")} == {"head.weight", "head.bias"}
    assert after["head.weight"].shape == (3, 48)
    assert not after["head.weight"].any() and not after["head.bias"].any()
    assert all(torch.equal(after[name], value) for name, value in trunk.items())
    assert model.head.weight.requires_grad and model.head.bias.requires_grad


def test_replaced_head_keeps_dtype_and_device() -> None:
    model = build_model(SMALL, image_size=16, num_classes=7, head="mlp").to(torch.bfloat16)
    replace_head(model, 3)
    assert model.head.weight.dtype == torch.bfloat16
    with torch.device("meta"):
        model = build_model(SMALL, image_size=16, num_classes=7, head="mlp")
    replace_head(model, 3)
    assert model.head.weight.device.type == "meta"


def test_replacing_a_head_leaves_the_global_random_stream_alone() -> None:
    model = build_model(SMALL, image_size=16, num_classes=7, head="mlp")
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    replace_head(model, 3)
    assert torch.equal(torch.randn(4), expected)


def test_a_replaced_head_learns_though_it_starts_at_zero() -> None:
    model = build_model(SMALL, image_size=16, num_classes=7, head="mlp")
    initialise(model, seed=0)
    replace_head(model, 3)
    model(torch.randn(4, 3, 16, 16))[:, 0].sum().backward()
    assert model.head.weight.grad is not None and model.head.weight.grad[0].abs().min() > 0


def test_mlp_head_is_linear_tanh_linear() -> None:
    head = MlpHead(6, 4)
    assert not head(torch.randn(3, 6)).any()  # a fresh last layer is zero
    torch.nn.init.normal_(head.logits.weight)
    torch.nn.init.normal_(head.logits.bias)
    pooled = torch.randn(3, 6)
    hidden = torch.tanh(pooled @ head.pre_logits.weight.T + head.pre_logits.bias)
    torch.testing.assert_close(head(pooled), hidden @ head.logits.weight.T + head.logits.bias)


def test_no_classes_is_refused() -> None:
    model = build_model(SMALL, image_size=16, num_classes=7, head="mlp")
    with pytest.raises(ValueError, match="num_classes must be at least 1, not 0"):
        replace_head(model, 0)
