"""The numbers of a step arrive one step later, in order, each once, and as they were when they were sent."""

import math
from types import SimpleNamespace

import pytest
import torch

from shardvit.pipeline.engine.late_metrics import LateMetrics

CPU = torch.device("cpu")


def test_every_step_is_handed_out_once_and_the_last_one_only_when_all_are_asked_for():
    late, numbers, seen = LateMetrics(device=CPU), torch.zeros(4), []
    for step in range(1, 12):
        numbers[0] = step  # an engine may use its memory again
        late.put(step, numbers)
        taken = late.drain() if step % 5 == 0 else late.ready()
        seen.append([outcome.step for outcome in taken])
        assert all(outcome.grad_norm == outcome.step for outcome in taken)
        assert late.pending == (0 if step % 5 == 0 else 1)
    assert seen == [[], [1], [2], [3], [4, 5], [], [6], [7], [8], [9, 10], []]
    assert late.grad_norm == 10 and [outcome.step for outcome in late.drain()] == [11]
    assert late.drain() == []


def test_what_an_outcome_says():
    late = LateMetrics(device=CPU)
    late.put(1, torch.tensor([2.5, 1.0, 0.0, 1.0]))
    late.put(2, torch.tensor([math.inf, 0.0, 1.0, 0.0]))
    first, second = late.drain()
    assert (first.grad_norm, first.applied, first.flags) == (2.5, True, (False, True))
    assert (second.grad_norm, second.applied, second.flags) == (math.inf, False, (True, False))


def test_the_host_sleeps_while_it_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """An event that is not "blocking" is waited for by a core that does nothing else."""
    made: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how) or SimpleNamespace())
    LateMetrics(device=torch.device("cuda"))
    assert made and all(how.get("blocking") for how in made)
