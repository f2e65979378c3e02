"""A step of whole parameters: as few operations for a deep model as for a shallow one, no read of the device."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardvit.pipeline.engine.replicated import DdpEngine, InOrder, settle_buckets
from shardvit.pipeline.engine.saved_state.state_files import write_file
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig

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


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[Ranks]:
    ranks = Ranks(Place(), timeout_seconds=60)
    yield ranks
    ranks.leave()


@pytest.fixture
def make(alone: Ranks) -> Callable[..., DdpEngine]:
    def engine(
        model: nn.Module, name: str = "adamw", *, precision: str = "fp32", scaler: Any = None, ema: bool = False
    ) -> DdpEngine:
        stage: Any = SimpleNamespace(
            optimizer=OptimizerConfig(lr=0.01, weight_decay=0.1, **OPTIMIZERS[name]),
            ema=EmaConfig(decay=0.9) if ema else None,
        )
        plan: Any = SimpleNamespace(accumulation_steps=1)
        made = DdpEngine(model, config=EngineConfig(precision=precision), stage=stage, plan=plan, ranks=alone)
        made._scaler = scaler
        return made

    return engine


def train(engine: DdpEngine, *, steps: int = 1, value: float = 1.0) -> list[bool]:
    applied = []
    for step in range(steps):
        images = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) * value
        engine.backward(engine.forward(images.to(engine.input_dtype)).float().square().mean())
        applied.append(bool(engine.step(lr=0.01, flags=(False, False))[1]))
    return applied


def everything(engine: DdpEngine) -> dict[str, Any]:
    return copy.deepcopy({"weights": engine.weights(), "state": engine.optimizer.state_dict()["state"]})


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_as_many_operations_for_a_deep_model_as_for_a_shallow_one_and_reads_nothing(make, name, precision):
    counts = []
    for depth in (2, 12):
        engine = make(model_of(depth), name, precision=precision, ema=True)
        train(engine)  # makes the moments
        engine.backward(engine.forward(torch.randn(4, 8).to(engine.input_dtype)).float().square().mean())
        with Seen() as seen:
            engine.step(lr=0.01, flags=(False, False))
        assert "_local_scalar_dense" not in seen.names  # `item`, `float` and `bool` of a tensor
        counts.append(seen.names.total())
    assert counts[0] == counts[1] <= (110 if name in ("adafactor", "lamb", "muon") else 50)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_moves_nothing(make, name: str, steps_before: int, precision: str):
    engine = make(model_of(), name, precision=precision, ema=True)
    assert train(engine, steps=steps_before) == [True] * steps_before
    before, averages = everything(engine), copy.deepcopy(engine._average.state())
    assert train(engine, value=float("nan")) == [False]
    after = everything(engine)
    assert same(before["weights"], after["weights"]) and same(averages, engine._average.state())
    if steps_before:  # at first the moments are made, as zeros
        assert same(before["state"], after["state"])
    assert train(engine, steps=2) == [True, True]
    undisturbed = make(model_of(), name, precision=precision)
    train(undisturbed, steps=steps_before)
    train(undisturbed, steps=2)
    assert same(undisturbed.weights(), engine.weights())


def test_fp16_finds_its_loss_scale_and_follows_float32(make):
    """On a GPU as here, but for the arithmetic of its halves."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    engine, exact = make(model_of(), precision="fp16", scaler=scaler), make(model_of())
    at_start = engine.weights()
    applied = train(engine, steps=30)
    first = applied.index(True)
    assert 0 < first < 25 and all(applied[first:]) and scaler.get_scale() == 2.0 ** (30 - first)
    assert engine.measured() == {"opt/loss_scale": scaler.get_scale()} and exact.measured() == {}
    for step in range(first, 30):
        images = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        exact.backward(exact.forward(images).square().mean())
        exact.step(lr=0.01, flags=())
    for name, tensor in exact.weights().items():
        assert engine.weights()[name].dtype == torch.float32
        assert (engine.weights()[name] - tensor).norm() < 0.1 * (tensor - at_start[name]).norm()


def test_a_loss_scale_is_saved_and_goes_on(make, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=40)
    engine = make(model_of(), precision="fp16", scaler=scaler)
    train(engine, steps=20)
    for file in engine.snapshot():
        write_file(tmp_path, file)
    other_scaler = torch.amp.GradScaler("cpu", growth_interval=40)
    other = make(model_of(), precision="fp16", scaler=other_scaler)
    other.load(tmp_path, written={"zero_stage": 0, "processes": 1})
    assert same(everything(engine), everything(other))
    for _ in range(2):
        train(engine, steps=25)
        train(other, steps=25)
        assert scaler.state_dict() == other_scaler.state_dict() and same(everything(engine), everything(other))


def test_buckets_are_settled_where_ddp_moves_its_inputs_to_a_gpu(alone: Ranks):
    """As accelerate's on GPUs, which names the device: such a DDP takes what it is called with from a list."""
    ddp = DistributedDataParallel(InOrder(model_of()), gradient_as_bucket_view=True)
    ddp.device_ids = [0]
    settle_buckets(ddp)
    assert all(each.grad is not None and not each.grad.any() for each in ddp.parameters())
    assert ddp(torch.ones(4, 8)).shape == (4, 8)
