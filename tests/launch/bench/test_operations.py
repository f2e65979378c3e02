"""The counter of operations: each kind of wait is seen, and what does not wait is not."""

import numpy as np
import pytest
import torch
from torch import nn

from shardvit.launch.bench.operations import Collective, Operations, count


def device(values: torch.Tensor) -> torch.Tensor:
    """As if on a GPU."""
    return values.to("meta")


ON_HOST = torch.arange(6.0)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda: ON_HOST.sum().item(), "a scalar is read"),
        (lambda: bool(ON_HOST[0] > 1), "a scalar is read"),
        (lambda: ON_HOST.nonzero(), "a shape depends on values"),
        (lambda: ON_HOST[ON_HOST > 2], "a shape depends on values"),
        (lambda: ON_HOST.to("meta"), "a blocking copy"),
        (lambda: torch.empty(6, device="meta").copy_(ON_HOST), "a blocking copy"),
        (lambda: torch.tensor([0.5]), "a tensor of Python's values"),
        (lambda: ON_HOST.to("meta", non_blocking=True), "a copy from pageable memory"),
        (lambda: torch.empty(6, device="meta").copy_(ON_HOST, non_blocking=True), "a copy from pageable memory"),
        (lambda: ON_HOST.pin_memory().to("meta", non_blocking=True), None),
        (lambda: torch.empty(4, device="meta").copy_(ON_HOST.pin_memory()[2:], non_blocking=True), None),
        (lambda: torch.from_numpy(np.zeros(6)), None),
        (lambda: ON_HOST[torch.zeros(2, dtype=torch.long)], None),
        (lambda: torch.where(ON_HOST > 2, ON_HOST, 0.0), None),
        (lambda: torch.full((), 0.5), None),
    ],
)
def test_waits_are_known_by_their_kind(action, reason):
    assert dict(count(action).waits) == ({reason: 1} if reason else {})


def test_a_synchronisation_is_counted_and_afterwards_all_is_as_before():
    before = torch.cpu.synchronize
    assert count(lambda: torch.cpu.synchronize()).waits == {"synchronize()": 1}
    assert torch.cpu.synchronize is before


def test_views_are_free_and_a_fused_step_is_two_operations_a_group():
    assert count(lambda: ON_HOST.view(2, 3).t().detach()).total == 0
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": 0.1 * n} for n in (1, 2)]
    optimizer = torch.optim.AdamW(groups, fused=True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()  # makes the moments
    counted = count(optimizer.step)
    assert counted.total == 4 and counted.num_waits == 0


def test_new_tensors_count_their_bytes_and_those_in_place_none():
    assert count(lambda: ON_HOST + 1).allocated_bytes == 24
    assert count(lambda: ON_HOST.add_(0).view(2, 3).mul_(1)).allocated_bytes == 0
    counted = Operations()
    for _ in range(2):
        with counted:
            torch.empty(10)
    assert counted.allocated_bytes == 80 and counted.names == {"aten::empty": 2}


def test_backward_is_seen_too():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    assert count(loss.backward).names["aten::mul"] == 1


def test_a_ring_sends_a_sum_twice_and_a_gathering_once():
    assert Collective("allreduce", 100).sent_bytes(4) == 150
    assert Collective("_allgather_base", 100).sent_bytes(4) == 75
    assert Collective("allreduce", 100).sent_bytes(1) == 0
