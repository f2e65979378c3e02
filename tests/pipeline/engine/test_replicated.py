"""A step of whole parameters: as few operations for a deep model as for a shallow one, no read of the device."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.engine.replicated import ReplicatedState
from pipeline.engine.saved_state.portable import open_whole
from pipeline.engine.saved_state.state_files import write_file
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.stage import EmaConfig

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd"},
    "adamw bf16": {"name": "adamw", "first_moment": "bf16"},
    "sgd bf16": {"name": "sgd", "first_moment": "bf16"},
    "adafactor": {"name": "adafactor"},
    "lamb": {"name": "lamb"},
    "muon": {"name": "muon"},
}
VIEWS = ("view", "split", "detach", "select", "slice", "unsqueeze", "alias", "t", "transpose", "unbind", "as_strided")


class Seen(TorchDispatchMode):
    """The operations inside, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.removeprefix("_unsafe_") not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def model_of(depth: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())))


def whole_of(
    model: nn.Module, name: str = "adamw", *, dtype: torch.dtype = torch.float32, scaler: Any = None, **more: Any
) -> ReplicatedState:
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, **OPTIMIZERS[name])
    return ReplicatedState(model, computes_in=dtype, optimizer=config, scaler=scaler, **{"ema": None, **more})


def train(
    model: nn.Module, whole: ReplicatedState, *, steps: int = 1, scaler: Any = None, value: float = 1.0
) -> list[bool]:
    applied = []
    for step in range(steps):
        images = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) * value
        loss = model(images.to(next(model.parameters()).dtype)).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        applied.append(bool(whole.step(lr=0.01, flags=torch.zeros(2)).numbers[1]))
        whole.clear_gradients(keep_memory=False)
    return applied


def everything(whole: ReplicatedState) -> dict[str, Any]:
    return copy.deepcopy({"weights": whole.weights(), "state": whole.optimizer.state_dict()["state"]})


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_is_as_many_operations_for_a_deep_model_as_for_a_shallow_one_and_reads_nothing(name, dtype):
    counts = []
    for depth in (2, 12):
        model = model_of(depth)
        whole = whole_of(model, name, dtype=dtype, ema=EmaConfig(decay=0.9))
        train(model, whole)  # makes the moments
        model(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
        with Seen() as seen:
            whole.step(lr=0.01, flags=torch.zeros(2))
        assert "_local_scalar_dense" not in seen.names  # `item`, `float` and `bool` of a tensor
        counts.append(seen.names.total())
    assert counts[0] == counts[1] <= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_moves_nothing(name: str, first: bool, dtype: torch.dtype):
    model = model_of()
    whole = whole_of(model, name, dtype=dtype, ema=EmaConfig(decay=0.9))
    assert train(model, whole, steps=0 if first else 2) == [True] * (0 if first else 2)
    before = everything(whole)
    averages = copy.deepcopy(whole._average.state()) if whole._average else None
    assert train(model, whole, value=float("nan")) == [False]
    after = everything(whole)
    assert same(before["weights"], after["weights"]) and whole._average
    assert same(averages, whole._average.state())
    if not first:  # at first the moments are made, as zeros
        assert same(before["state"], after["state"])
    assert train(model, whole, steps=2) == [True, True]
    undisturbed_model = model_of()
    undisturbed = whole_of(undisturbed_model, name, dtype=dtype)
    if not first:
        train(undisturbed_model, undisturbed, steps=2)
    train(undisturbed_model, undisturbed, steps=2)
    assert same(undisturbed.weights(), whole.weights())


def test_fp16_finds_its_loss_scale_and_follows_float32():
    """On a GPU as here, but for the arithmetic of its halves."""
    model, exact_model = model_of(), model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    whole = whole_of(model, dtype=torch.float16, scaler=scaler)
    exact = whole_of(exact_model)
    at_start = whole.weights()
    applied = train(model, whole, steps=30, scaler=scaler)
    first = applied.index(True)
    assert 0 < first < 25 and all(applied[first:]) and scaler.get_scale() == 2.0 ** (30 - first)
    assert whole.loss_scale == scaler.get_scale() and exact.loss_scale is None
    for step in range(first, 30):
        loss = exact_model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        exact.step(lr=0.01, flags=torch.zeros(2))
        exact.clear_gradients(keep_memory=False)
    for name, tensor in exact.weights().items():
        assert whole.weights()[name].dtype == torch.float32
        assert (whole.weights()[name] - tensor).norm() < 0.1 * (tensor - at_start[name]).norm()


def test_a_loss_scale_is_saved_and_goes_on(tmp_path):
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=40)
    whole = whole_of(model, dtype=torch.float16, scaler=scaler)
    train(model, whole, steps=20, scaler=scaler)
    for file in whole.files("whole.pt"):
        write_file(tmp_path, file)
    other_model = model_of()
    other_scaler = torch.amp.GradScaler("cpu", growth_interval=40)
    other = whole_of(other_model, dtype=torch.float16, scaler=other_scaler)
    other.put(open_whole(tmp_path / "whole.pt", model=other_model))
    assert same(everything(whole), everything(other))
    for _ in range(2):
        train(model, whole, steps=25, scaler=scaler)
        train(other_model, other, steps=25, scaler=other_scaler)
        assert scaler.state_dict() == other_scaler.state_dict() and same(everything(whole), everything(other))
