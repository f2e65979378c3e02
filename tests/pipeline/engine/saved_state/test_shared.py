"""Many ranks open one state: each byte is read once, and every rank has what it would have read itself."""

import collections
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine import replicated
from shardvit.pipeline.engine.replicated import ReplicatedEngine
from shardvit.pipeline.engine.saved_state import portable
from shardvit.pipeline.engine.saved_state.portable import DDP_FILE, WEIGHT, open_deepspeed, open_shared, open_whole
from shardvit.pipeline.engine.saved_state.state_files import write_file
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from tests.pipeline.engine.saved_state.test_portable import MOMENTS, content_of, cut, model_of
from tests.saving import ThreadRanks, on_ranks, one_rank

RANKS = 4


class Whole(ReplicatedEngine):
    """Of one process."""

    file, backend = DDP_FILE, "deepspeed"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, collections.Counter[str]]:
    """Which thread opened which files, how often."""
    read, by_thread = portable.read_state, collections.defaultdict[str, collections.Counter[str]](collections.Counter)

    def counted(file: Path, **more: Any) -> Any:
        with lock:  # torch's list of what a file may hold is the process's
            by_thread[threading.current_thread().name][file.name] += 1
            return read(file, **more)

    lock = threading.Lock()
    monkeypatch.setattr(portable, "read_state", counted)
    monkeypatch.setattr(portable, "_PIECE_ELEMENTS", 3)
    tell = ThreadRanks.from_main

    def told(ranks: ThreadRanks, value: object) -> object:
        given = tell(ranks, value)
        return value if ranks.place.is_main else pickle.loads(pickle.dumps(given))

    monkeypatch.setattr(ThreadRanks, "from_main", told)
    return by_thread


def as_rank(ranks: Any) -> None:
    threading.current_thread().name = f"rank {ranks.place.rank}"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_opens_its_own_shard_alone_and_rank_0_what_all_need(
    tmp_path: Path, opened: dict[str, collections.Counter[str]], stage: int
):
    content = content_of(model_of())
    folder = cut(tmp_path, content, stage=stage, processes=RANKS)
    frozen = torch.arange(7.0)
    torch.save({"weights": {"1.bias": frozen}}, folder / "frozen.pt")
    alone = open_deepspeed(folder, zero_stage=stage, processes=RANKS, model=model_of())
    opened.clear()

    def load(ranks: Any) -> list[Tensor]:
        as_rank(ranks)
        saved = open_shared(
            folder.parent,
            written={"backend": "deepspeed", "zero_stage": stage, "processes": RANKS},
            model=model_of(),
            ranks=ranks,
            keeps="shard",
        )
        assert (saved.shapes, saved.moments, saved.optimizer_step) == (
            alone.shapes,
            alone.moments,
            alone.optimizer_step,
        )
        assert torch.equal(saved.whole("1.bias"), frozen)
        found, address = [], alone._addresses["0.weight"]
        size = content["0.weight"][WEIGHT].numel()
        first = max(0, ranks.place.rank * address.stride - address.lead)
        count = max(0, min(size, (ranks.place.rank + 1) * address.stride - address.lead) - first)
        for of in (WEIGHT, *MOMENTS) if count else ():
            part = saved.part("0.weight", of=of, first=first, count=count)
            assert torch.equal(part, content["0.weight"][of].flatten()[first : first + count])
            found.append(part)
        return found

    results = on_ranks(RANKS, load)
    assert not [each for each in results if isinstance(each, Exception)], results
    assert any(results)
    shard = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    for rank in range(1, RANKS):
        assert set(opened[f"rank {rank}"]) <= {shard.format(rank)}
    assert set(opened["rank 0"]) == {
        shard.format(0),
        "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt",
    }
    assert all(times == 1 for counter in opened.values() for times in counter.values())


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_state_of_one_file_is_read_by_rank_0_alone(
    tmp_path: Path, opened: dict[str, collections.Counter[str]], name: Any, monkeypatch: pytest.MonkeyPatch
):
    stage: Any = SimpleNamespace(optimizer=OptimizerConfig(name=name, lr=0.1, weight_decay=0.1), ema=None)
    plan: Any = SimpleNamespace(accumulation_steps=1)

    def engine(seed: int, ranks: Any) -> Whole:
        torch.manual_seed(seed)
        return Whole(
            model_of(),
            wrap=lambda plain: plain,
            computes_in=torch.bfloat16,
            scaler=None,
            stage=stage,
            plan=plan,
            ranks=ranks,
        )

    whole = engine(1, one_rank())
    whole.backward(whole.forward(torch.randn(4, 5, dtype=torch.bfloat16)).float().square().sum())
    monkeypatch.setattr(replicated, "reduce_flags", lambda flags, *, device: torch.zeros(len(flags)))
    whole.step(lr=0.1, flags=())
    for file in whole.snapshot():
        write_file(tmp_path, file)

    def load(ranks: Any) -> dict[str, Any]:
        as_rank(ranks)
        other = engine(2 + ranks.place.rank, ranks)
        other.load(tmp_path, written={"zero_stage": 0, "processes": 1})
        return {"weights": other.weights(), "optimizer": other.optimizer.state_dict()}

    for found in on_ranks(RANKS, load):
        assert not isinstance(found, Exception), found
        assert all(torch.equal(found["weights"][key], tensor) for key, tensor in whole.weights().items())
        states = whole.optimizer.state_dict()["state"]
        assert found["optimizer"]["state"].keys() == states.keys()
        for number, each in states.items():
            assert found["optimizer"]["state"][number].keys() == each.keys()
            for key, value in each.items():
                assert torch.equal(torch.as_tensor(found["optimizer"]["state"][number][key]), torch.as_tensor(value))
    assert set(opened) == {"rank 0"} and opened["rank 0"][DDP_FILE] == 1
    assert open_whole(tmp_path / DDP_FILE, model=model_of()).shapes["0.weight"] == (7, 5)


def test_what_is_of_another_model_is_told_by_all_ranks(tmp_path: Path):
    folder = cut(tmp_path, content_of(model_of()), stage=1, processes=2)

    def load(ranks: Any) -> None:
        open_shared(
            folder.parent,
            written={"backend": "deepspeed", "zero_stage": 1, "processes": 2},
            model=model_of(width=6),
            ranks=ranks,
            keeps="shard",
        )

    errors = on_ranks(3, load)
    assert len({str(error) for error in errors}) == 1 and all(isinstance(error, UserError) for error in errors)
    assert "0.weight" in str(errors[0])
