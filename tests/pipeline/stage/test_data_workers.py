"""`data.workers: auto`: nothing on a CPU; on a GPU from what decoding takes, told in a line."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.loader import TrainBatches
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.stage import data_workers as module
from shardvit.pipeline.stage.data_workers import DataWorkers, choose, cores_of, data_workers, expect_data_workers
from tests.data_shards.streams import pack_noise, seen, train_batches
from tests.pipeline.budget.planning import recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> TrainBatches:
    return train_batches(pack_noise(tmp_path_factory.mktemp("noise"), count=61, samples_per_shard=9))


class Alone:
    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def decided(made: Recipe, *, batches: Any, device: str, told: list[str]) -> DataWorkers:
    return data_workers(
        made,
        stage="pretrain",
        batches=batches,
        step=3,
        device=torch.device(device),
        ranks=Alone(),  # pyright: ignore[reportArgumentType]
        say=told.append,
    )


def test_on_a_cpu_auto_is_none_and_looks_at_nothing():
    told: list[str] = []
    assert decided(recipe("B/16"), batches=None, device="cpu", told=told) == DataWorkers(0, "thread")
    assert not told


@pytest.mark.parametrize(("workers", "starts"), [("auto", 0), (0, 0), (4, 0), (5, 1)])
def test_the_server_of_worker_processes_starts_early_where_there_will_be_some(
    workers: int | str, starts: int, monkeypatch: pytest.MonkeyPatch
):
    started: list[bool] = []
    monkeypatch.setattr(module, "start_fork_server", lambda: started.append(True))
    expect_data_workers(recipe("B/16", data={"workers": workers}))
    assert len(started) == starts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_recipe_says_is_done(device: str):
    told: list[str] = []
    for count, kind in ((0, "thread"), (4, "thread"), (7, "process")):
        made = recipe("B/16", data={"workers": count})
        assert decided(made, batches=None, device=device, told=told) == DataWorkers(count, kind)
    assert not told


def test_on_a_gpu_the_first_images_are_decoded(batches: TrainBatches, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(module, "cores_of", lambda ranks: 16.0)
    threads = torch.get_num_threads()
    found = decided(recipe("B/16"), batches=batches, device="cuda", told=told)
    assert 1 <= found.count <= 15 and torch.get_num_threads() == threads
    (line,) = told
    assert line.startswith(f"pretrain: data.workers auto: {found.count}") and "H100" in line and "16 cores" in line


@pytest.mark.parametrize(
    ("decode_ms", "gpu", "cores", "count"),
    [
        (0.01, "NVIDIA H100 80GB HBM3", 16, 1),
        (1000.0, "NVIDIA H100 80GB HBM3", 16, 15),
        (1.0, "NVIDIA Unheard 9", 16, 15),  # not in the table: all cores but one
        (None, "NVIDIA H100 80GB HBM3", 4, 3),
        (1.0, "NVIDIA H100 80GB HBM3", 1, 1),
    ],
)
def test_the_choice(decode_ms: float | None, gpu: str, cores: float, count: int):
    found, why = choose(
        recipe("L/16"),
        stage="pretrain",
        num_classes=1000,
        decode_seconds=None if decode_ms is None else decode_ms / 1000,
        gpu_name=gpu,
        cores=cores,
    )
    assert found == count and why.startswith(str(count))


def test_to_measure_changes_nothing_and_takes_the_streams_own_images(batches: TrainBatches):
    before = seen(batches[3])
    seconds = batches.decode_seconds(3)
    assert seconds is not None and 0 < seconds < 10
    assert seen(batches[3]) == before


def test_what_cannot_be_read_is_left_to_the_stream(tmp_path: Path):
    shards = pack_noise(tmp_path, count=20, samples_per_shard=5)
    for path in (tmp_path / "out" / "train").glob("*.tar"):
        os.truncate(path, 600)
    stream = train_batches(shards)
    assert stream.decode_seconds(0) is None
    with pytest.raises(UserError):
        stream[0]


def test_this_processs_cores_are_at_least_part_of_one():
    assert 0 < cores_of(Alone()) <= len(os.sched_getaffinity(0))  # pyright: ignore[reportArgumentType]
    many: Any = SimpleNamespace(gather_objects=lambda value: [value] * 4 + [("elsewhere", value[1])] * 4)
    assert cores_of(many) == pytest.approx(cores_of(Alone()) / 4)  # pyright: ignore[reportArgumentType]
