"""A flat tensor moves as its parameters do under torch's optimizers, with groups, clip_grad_norm_ and skipped steps."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardvit.launch.bench.operations import Operations
from shardvit.pipeline.optimizers.flat import FlatOptimizer, FlatPiece, GradientVerdict
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


def flattened(
    model: nn.Module, config: OptimizerConfig, *, cut: Sequence[str] = (), **how: Any
) -> tuple[FlatOptimizer, dict[str, Tensor]]:
    """A flat optimizer in its place, as DeepSpeed makes it, and each parameter's part of the flat tensors. Parameters
    in `cut` make a second bucket."""
    groups = parameter_groups(model, config)
    cuts = {name: int(name in cut) for name, _ in model.named_parameters()}
    buckets = [
        [(name, each) for group in groups for name, each in group["params"] if cuts[name] == number]
        for number in sorted(set(cuts.values()))
    ]
    optimizer, places, parts = FlatOptimizer(groups, config, **{"buckets": buckets, "judge": judge, **how}), {}, {}
    for number, (group, bucket) in enumerate(zip(optimizer.param_groups, buckets, strict=True)):
        flat = torch.cat([*(each.detach().flatten() for _, each in bucket), torch.zeros(PADDING)]).requires_grad_()
        group["params"] = [flat]
        ends = torch.tensor([0, *(each.numel() for _, each in bucket)]).cumsum(0).tolist()
        for (a, b), (name, _) in zip(pairwise(ends), bucket, strict=True):
            places[name], parts[name] = FlatPiece(number, a, b - a), flat.detach()[a:b]
    optimizer.place(places)
    return optimizer, parts


def concatenated(optimizer: FlatOptimizer, made: dict[str, Tensor], parts: dict[str, Tensor]) -> Tensor:
    """Gradients in the places of the parameters, and zeros in the padding."""
    flats = [torch.zeros_like(group["params"][0]) for group in optimizer.param_groups]
    for name, part in parts.items():
        number = next(
            n
            for n, group in enumerate(optimizer.param_groups)
            if group["params"][0].untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )
        first = part.storage_offset()
        flats[number].detach()[first : first + part.numel()] = made[name].flatten()
    return torch.cat([each.detach() for each in flats])


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
@pytest.mark.parametrize("cut", [(), ("norm.weight", "norm.bias", "head.weight")], ids=["one bucket", "two buckets"])
def test_twenty_steps_with_one_nan_are_torchs(
    kind: dict[str, Any],
    settings: dict[str, Any],
    poisoned_at: int,
    cut: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardvit.pipeline.optimizers.pieces.CHUNK_ELEMENTS", 7)
    monkeypatch.setitem(globals(), "POISONED", poisoned_at)
    config, oracle = OptimizerConfig(**kind, **settings), Model()
    theirs = build_optimizer(oracle, config)
    ours, parts = flattened(Model(), config, cut=cut)
    flats = [group["params"][0] for group in ours.param_groups]
    assert len(flats) == (2 if cut else 1)
    for step in range(STEPS):
        made = gradients(oracle, step)
        for name, parameter in oracle.named_parameters():
            parameter.grad = made[name].clone()
        before = [
            (flat.detach().clone(), {key: value.clone() for key, value in ours.state[flat].items()}) for flat in flats
        ]
        set_lr(ours.param_groups, lr_at(step, config))
        ours.step_by(concatenated(ours, made, parts))
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), CLIP)
        if norm.isfinite():
            set_lr(theirs.param_groups, lr_at(step, config))
            theirs.step()
        else:
            assert step == poisoned_at
            for flat, (weights, state) in zip(flats, before, strict=True):
                assert torch.equal(flat.detach(), weights)
                for key, value in ours.state[flat].items():
                    assert torch.equal(value, state.get(key, torch.zeros_like(value)))
    for name, parameter in oracle.named_parameters():
        assert torch.allclose(parts[name], parameter.detach().flatten(), rtol=2e-6, atol=1e-7), name
    expected = theirs.state[oracle.get_parameter("head.weight")]
    kept = {key: value.dtype for key, value in expected.items() if isinstance(value, Tensor)}
    for flat in flats:
        assert torch.equal(flat.detach()[-PADDING:], torch.zeros(PADDING))
        assert {key: value.dtype for key, value in ours.state[flat].items()} == kept
        assert float(ours.state[flat].get("step", STEPS - 1)) == STEPS - 1


def test_a_state_put_in_place_is_gone_on_from() -> None:
    """As a checkpoint's is: `masters.put_state` gives the flat tensor new moments."""
    for kind in KINDS:
        config = OptimizerConfig(**kind, weight_decay=0.3)
        first, parts = flattened(Model(), config)
        second, others = flattened(Model(), config)
        (one,), (other,) = first.param_groups[0]["params"], second.param_groups[0]["params"]
        for step in range(6):
            made = gradients(Model(), step)
            for optimizer, mine in ((first, parts), (second, others)):
                set_lr(optimizer.param_groups, 0.1)
                optimizer.step_by(concatenated(optimizer, made, mine))
            second.state[other] = {key: value.clone() for key, value in first.state[one].items()}
        assert torch.equal(one.detach(), other.detach())


@pytest.mark.parametrize("cut", [(), ("head.weight", "head.bias")], ids=["one bucket", "two buckets"])
def test_a_step_of_two_rules_is_a_handful_of_operations_and_waits_for_nothing(cut: tuple[str, ...]) -> None:
    config = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.1)
    verdict = GradientVerdict(skip=torch.tensor(0.0), divisor=torch.tensor(1.0))
    ours, parts = flattened(Model(), config, cut=cut, judge=lambda gradient: verdict)
    gradient = concatenated(ours, {name: torch.ones_like(part) for name, part in parts.items()}, parts)
    ours.step_by(gradient)
    with Operations() as counted:
        ours.step_by(gradient)
    assert counted.total == 2 * 3 and not counted.waits  # count, move, take the count back if skipped
