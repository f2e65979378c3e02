"""Ranks forked from one process: they are placed, stopped and told apart as processes of their own are."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.launch.local.nursery import Nursery, open_nursery
from shardvit.launch.local.processes import RANK_COMMAND, rank_environment, run_ranks
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_USER_ERROR
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.conftest import ROOT
from tests.small_recipe import small_recipe, small_stage, write_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its packets are Linux's")


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with open_nursery() as opened:
        assert opened is not None
        yield opened


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    pack("digits", tmp_path / "shards", classes=("0", "1"), holdout=0.2, report=lambda text: None)
    stage = small_stage(tmp_path / "shards", duration="3 steps", log_every="1 step", eval_every="100%")
    write_recipe(
        tmp_path / "recipe.yaml", small_recipe("forked", processes=2, tracking={"mode": "offline"}, pretrain_=stage)
    )
    return tmp_path / "recipe.yaml"


def train(recipe: Path, nursery: Nursery | None, *overrides: str) -> int:
    """The exit code of two ranks that train the recipe."""
    name = "forked" if nursery else "plain"
    meeting = recipe.parent / f"meeting-{name}"
    meeting.mkdir()
    more = {"DS_ACCELERATOR": "cpu"}
    arguments = [str(recipe), f"name={name}", *overrides, "--stage", "pretrain", "--runs", str(recipe.parent / "runs")]
    environments = [rank_environment(rank, ranks=2, rendezvous=meeting) | more for rank in range(2)]
    return run_ranks([*RANK_COMMAND, *arguments], environments, nursery=nursery)[0]


@pytest.mark.slow
def test_two_forks_train_as_two_processes_do_to_the_last_bit(nursery: Nursery, recipe: Path) -> None:
    assert train(recipe, nursery) == train(recipe, None) == 0
    forked, plain = (
        (RunFolder(recipe.parent / "runs", name).model("pretrain") / "model.safetensors").read_bytes()
        for name in ("forked", "plain")
    )
    assert forked == plain
    assert nursery._process.wait(240) == -signal.SIGKILL  # with its ranks


def test_a_run_on_this_machine_starts_its_ranks_from_its_nursery(recipe: Path) -> None:
    class Asked(Exception):
        pass

    def start(arguments: list[str], environ: dict[str, str]) -> None:
        raise Asked(f"rank {environ['RANK']}: {arguments[0]}")

    nursery: Any = SimpleNamespace(start=start)
    run = PipelineRun.open(load_recipe(recipe), runs_root=recipe.parent / "runs", nursery=nursery)
    with pytest.raises(Asked, match=r"rank 0: .*recipe\.yaml"):
        run.execute()


def test_exit_codes_come_through_and_it_outlives_its_ranks(nursery: Nursery, recipe: Path) -> None:
    mistaken = [str(recipe), "no_such_key=1", "--stage", "pretrain"]
    ranks = [nursery.start(mistaken, {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [EXIT_USER_ERROR] * 2 and ranks[0].pid != ranks[1].pid
    ranks[0].terminate()  # nothing any more
    assert nursery._process.poll() is None


def test_it_ends_when_the_command_closes_its_end(nursery: Nursery) -> None:
    nursery._channel.close()
    assert nursery._process.wait(240) == 0


def test_a_rank_outlives_its_nursery_and_the_next_are_processes(nursery: Nursery, recipe: Path) -> None:
    waiting = rank_environment(0, ranks=2, rendezvous=recipe.parent)  # for the other rank, which never comes
    rank = nursery.start([str(recipe), "--stage", "pretrain", "--runs", str(recipe.parent)], waiting)
    nursery._process.kill()
    nursery._process.wait()
    while os.getsid(rank.pid) != rank.pid:
        time.sleep(0.02)
    assert rank.poll() is None
    rank.kill()
    assert rank.wait() == -signal.SIGKILL
    assert train(recipe, nursery, "no_such_key=1") == EXIT_USER_ERROR


UNASKED = """
import torch

def ask(*_, **__):
    raise AssertionError("no fork could use the GPU any more")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = ask
from shardvit.launch.local import nursery

nursery.num_gpus = lambda: 1
nursery._import_libraries()
import shardvit.launch.train
print("unasked")
"""


def test_no_import_before_a_fork_asks_for_gpus() -> None:
    done = subprocess.run([sys.executable, "-c", UNASKED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "unasked\n", done.stderr
