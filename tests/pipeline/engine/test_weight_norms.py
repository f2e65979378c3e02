"""Norms of weights and updates: few operations whatever the model's depth, no wait, and left out where they cannot be.

That they are right under every engine is seen in tests/distributed/test_engines.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.launch.bench.operations import Operations
from shardvit.pipeline.engine.weight_norms import WeightNorms

CPU = torch.device("cpu")
ONE: Any = SimpleNamespace(gather=lambda values: values[None])


def step(norms: WeightNorms, weights: list[torch.Tensor]) -> Operations:
    """Moves each weight by one; the operations that measuring takes."""
    with Operations() as operations, norms.around(device=CPU):
        pass
    with norms.around(device=CPU):
        for weight in weights:
            weight += 1.0
    return operations


@pytest.mark.parametrize("number", [1, 2, 300])
def test_a_measured_step_takes_as_many_operations_for_many_tensors_and_waits_for_nothing(number: int) -> None:
    weights = [torch.zeros(3, 2) for _ in range(number)]
    norms = WeightNorms(weights, kept="whole")
    operations = step(norms, weights)
    assert operations.total <= 16 and operations.num_waits == 0


def test_a_measure_is_taken_once() -> None:
    weights = [torch.full((4,), 2.0), torch.full((2, 2), 2.0)]
    norms = WeightNorms(weights, kept="whole")
    step(norms, weights)
    found = norms.take(ONE)
    assert found == pytest.approx({"opt/parameter_norm": (8 * 9.0) ** 0.5, "opt/update_ratio": 1 / 3})
    assert norms.take(ONE) == {}


def test_shards_add_up_and_a_process_without_any_counts_for_nothing() -> None:
    weights = [torch.full((3,), 2.0)]
    norms = WeightNorms(weights, kept="shard")
    step(norms, weights)
    nothing = WeightNorms([], kept="shard")
    step(nothing, [])
    both: Any = SimpleNamespace(gather=lambda values: torch.stack([values, values * 3, nothing_squares]))
    nothing_squares = nothing._squares
    assert nothing_squares is not None and nothing_squares.tolist() == [0.0, 0.0]
    assert norms.take(both) == pytest.approx({"opt/parameter_norm": (4 * 27.0) ** 0.5, "opt/update_ratio": 1 / 3})


def test_without_room_for_a_copy_only_the_change_is_left_out_and_no_room_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.full((3,), 2.0)]
    norms, asked = WeightNorms(weights, kept="whole"), []

    def full(*size: Any, **more: Any) -> torch.Tensor:
        asked.append(size)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    for _ in range(2):
        with norms.around(device=CPU):
            pass
        assert norms.take(ONE).keys() == {"opt/parameter_norm"}
    assert len(asked) == 1


def test_masters_on_the_host_of_a_gpu_are_not_copied() -> None:
    weights = [torch.full((3,), 2.0)]
    norms = WeightNorms(weights, kept="whole")
    with norms.around(device=torch.device("meta")):
        pass
    assert norms._squares is not None and norms._squares.device.type == "meta"
