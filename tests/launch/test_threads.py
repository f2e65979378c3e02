"""A run whose threads are more than its cores says so, and names what to set."""

import os
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.launch.local.env import omp_num_threads
from tests.conftest import RunCli


@pytest.mark.parametrize(
    ("value", "threads"), [("4", 4), ("4,2", 4), (" 3 ", 3), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_what_is_asked_of_each_process(value: str, threads: int | None) -> None:
    assert omp_num_threads({"OMP_NUM_THREADS": value}) == threads
    assert omp_num_threads({}) is None


def test_a_run_with_too_many_threads_says_what_to_set(tmp_path: Path, run_cli: RunCli) -> None:
    pack("digits", tmp_path / "shards", classes=("0", "1"), holdout=0.3, report=lambda line: None)
    changes = [f"stages.pretrain.{key}=shards/{split}" for key, split in (("train", "train"), ("eval", "val"))]
    changes += ["processes=1", "stages.pretrain.duration=2 steps", "model.depth=1"]
    cores = len(os.sched_getaffinity(0))
    ended = run_cli(
        *("train", "digits", *changes, "--stage", "pretrain"),
        cwd=tmp_path,
        env={
            "OMP_NUM_THREADS": str(cores + 1),
            "SHARDVIT_PICTURES": "off",
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        },
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("shardvit: OMP_NUM_THREADS")]
    assert len(said) == 1 and f"is {cores + 1}" in said[0] and f"OMP_NUM_THREADS={cores}" in said[0]
