"""A flat gradient is judged as torch's clip_grad_norm_ would, and nothing of it comes to the host."""

import math
from collections.abc import Iterator

import pytest
import torch

from shardvit.launch.bench.operations import Operations
from shardvit.pipeline.engine.late_metrics import LateMetrics, StepOutcome
from shardvit.pipeline.optimizers.flat import GradientJudge
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place

ROW = 1 << 16


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[Ranks]:
    ranks = Ranks(Place(), timeout_seconds=60)
    yield ranks
    ranks.leave()


def outcome(judge: GradientJudge) -> StepOutcome:
    late = LateMetrics(device=torch.device("cpu"))
    late.put(1, judge.numbers)
    (found,) = late.drain()
    return found


@pytest.mark.parametrize("elements", [1, 17, ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_the_norm_and_the_divisor_are_torchs(elements: int, clip: float) -> None:
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    judge = GradientJudge(clip_grad_norm=clip)
    verdict = judge(gradient)
    parameter = torch.zeros(elements, requires_grad=True)
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], clip or math.inf)
    assert outcome(judge).grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert outcome(judge).applied and float(verdict.skip) == 0
    divided = gradient if verdict.divisor is None else gradient / verdict.divisor
    assert torch.allclose(divided, parameter.grad, rtol=1e-5)


def test_many_elements_do_not_hide_one_another() -> None:
    """A float32 sum of so many squares is wrong in the third digit."""
    judge = GradientJudge(clip_grad_norm=1.0)
    judge(torch.full((50_000_000,), 0.1))
    assert outcome(judge).grad_norm == pytest.approx(0.1 * 50_000_000**0.5, rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_is_skipped_and_counted(wrong: float) -> None:
    judge = GradientJudge(clip_grad_norm=1.0)
    for poisoned in (False, True, True, False):
        gradient = torch.ones(100)
        gradient[37] = wrong if poisoned else 1.0
        assert bool(judge(gradient).skip) == poisoned
        assert outcome(judge).applied != poisoned
        assert math.isfinite(outcome(judge).grad_norm) != poisoned
    assert [judge.take_skipped(), judge.take_skipped()] == [2, 0]


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_flags_travel_with_the_norm_and_nothing_waits_for_the_device(stop: bool, save: bool) -> None:
    judge, gradient = GradientJudge(clip_grad_norm=1.0), torch.ones(100)
    judge(gradient)
    judge.flags = (stop, save)
    with Operations() as counted:
        judge(gradient)
    assert not counted.waits and counted.total <= 20
    assert outcome(judge).flags == (stop, save)
