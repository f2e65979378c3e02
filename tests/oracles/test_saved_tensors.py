"""`model.counting.flops`'s activation bytes against what autograd saves, counted by torch's saved-tensor hooks.

They agree within half a percent: on a CPU a bf16 norm keeps its statistics in bf16, and in float32 on a GPU, as the
formula has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.build import build_model
from model.config import ModelConfig
from model.counting.flops import account

SMALL: dict[str, Any] = {"width": 192, "depth": 3, "heads": 3, "patch_size": 8}


def saved_by(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps during `run`: each piece of memory once, and none of the weights'."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    pieces: dict[int, tuple[int, Tensor]] = {}  # the tensors are held, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            pieces[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(num_bytes for num_bytes, _ in pieces.values())


def saved_bytes(model: nn.Module, *, image_size: int) -> int:
    """What is kept of one more image."""
    images = torch.randn(3, 3, image_size, image_size, dtype=torch.bfloat16)
    of_three, of_two = (saved_by(model, partial(model, images[:size].clone())) for size in (3, 2))
    return of_three - of_two


def live_bytes(model: nn.Module, *, image_size: int) -> int:
    """The most that one of the repeated blocks keeps of one more image beyond its own input."""
    inputs: dict[nn.Module, Tensor] = {}
    is_block = lambda module: type(module).__name__ in ("Block", "Bottleneck", "PreActBottleneck")  # noqa: E731
    for module in filter(is_block, model.modules()):
        module.register_forward_pre_hook(lambda module, arguments: inputs.update({module: arguments[0]}))
    with torch.no_grad():
        model(torch.randn(3, 3, image_size, image_size, dtype=torch.bfloat16))

    def beyond_input(block: nn.Module, size: int) -> int:
        x = inputs[block][:size].detach().clone().requires_grad_()
        # A ReLU in place must not change a leaf; the view is the same memory.
        return saved_by(block, lambda: block(x.view_as(x))) - x.untyped_storage().nbytes()

    assert inputs
    return max(beyond_input(block, 3) - beyond_input(block, 2) for block in inputs)


SAVED: list[dict[str, Any]] = [
    SMALL,
    SMALL | {"pool": "gap", "mlp_dim": 300},
    SMALL | {"pool": "map", "layer_scale": 0.1},
    SMALL | {"position": "learned_1d", "position_at": "every_layer"},
    SMALL | {"patch_size": 16, "resnet_layers": (2, 2, 2)},
    {"resnet_layers": (1, 2, 2)},
]


@pytest.mark.parametrize("config", SAVED)
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_activation_bytes(config: dict[str, Any], head: Any) -> None:
    parsed = ModelConfig(**config)
    arguments: dict[str, Any] = {"image_size": 64, "num_classes": 100, "head": head}
    model = build_model(parsed, **arguments).train().to(torch.bfloat16)
    expected = account(parsed, **arguments)
    assert saved_bytes(model, image_size=64) == pytest.approx(expected.activation_bytes, rel=0.005)


def test_relative_positions_keep_more_on_a_cpu_than_the_gpus_kernel() -> None:
    """Here their attention is made of single products in float32, so only the order of magnitude can be seen."""
    config = ModelConfig(**SMALL, position="relative")
    model = build_model(config, image_size=64, num_classes=100, head="linear").train().to(torch.bfloat16)
    expected = account(config, image_size=64, num_classes=100, head="linear").activation_bytes
    plain = account(ModelConfig(**SMALL), image_size=64, num_classes=100, head="linear").activation_bytes
    assert plain < expected < saved_bytes(model, image_size=64) < 1.5 * expected


@pytest.mark.parametrize("config", SAVED)
def test_activation_bytes_with_checkpointing(config: dict[str, Any]) -> None:
    parsed = ModelConfig(**config)
    arguments: dict[str, Any] = {"image_size": 64, "num_classes": 100, "head": "linear"}
    model = build_model(parsed, **arguments).train().to(torch.bfloat16)
    live = live_bytes(model, image_size=64)
    model.set_grad_checkpointing(True)
    expected = account(parsed, **arguments)
    assert expected.checkpointed_activation_bytes < expected.activation_bytes
    assert saved_bytes(model, image_size=64) + live == pytest.approx(expected.checkpointed_activation_bytes, rel=0.005)
