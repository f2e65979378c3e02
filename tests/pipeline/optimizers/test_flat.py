"""A flat tensor moves as its parameters do under torch's optimizers, with groups, clip_grad_norm_ and skipped steps."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardvit.launch.bench.operations import Operations
from shardvit.pipeline.optimizers.flat import FlatOptimizer, GradientVerdict
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from tests.rates import set_lr

STEPS, POISONED, CLIP, PADDING = 20, 7, 1.0, 5
KINDS = [
    {"name": "adamw", "lr": 0.03},
    {"name": "adamw", "lr": 0.03, "first_moment": "bf16", "betas": (0.9, 0.95)},
    {"name": "sgd", "lr": 0.03},
    {"name": "sgd", "lr": 0.03, "momentum": 0.0},
    {"name": "sgd", "lr": 0.03, "first_moment": "bf16"},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.3},
    {"weight_decay": 0.3, "head_weight_decay": 2.0, "head_lr_factor": 0.1},
    {"weight_decay": 0.3, "weight_decay_unit": "schedule", "head_lr_factor": 4.0},
    {"weight_decay": 0.3, "layer_decay": 0.6},
]


def judge(gradient: Tensor) -> GradientVerdict:
    """As the engine's of a single process."""
    norm = torch.linalg.vector_norm(gradient.double()).float()
    return GradientVerdict(skip=(~norm.isfinite()).float(), divisor=((norm + 1e-6) / CLIP).clamp(min=1.0))


class Model(nn.Sequential):
    """With a head, for `parameter_groups`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.add_module("trunk", nn.Linear(4, 6))
        self.add_module("norm", nn.LayerNorm(6))
        self.add_module("head", nn.Linear(6, 3))

    def group_matcher(self, *, coarse: bool) -> dict[str, Any]:
        return {"stem": r"^trunk", "blocks": [(r"^norm", (0,)), (r"^head", (99_999,))]}


def flattened(model: nn.Module, config: OptimizerConfig, **how: Any) -> tuple[FlatOptimizer, dict[str, Tensor]]:
    """A flat optimizer in its place, as DeepSpeed makes it, and each parameter's part of the flat tensor."""
    optimizer = FlatOptimizer(parameter_groups(model, config), config, **{"judge": judge, **how})
    (group,) = optimizer.param_groups
    names, parameters = group["param_names"], group["params"]
    flat = torch.cat([*(each.detach().flatten() for each in parameters), torch.zeros(PADDING)]).requires_grad_()
    group["params"] = [flat]
    ends = torch.tensor([0, *(each.numel() for each in parameters)]).cumsum(0).tolist()
    optimizer.place({name: (a, b - a) for (a, b), name in zip(pairwise(ends), names, strict=True)})
    return optimizer, {name: flat.detach()[a:b] for (a, b), name in zip(pairwise(ends), names, strict=True)}


def lr_at(step: int, config: OptimizerConfig) -> float:
    return config.lr * (1 - step / (2 * STEPS))


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 3.0 if step % 2 else 0.01  # some are clipped
    made = {name: scale * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    if step == POISONED:
        made["norm.bias"][2] = math.nan
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("poisoned_at", [0, POISONED])
def test_twenty_steps_with_one_nan_are_torchs(
    kind: dict[str, Any], settings: dict[str, Any], poisoned_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardvit.pipeline.optimizers.pieces.CHUNK_ELEMENTS", 7)
    monkeypatch.setitem(globals(), "POISONED", poisoned_at)
    config, oracle = OptimizerConfig(**kind, **settings), Model()
    theirs = build_optimizer(oracle, config)
    ours, parts = flattened(Model(), config)
    (flat,) = ours.param_groups[0]["params"]
    for step in range(STEPS):
        made = gradients(oracle, step)
        for name, parameter in oracle.named_parameters():
            parameter.grad = made[name].clone()
        flat.grad = torch.cat([*(made[name].flatten() for name in parts), torch.zeros(PADDING)])
        before = flat.detach().clone(), {key: value.clone() for key, value in ours.state[flat].items()}
        set_lr(ours.param_groups, lr_at(step, config))
        ours.step()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), CLIP)
        if norm.isfinite():
            set_lr(theirs.param_groups, lr_at(step, config))
            theirs.step()
        else:
            assert step == poisoned_at and torch.equal(flat.detach(), before[0])
            for key, value in ours.state[flat].items():
                assert torch.equal(value, before[1].get(key, torch.zeros_like(value)))
    for name, parameter in oracle.named_parameters():
        assert torch.allclose(parts[name], parameter.detach().flatten(), rtol=2e-6, atol=1e-7), name
    assert torch.equal(flat.detach()[-PADDING:], torch.zeros(PADDING))
    state, expected = ours.state[flat], theirs.state[oracle.get_parameter("head.weight")]
    kept = {key: value.dtype for key, value in expected.items() if isinstance(value, Tensor)}
    assert {key: value.dtype for key, value in state.items()} == kept
    assert float(state.get("step", STEPS - 1)) == STEPS - 1


def test_a_state_put_in_place_is_gone_on_from() -> None:
    """As a checkpoint's is: `masters.put_state` gives the flat tensor new moments."""
    for kind in KINDS:
        config = OptimizerConfig(**kind, weight_decay=0.3)
        first, _ = flattened(Model(), config)
        second, _ = flattened(Model(), config)
        (one,), (other,) = first.param_groups[0]["params"], second.param_groups[0]["params"]
        for step in range(6):
            made = gradients(Model(), step)
            for optimizer, flat in ((first, one), (second, other)):
                flat.grad = torch.cat([*(each.flatten() for each in made.values()), torch.zeros(PADDING)])
                set_lr(optimizer.param_groups, 0.1)
                optimizer.step()
            second.state[other] = {key: value.clone() for key, value in first.state[one].items()}
        assert torch.equal(one.detach(), other.detach())


def test_a_step_of_two_segments_is_a_handful_of_operations_and_waits_for_nothing() -> None:
    config = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.1)
    verdict = GradientVerdict(skip=torch.tensor(0.0), divisor=torch.tensor(1.0))
    ours, _ = flattened(Model(), config, judge=lambda gradient: verdict)
    (flat,) = ours.param_groups[0]["params"]
    flat.grad = torch.ones_like(flat)
    ours.step()
    with Operations() as counted:
        ours.step()
    assert counted.total == 2 * 3 and not counted.waits  # count, move, take the count back if skipped
