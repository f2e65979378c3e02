"""A run that is interrupted in every way, each time started again by the same command, ends as an undisturbed one.

Real processes: `shardvit run`, two ranks on gloo.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from data_shards.packing.pack import pack
from pipeline.runs.logs import read_metrics
from tests.faults.harness import INJECT
from tests.small_recipe import SMALL, small_recipe, small_stage, write_recipe

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400


def recipe(name: str, shards: Path, *, steps: int) -> dict:
    stage = small_stage(
        shards,
        global_batch_size=32,
        duration=f"{steps} steps",
        optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.05},
        schedule={"warmup": "10%"},
        dropout=0.1,
        stochastic_depth=0.1,
        patch_dropout=0.5,
        unmasked_finish="20%",
        log_every="7 steps",  # no multiple of save_every: a point of the curve spans a checkpoint
        eval_every="40%",
        save_every="20 steps",
    )
    engine = {"zero_stage": 2, "precision": "bf16", "max_micro_batch_size": 8}
    model = SMALL | {"width": 32, "depth": 2}
    return small_recipe(name, model=model, seed=7, processes=2, engine=engine, pretrain_=stage)


class Run:
    """`shardvit run` on one recipe, in a folder of its own."""

    def __init__(self, folder: Path, shards: Path, *, steps: int = STEPS) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        folder.mkdir()
        write_recipe(folder / "recipe.yaml", recipe("law", shards, steps=steps))

    @property
    def stage(self) -> Path:
        return self.folder / "runs" / "law" / "pretrain"

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        with self.output.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "launch.cli", "run", "recipe.yaml"],
                cwd=self.folder,
                env={
                    **os.environ,
                    **{"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
                    **(environment or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen) -> str:
        """Wait for the end; what was printed."""
        process.wait(timeout=240)
        return self.output.read_text()

    def wait_for_step(self, process: subprocess.Popen, step: int) -> None:
        deadline = time.monotonic() + 120
        while self.last_saved() < step:
            assert process.poll() is None, f"ended before step {step}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)

    def wait_for_text(self, process: subprocess.Popen, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def last_saved(self) -> int:
        steps = [int(path.name.removeprefix("step-")) for path in self.stage.glob("checkpoints/step-*")]
        return max(steps, default=0)

    def curve(self) -> list[tuple[int, dict[str, float]]]:
        kept = ("train/loss", "opt/grad_norm", "opt/lr", "val/loss", "val/top1")
        return [
            (row.step, {name: value for name, value in row.metrics.items() if name in kept})
            for row in read_metrics(self.stage / "metrics.jsonl")
        ]

    def record(self) -> dict:
        return json.loads((self.stage / "stage.json").read_text())


def tree_of(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [p for p in tree_of(process) if p.cmdline()[1:4] == ["-u", "-m", "launch.train"]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1", "2"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, shards) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", shards)
    process = run.start()
    output = run.finish(process)
    assert process.returncode == 0, output
    assert run.record()["state"] == "done"
    return run


def test_a_run_goes_on_after_a_power_failure_as_if_nothing_had_happened(
    tmp_path: Path, shards: Path, preloaded_environment: Mapping[str, str]
):
    """The short form of the next one; what nobody kills is forked."""
    undisturbed, run = (Run(tmp_path / name, shards, steps=50) for name in ("undisturbed", "run"))
    assert undisturbed.finish(process := undisturbed.start(preloaded_environment)) and process.returncode == 0
    fault = {"action": "kill_all", "point": "between_steps", "rank": 1, "step": 45, "once": str(tmp_path / "struck")}
    process = run.start({"PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}", "SHARDVIT_FAULT": json.dumps([fault])})
    output = run.finish(process)
    # A save waits for the one before it, so step 40's began after step 20's was complete; its own files are written
    # beside the steps, and the kill may come before they are all there.
    assert process.returncode == -signal.SIGKILL and run.last_saved() in (20, 40), output
    process = run.start(preloaded_environment)
    output = run.finish(process)
    assert process.returncode == 0 and "going on from" in output, output
    assert run.curve() == undisturbed.curve()
    assert run.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert run.record()["results"] == undisturbed.record()["results"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_interrupted_in_every_way_ends_as_the_undisturbed_one(tmp_path, shards, undisturbed):
    run = Run(tmp_path / "run", shards)

    # kill -9 of everything at once, as a power failure would
    process = run.start()
    run.wait_for_step(process, 40)
    for member in tree_of(process):
        member.kill()
    run.finish(process)
    first_stop = run.last_saved()
    assert 40 <= first_stop < STEPS

    # Ctrl-C: the ranks finish their step and save
    process = run.start()
    run.wait_for_step(process, first_stop + 40)
    process.send_signal(signal.SIGINT)
    output = run.finish(process)
    assert process.returncode == 75, output
    assert "going on from" in output
    assert "the same command goes on" in output
    assert run.record()["last_saved_step"] == run.last_saved()
    second_stop = run.last_saved()

    # kill -9 of `shardvit run` alone: the ranks notice, save and leave the run folder to the next attempt
    process = run.start()
    run.wait_for_step(process, second_stop + 20)
    process.kill()
    run.finish(process)

    # kill -9 of one rank
    process = run.start()
    run.wait_for_text(process, "going on from")
    run.wait_for_step(process, run.last_saved() + 20)
    ranks_of(process)[-1].kill()
    output = run.finish(process)
    assert process.returncode == 1, output
    assert "the same command goes on" in output
    assert run.record()["state"] == "running"

    process = run.start()
    output = run.finish(process)
    assert process.returncode == 0, output

    assert run.curve() == undisturbed.curve()
    assert [step for step, metrics in run.curve() if "train/loss" in metrics] == [*range(7, STEPS, 7), STEPS]
    assert run.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert run.record()["results"] == undisturbed.record()["results"]
