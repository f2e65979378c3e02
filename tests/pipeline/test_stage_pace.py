"""How a stage measures its ranks' pace: by the recipe's keys, and only what is a rank's own."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.training.assembly import make_phases


class Two:
    """Stands in for two ranks: the other one takes `ratio` times as long as this one."""

    place = Place(world_size=2)

    def __init__(self, ratio: float) -> None:
        self.ratio, self.mine = ratio, 0.0

    def gather_objects(self, value: object) -> list[object]:
        return [value, "far"]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self.mine = float(values[0])
        return torch.tensor([[1.0, 7, 14, 0], [self.ratio, 7, 14, 0]], dtype=torch.float64)


def phases_of(config: EngineConfig) -> Any:
    context: Any = SimpleNamespace(drawing_seconds=float, start=None)
    watch: Any = SimpleNamespace(progress=lambda step, *, status: None)
    return make_phases(context, config, watch=watch, device=torch.device("cpu"))


@pytest.mark.parametrize(("factor", "slow"), [(2.0, True), (4.0, False)])
def test_a_rank_is_slow_by_the_recipes_factor(factor: float, slow: bool) -> None:
    config, ranks = {"slow_rank_factor": factor, "slow_rank_seconds": 50}, Two(3.0)
    phases = phases_of(EngineConfig.model_validate(config))
    seen: Any = [phases.slowest(ranks) for _ in range(4)]  # pyright: ignore[reportArgumentType]
    assert [each.is_news for each in seen] == [False, False, False, slow]  # 14 s a window


@pytest.mark.parametrize(("zero_stage", "own"), [(1, True), (3, False)])
def test_the_forward_pass_is_a_ranks_own_unless_it_waits_for_the_others_weights(
    zero_stage: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("shardvit.pipeline.ranks.phases.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    ranks = Two(1.0)
    phases = phases_of(EngineConfig(zero_stage=zero_stage))  # pyright: ignore[reportArgumentType]
    for phase in ("step", "forward"):  # the first step does not count
        with phases(phase, step=0):
            pass
    phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.mine == float(own)
