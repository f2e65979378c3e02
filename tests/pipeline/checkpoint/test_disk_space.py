"""Room for checkpoints: estimated before there is one, and refused in words."""

from pathlib import Path

import pytest

from data_shards.errors import UserError
from pipeline.checkpoint import disk_space
from pipeline.checkpoint.disk_space import check_free_space, estimate_bytes, free_bytes
from pipeline.recipe.schema import EngineConfig


@pytest.mark.parametrize(
    ("engine", "optimizer", "bytes_each"),
    [
        ({"precision": "bf16"}, "adamw", 14),
        ({"precision": "fp16", "zero_stage": 3}, "adamw", 14),
        ({"precision": "fp32"}, "adamw", 16),
        ({"precision": "bf16"}, "sgd", 10),
        ({"precision": "fp32", "zero_stage": 2}, "sgd", 12),
        ({"precision": "fp32", "zero_stage": 0}, "adamw", 12),
        ({"precision": "bf16", "backend": "accelerate"}, "sgd", 8),
    ],
)
def test_the_estimate_counts_weights_masters_and_optimizer(engine, optimizer, bytes_each):
    assert estimate_bytes(1000, engine=EngineConfig(**engine), optimizer=optimizer) == 1000 * bytes_each


def test_the_free_space_of_a_folder_that_is_still_to_be_made_is_its_disks(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert free_bytes(tmp_path / "a" / "b") > 0 and free_bytes(Path("a/b")) > 0


def test_too_little_is_refused_and_enough_is_not(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk_space, "free_bytes", lambda root: 10**9)
    check_free_space(tmp_path, needed_bytes=10**9)
    with pytest.raises(UserError, match=r"needs about 4.25 GB in .*1 GB are free: make room") as caught:
        check_free_space(tmp_path, needed_bytes=4_250_000_000)
    assert str(tmp_path) in str(caught.value)
