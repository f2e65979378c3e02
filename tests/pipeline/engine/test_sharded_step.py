"""Waiting for a unit's weights happens before each of its calls, outside of its graph; which messages are sent. Two
processes: `distributed`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardvit.pipeline.engine import sharded_step
from shardvit.pipeline.engine.sharded_step import ShardedStep, _before_calls


def test_a_compiled_modules_action_runs_before_each_call_and_does_not_break_its_graph() -> None:
    module, compiled = nn.Linear(3, 3), nn.Linear(3, 3)
    compiled.load_state_dict(module.state_dict())
    compiled.compile(backend="eager", fullgraph=True)
    for each in (module, compiled):
        calls: list[int] = []
        undo = _before_calls(each, lambda calls=calls: calls.append(len(calls)))
        x = torch.randn(2, 3)
        assert torch.equal(each(x), nn.functional.linear(x, module.weight, module.bias))
        each(x)
        assert calls == [0, 1]
        undo()
        each(x)
        assert calls == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_each_bucket_is_averaged_over_the_ranks_also_if_all_are_equal(
    ranks: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from rank 0. All ranks have the same gradients, so that their sum is `ranks` times one's."""
    sent: list[int] = []

    def reduce_scatter(mine: Tensor, flat: Tensor, *, async_op: bool) -> Any:
        sent.append(len(flat))
        mine.copy_(flat[: len(mine)] * ranks)
        return SimpleNamespace(wait=lambda: None)

    stand_in = {
        "get_world_size": lambda: ranks,
        "get_rank": lambda: 0,
        "reduce_scatter_tensor": reduce_scatter,
        "all_gather_into_tensor": lambda *arguments, **options: SimpleNamespace(wait=lambda: None),
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(sharded_step.distributed, name, value)
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(buckets)]
    whole = [each.detach().clone() for each in parameters]
    length = 8 // ranks
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=[each[:length].clone() for each in whole],
        bit16_groups=[[each] for each in parameters],
        bit16_groups_flat=whole,
        parallel_partitioned_bit16_groups=[[*each.split(length)] for each in whole],
    )
    found: list[Tensor] = []
    optimizer: Any = SimpleNamespace(step_by=lambda gradient: found.append(gradient.clone()))
    step = ShardedStep(zero, optimizer, units={}, during="backward", keeps="whole", accumulation_steps=1)
    expected = [torch.arange(8.0) + 10 * number for number in range(buckets)]
    step.begin(last=True)
    torch.stack([(each * factor).sum() for each, factor in zip(parameters, expected, strict=True)]).sum().backward()
    step.end()
    zero.step()
    assert len(sent) == (buckets if ranks > 1 else 0)
    assert torch.equal(found[0], torch.cat([each[:length] for each in expected]))
