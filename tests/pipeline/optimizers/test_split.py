"""Which process orthogonalises which matrix: each one does about as much, and keeps what it has whole."""

import math

import pytest
import torch

from shardvit.model.vit import build_model
from shardvit.pipeline.engine.buckets import cut_buckets, turns_of
from shardvit.pipeline.optimizers.muon import orthogonalised, orthogonalising_flops
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.optimizers.split import SplitTensors
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import Recipe

# Most work of a process over the mean, by processes: ViT-L/16's 96 matrices, in buckets of a block or in one.
BALANCE = {1: 1.0, 2: 1.01, 4: 1.02, 8: 1.05, 64: 1.4}


def vit_l() -> torch.nn.Module:
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"variant": "L/16"},
            "stages": {
                "pretrain": {
                    "train": "a",
                    "eval": "b",
                    "image_size": 224,
                    "global_batch_size": 8,
                    "duration": "1 epochs",
                    "optimizer": {"name": "muon", "lr": 0.1},
                }
            },
        }
    )
    with torch.device("meta"):
        return build_model(recipe.model, image_size=224, num_classes=1000, head="linear")


def split_of(model: torch.nn.Module, *, most_elements: float, processes: int) -> SplitTensors:
    """As ZeRO cuts it: equal pieces of each bucket."""
    groups = parameter_groups(model, OptimizerConfig(name="muon", lr=0.1))
    matrices = {name for group in groups if group["orthogonal"] for name, _ in group["params"]}
    shapes, shares = [], [dict[int, int]() for _ in range(processes)]
    for bucket in cut_buckets(groups, turns=turns_of(model), most_elements=most_elements):
        names = {name for name, _ in bucket}
        assert names <= matrices or not names & matrices
        if not names <= matrices:
            continue
        piece, begin = -(-sum(p.numel() for _, p in bucket) // processes), 0
        for _, parameter in bucket:
            for rank in range(begin // piece, min(processes, (begin + parameter.numel() - 1) // piece + 1)):
                count = min(begin + parameter.numel(), (rank + 1) * piece) - max(begin, rank * piece)
                shares[rank][len(shapes)] = count
            shapes.append(tuple(parameter.shape))
            begin += parameter.numel()
    return SplitTensors(tuple(shapes), tuple(shares), rank=0)


@pytest.mark.parametrize("most_elements", [25_000_000, math.inf])
@pytest.mark.parametrize("processes", BALANCE)
def test_work_is_shared_and_what_is_whole_stays(processes: int, most_elements: float) -> None:
    split = split_of(vit_l(), most_elements=most_elements, processes=processes)
    owners, work = split.owners(), [0.0] * processes
    assert len(owners) == 96 and set(owners) <= set(range(processes))
    for number, owner in enumerate(owners):
        holders = [rank for rank, share in enumerate(split.shares) if number in share]
        assert len(holders) > 1 or holders == [owner]
        assert sum(share.get(number, 0) for share in split.shares) == math.prod(split.shapes[number])
        work[owner] += orthogonalising_flops(split.shapes[number])
    imbalance = max(work) * processes / sum(work)
    assert imbalance <= BALANCE[processes] + 1e-9


def test_the_count_of_work_is_that_of_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((24, 56), (56, 24), (32, 32)):
        with FlopCounterMode(display=False) as counted:
            orthogonalised(torch.randn(3, *shape))
        assert counted.get_total_flops() == 3 * orthogonalising_flops(shape)
