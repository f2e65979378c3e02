"""Rank 0 opens the shards for all; a host with disks of its own looks at these, and says what is wrong there."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.data_shards.errors import AgreedError
from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import StopFlag
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage import data_once as stage_data_once
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.data_once import open_data_once
from shardvit.pipeline.stage.stage_data import StageData, open_data
from tests.saving import ThreadRanks
from tests.small_recipe import small_recipe, small_stage

HOSTS, PER_HOST = 2, 2
of_thread = threading.local()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1"), holdout=0.2, samples_per_shard=100, report=lambda line: None)
    return out


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which ranks have opened the sets by themselves; the machine is the thread's."""
    ranks: list[int] = []

    def noted(*args: Any, **options: Any) -> StageData:
        ranks.append(of_thread.rank)
        return open_data(*args, **options)

    monkeypatch.setattr(stage_data_once, "open_data", noted)
    monkeypatch.setattr(stage_data_once, "this_machine", lambda: f"machine {of_thread.rank // PER_HOST}")
    monkeypatch.setattr(stage_data_once.platform, "node", lambda: f"node{of_thread.rank // PER_HOST}")
    return ranks


def recipe_of(train: str, held_out: str, *, share: float = 0.0) -> Recipe:
    keys = {"train": train, "eval": held_out, "eval_overlap": "allow", "global_batch_size": 8, "duration": "4 steps"}
    return Recipe.model_validate(small_recipe(data={"max_corrupt_share": share}, pretrain_=small_stage(**keys)))


def on_all_ranks(recipes: list[Recipe], folder: Path) -> list[Any]:
    """What each rank gets: data, or the error that it raises."""
    count = HOSTS * PER_HOST
    barrier, board, found = threading.Barrier(count), [None] * count, [None] * count

    def work(rank: int) -> None:
        of_thread.rank = rank
        ranks: Any = ThreadRanks(Place(rank, count, rank % PER_HOST, PER_HOST), barrier=barrier, board=board)
        run = RunFolder(runs_root=folder / "runs", name="r")
        recipe = recipes[rank // PER_HOST]
        context = StageContext(recipe, run, ranks, StopFlag(), {})
        try:
            found[rank] = open_data_once(context, stage="pretrain")
        except AgreedError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def on_two_disks(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """The same path on every host, and other files behind it on the second: `stat` and `open` are led there."""

    def make() -> Path:
        first, second = tmp_path / "disk", tmp_path / "disk of node1"
        for copy in (first, second):
            shutil.copytree(shards, copy)
        real = os.stat

        def stat(path: Any, **options: Any) -> os.stat_result:
            return real(lead(path), **options)

        def lead(path: Any) -> Any:
            if getattr(of_thread, "rank", 0) < PER_HOST or not isinstance(path, str | os.PathLike):
                return path
            text = os.fspath(path)
            return text.replace(f"{first}/", f"{second}/") if isinstance(text, str) else path

        monkeypatch.setattr(os, "stat", stat)
        real_bytes = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda self: real_bytes(Path(lead(self))))
        return first

    return make


def test_a_shared_folder_is_looked_at_by_rank_0_alone(shards: Path, tmp_path: Path, opened: list[int]):
    recipe = recipe_of(str(shards / "train"), str(shards / "val"))
    expected = open_data(recipe, stage="pretrain")
    found = on_all_ranks([recipe] * HOSTS, tmp_path)
    assert opened == [0]
    for data in found:
        for name in ("train", "train_sizes", "weights", "eval"):
            assert getattr(data, name) == getattr(expected, name), name
        assert data.store.cache == expected.store.cache


def test_a_mistake_is_everybodys_and_one_says_it(shards: Path, tmp_path: Path, opened: list[int]):
    found = on_all_ranks([recipe_of(str(tmp_path / "nowhere"), str(shards / "val"))] * HOSTS, tmp_path)
    assert opened == [0] and all(type(error) is AgreedError for error in found)
    assert {str(error) for error in found} == {str(found[0])} and "nowhere" in str(found[0])


def test_another_hosts_disk_is_looked_at_by_its_first_rank(
    on_two_disks: Callable[[], Path], tmp_path: Path, opened: list[int]
):
    folder = on_two_disks()
    found = on_all_ranks([recipe_of(str(folder / "train"), str(folder / "val"))] * HOSTS, tmp_path)
    assert sorted(opened) == [0, 2]
    assert all(isinstance(data, StageData) and not data.train.damage for data in found)


def test_a_shard_that_is_missing_on_one_hosts_disk_ends_all_ranks_with_its_name(
    on_two_disks: Callable[[], Path], tmp_path: Path, opened: list[int]
):
    folder = on_two_disks()
    gone = sorted((tmp_path / "disk of node1" / "train").glob("*.tar"))[1]
    gone.unlink()
    found = on_all_ranks([recipe_of(str(folder / "train"), str(folder / "val"))] * HOSTS, tmp_path)
    assert {str(error) for error in found} == {str(found[0])}
    assert "on host node1: " in str(found[0]) and f"{gone.name}: the manifest names this shard" in str(found[0])


def test_damage_that_is_tolerated_is_that_of_the_ranks_own_disk(
    on_two_disks: Callable[[], Path], tmp_path: Path, opened: list[int]
):
    folder = on_two_disks()
    sorted((tmp_path / "disk of node1" / "train").glob("*.tar"))[1].unlink()
    found = on_all_ranks([recipe_of(str(folder / "train"), str(folder / "val"), share=0.9)] * HOSTS, tmp_path)
    assert [data.train.damaged_numbers for data in found] == [[], [], [1], [1]]
    assert [len(data.train.damage) for data in found] == [0, 0, 1, 1]
    assert [data.train.lost_samples > 0 for data in found] == [False, False, True, True]


def test_other_shards_under_the_same_name_are_refused(
    on_two_disks: Callable[[], Path], tmp_path: Path, opened: list[int]
):
    folder = on_two_disks()
    other = tmp_path / "disk of node1"
    shutil.rmtree(other / "train")
    shutil.copytree(other / "val", other / "train")
    found = on_all_ranks([recipe_of(str(folder / "train"), str(folder / "val"))] * HOSTS, tmp_path)
    assert all("on host node1: " in str(error) and "rank 0" in str(error) for error in found)


def test_tars_without_a_manifest_come_from_rank_0_where_they_and_their_indexes_are_the_same_files(
    shards: Path, tmp_path: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(shards, tmp_path / "plain"))
    for path in [*folder.rglob("*.json"), *folder.rglob("*.npz"), *folder.rglob("*.idx")]:
        path.unlink()
    recipe = recipe_of(str(folder / "train"), str(folder / "val"))
    found = on_all_ranks([recipe] * HOSTS, tmp_path)
    assert opened == [0] and all(data.train == found[0].train for data in found)
    with monkeypatch.context() as patched:
        seen = stage_data_once._identity
        patched.setattr(stage_data_once, "_identity", lambda path: None if of_thread.rank >= PER_HOST else seen(path))
        opened.clear()
        found = on_all_ranks([recipe] * HOSTS, tmp_path)
    assert sorted(opened) == [0, 2, 3] and all(data.train == found[0].train for data in found)


def test_a_process_alone_opens_as_ever(shards: Path, tmp_path: Path, opened: list[int]):
    of_thread.rank = 0
    ranks: Any = SimpleNamespace(place=Place())
    recipe = recipe_of(str(shards / "train"), str(shards / "val"))
    run = RunFolder(runs_root=tmp_path / "runs", name="r")
    context = StageContext(recipe, run, ranks, StopFlag(), {})
    assert open_data_once(context, stage="pretrain").train == open_data(recipe, stage="pretrain").train
