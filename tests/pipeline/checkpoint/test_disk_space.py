"""Room for checkpoints: on the disk, estimated before there is one; in memory, what control groups leave."""

from pathlib import Path

import psutil
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint import disk_space
from shardvit.pipeline.checkpoint.disk_space import check_free_space, estimate_bytes, free_bytes, spare_host_bytes
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("engine", "optimizer", "bytes_each"),
    [
        ({"precision": "bf16"}, "adamw", 14),
        ({"precision": "fp16", "zero_stage": 3}, "adamw", 14),
        ({"precision": "fp32"}, "adamw", 16),
        ({"precision": "bf16"}, "sgd", 10),
        ({"precision": "fp32", "zero_stage": 2}, "sgd", 12),
        ({"precision": "fp32", "zero_stage": 0}, "adamw", 12),
        ({"precision": "bf16", "zero_stage": 0}, "adamw", 12),
        ({"precision": "bf16", "backend": "accelerate"}, "sgd", 8),
    ],
)
def test_the_estimate_counts_weights_masters_and_optimizer(engine, optimizer, bytes_each):
    config = OptimizerConfig(name=optimizer, lr=0.1)
    assert estimate_bytes(1000, engine=EngineConfig(**engine), optimizer=config) == 1000 * bytes_each
    averaged = estimate_bytes(1000, engine=EngineConfig(**engine), optimizer=config, ema=EmaConfig())
    assert averaged == 1000 * (bytes_each + 4)


def test_the_free_space_of_a_folder_that_is_still_to_be_made_is_its_disks(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert free_bytes(tmp_path / "a" / "b") > 0 and free_bytes(Path("a/b")) > 0


def test_too_little_is_refused_and_enough_is_not(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk_space, "free_bytes", lambda root: 10**9)
    check_free_space(tmp_path, needed_bytes=10**9)
    with pytest.raises(UserError, match=r"needs about 4.25 GB in .*1 GB are free: make room") as caught:
        check_free_space(tmp_path, needed_bytes=4_250_000_000)
    assert str(tmp_path) in str(caught.value)


def group(folder: Path, *, limit: str, current: int, droppable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\nactive_file 0\n")


@pytest.fixture
def machine(monkeypatch):
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def spare(tmp_path: Path, name: str) -> int:
    (tmp_path / "own").write_text(f"12:cpu:/elsewhere\n0::{name}\n")
    return spare_host_bytes(cgroups=tmp_path / "cgroups", own=tmp_path / "own")


@pytest.mark.usefixtures("machine")
def test_without_limits_it_is_what_the_machine_has(tmp_path):
    reserve = round(0.05 * 64 * GIB)
    assert spare_host_bytes(cgroups=tmp_path, own=tmp_path / "none") == 40 * GIB - reserve
    group(tmp_path / "cgroups" / "job", limit="max", current=30 * GIB, droppable=0)
    assert spare(tmp_path, "/job") == spare(tmp_path, "/no/such/group") == 40 * GIB - reserve


@pytest.mark.usefixtures("machine")
def test_the_tightest_group_decides_and_pages_of_files_count_as_free(tmp_path):
    reserve = round(0.05 * 64 * GIB)
    group(tmp_path / "cgroups" / "job", limit=str(20 * GIB), current=12 * GIB, droppable=2 * GIB)
    group(tmp_path / "cgroups" / "job" / "step", limit=str(18 * GIB), current=6 * GIB, droppable=0)
    assert spare(tmp_path, "/job/step") == 10 * GIB - reserve
    group(tmp_path / "cgroups" / "job", limit=str(11 * GIB), current=10 * GIB, droppable=0)
    assert spare(tmp_path, "/job/step") == 0
