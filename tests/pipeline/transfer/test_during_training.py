"""Few-shot during training: the command's numbers on any number of ranks, no trace in the model, no end of a run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.pipeline.recipe.data import FewShotConfig
from shardvit.pipeline.stage.data_workers import DataWorkers
from shardvit.pipeline.transfer.during_training import FewShotContext, FewShotMeasures
from shardvit.pipeline.transfer.measure import measure
from shardvit.pipeline.transfer.settings import FewShotSettings, TransferSet
from tests.pipeline.transfer.small_model import SIZE, damage, digits, open_small, pack_digits, save_small, store_for
from tests.saving import ThreadRanks, on_ranks

BATCH = 16
NAMES = ["val/fewshot_four_3shot", "val/fewshot_four_10shot"]


@dataclass
class EvaluatingEngine:
    """What few-shot needs of an engine."""

    module: nn.Module
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable
    input_dtype: torch.dtype = torch.float32
    passes: int = 0
    modes: set[bool] = field(default_factory=set)

    @torch.no_grad()
    def predict(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.modes.add(self.module.training)
        return self.module(images)

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class Due:
    """Of a plan."""

    micro_batch_size: int = BATCH
    every: int = 1

    def few_shot_after(self, step: int, *, number: int) -> bool:
        return step % self.every == 0


class CountingRanks(ThreadRanks):
    """With `gather`, as the process group has it."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.as_tensor(each) for each in self.gather_objects(values.double())])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("during")
    pack_digits(root / "shards")
    save_small(root / "model", head="mlp")
    return root


def config(**more: Any) -> FewShotConfig:
    return FewShotConfig.model_validate(
        {"name": "four", "train": "t", "eval": "e", "shots": [3, 10], "seeds": 2} | more
    )


def sets(folder: Path) -> TransferSet:
    return TransferSet("four", digits(folder, "train"), digits(folder, "val"))


class Rank:
    """One rank's measures, of a model of its own with equal weights."""

    def __init__(self, work: Path, data: TransferSet, ranks: Any, *, every: int = 1, **more: Any) -> None:
        model = open_small(work / "model").logits
        assert isinstance(model, nn.Module)
        self.engine: Any = EvaluatingEngine(model.train())
        self.said: list[str] = []
        self.progress: list[int] = []
        ranks.__class__ = CountingRanks
        plan: Any = Due(every=every)

        def access(shards: ShardSet) -> Access:
            return Access(shards, on_corrupt="substitute")

        context = FewShotContext(
            engine=self.engine,
            ranks=ranks,
            plan=plan,
            workers=DataWorkers(0, "thread"),
            access=access,
            transform=EvalTransform(SIZE),
            normalisation=GOOGLES,
            progress=self.progress.append,
            say=self.said.append,
        )
        self.measures = FewShotMeasures((config(**more),), (data,), context)

    def __call__(self, step: int) -> dict[str, float]:
        return self.measures(step, of_average=False)


def everywhere(count: int, work: Path, data: TransferSet, do: Callable[[Rank], Any], **more: Any) -> list[Any]:
    found = on_ranks(count, lambda ranks: do(Rank(work, data, ranks, **more)))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_what_the_command_says_on_any_number_of_ranks(work: Path, tmp_path: Path, count: int) -> None:
    found = everywhere(count, work, sets(work / "shards"), lambda rank: rank(10))
    assert all(each == found[0] for each in found) and list(found[0]) == NAMES
    store = store_for(open_small(work / "model"), tmp_path)
    data = TransferSet("four", digits(work / "shards", "train"), digits(work / "shards", "val"))
    command = measure(store, data, FewShotSettings(shots=(3, 10), seeds=2), most_images=None)
    assert list(found[0].values()) == pytest.approx([each.value for each in command.scores], abs=0.02)
    assert list(found[0].values())[1] > 0.4


def test_a_repeat_reads_and_decodes_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def do(rank: Rank) -> tuple[int, dict[str, float], dict[str, float]]:
        first = rank(1)
        passes = rank.engine.passes
        with monkeypatch.context() as patch:
            patch.setattr(ShardReader, "read", None)
            patch.setattr(ShardReader, "labels", None)
            again = rank(2)
        assert rank.engine.passes == 2 * passes
        return passes, first, again

    ((passes, first, again),) = everywhere(1, work, sets(work / "shards"), do)
    assert first == again
    data = sets(work / "shards")
    assert passes == -(-data.eval.num_samples // BATCH) + -(-_shots(data) // BATCH)


def _shots(data: TransferSet) -> int:
    from shardvit.data_shards.reading.shard_reader import label_column
    from shardvit.pipeline.transfer.features import choose_shots

    labels = label_column(data.train)
    return len({int(each) for seed in range(2) for each in choose_shots(labels, shots=10, seed=seed)})


def test_what_memory_does_not_hold_is_decoded_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = ShardReader.read, list[int]()

    def counted(reader: ShardReader, shard: int, *, row: int) -> Any:
        reads.append(shard)
        return read(reader, shard, row=row)

    monkeypatch.setattr(ShardReader, "read", counted)

    def do(rank: Rank) -> list[int]:
        counts = []
        for step in range(3):
            reads.clear()
            rank(step)
            counts.append(len(reads))
        return counts

    limit = 2 * 2 * BATCH * SIZE * SIZE * 3  # two batches of each set
    (counts,) = everywhere(1, work, sets(work / "shards"), do, keep_decoded=f"{limit} B")
    assert counts[1] == counts[2] == counts[0] - 4 * BATCH


def test_nothing_of_it_is_left(work: Path) -> None:
    def do(rank: Rank) -> None:
        module = rank.engine.module
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        state = torch.get_rng_state()
        rank(1)
        assert module.training and rank.engine.modes == {False}
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
        assert not any(each._forward_pre_hooks for each in module.modules())
        assert rank.progress

    everywhere(1, work, sets(work / "shards"), do)


def test_damaged_images_are_left_out_and_told_once(work: Path, tmp_path: Path) -> None:
    data = sets(pack_digits(tmp_path / "shards"))
    drawn = measure(
        store_for(open_small(work / "model"), tmp_path / "features"),
        TransferSet("four", data.train, data.eval),
        FewShotSettings(shots=(3, 10), seeds=2),
        most_images=None,
    )
    damage(data.train, drawn.shots[1][0][2])
    damage(data.eval, 3)
    damage(data.eval, data.eval.num_samples - 1)

    def do(rank: Rank) -> tuple[dict[str, float], list[str]]:
        rank(1)
        return rank(2), rank.said

    for metrics, said in everywhere(2, work, data, do):
        assert list(metrics) == NAMES
        (line,) = [each for each in said if "cannot be read" in each]
        assert " 3 images" in line


def test_shards_that_are_gone_cost_a_line_and_all_ranks_make_equally_many_passes(work: Path, tmp_path: Path) -> None:
    data = sets(pack_digits(tmp_path / "shards"))
    last = Path(data.eval.shards[-1].url)
    last.rename(last.with_name("away"))

    def do(rank: Rank) -> tuple[dict[str, float], int, list[str], dict[str, float]]:
        metrics, passes = rank(1), rank.engine.passes
        rank.measures._context.ranks.barrier()
        if rank.measures._context.ranks.place.is_main:
            last.with_name("away").rename(last)
        rank.measures._context.ranks.barrier()
        return metrics, passes, rank.said, rank(2)

    found = everywhere(2, work, data, do)
    assert len({passes for _, passes, _, _ in found}) == 1
    for metrics, _, said, later in found:
        assert metrics == {} and any(last.name in line for line in said)
        assert list(later) == NAMES, "the shards are back"


def test_features_that_are_not_finite_cost_a_line(work: Path) -> None:
    def do(rank: Rank) -> tuple[dict[str, float], list[str]]:
        with torch.no_grad():
            rank.engine.module.get_parameter("norm.weight")[0] = torch.nan
        return rank(1), rank.said

    ((metrics, said),) = everywhere(1, work, sets(work / "shards"), do)
    assert metrics == {} and "not finite" in said[0]


def test_a_set_that_is_not_due_costs_nothing(work: Path) -> None:
    def do(rank: Rank) -> tuple[dict[str, float], int]:
        return rank(3), rank.engine.passes

    assert everywhere(1, work, sets(work / "shards"), do, every=2) == [({}, 0)]
