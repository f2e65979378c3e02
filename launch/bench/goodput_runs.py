"""Measure with small runs of real processes what a failure costs on this machine, from what the runs record.

`shardvit run --max-restarts` trains a small ViT on digits in two processes; after every few checkpoints one of them is
killed (SIGKILL). Then ViT-L and H are built as every start builds them, and 256 MB are written as a checkpoint is.
Started as a part of `goodput`. Two minutes on free cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from shardvit.data_shards.packing.pack import pack
from shardvit.launch.bench.goodput_spent import Attempt, attempts
from shardvit.launch.local.env import SUPERVISOR_PID
from shardvit.launch.local.processes import kill_all, marked_ranks
from shardvit.pipeline.recipe.vocabulary import EVENTS_FILE
from shardvit.pipeline.runs.logs import read_events
from shardvit.pipeline.runs.read import read_run, run_folder_at

_PATIENCE_SECONDS = 300.0  # for a checkpoint
_SAVE_STEPS = 20
_SAVES = 3  # of an attempt, before it is struck
_IMPORTS = ("starting Python", "importing libraries")
_WRITTEN_MB = 256
MODELS = {"L": "vit_l16_in21k", "H": "vit_h14_in21k"}
_BUILD = """
import json, sys, time
import torch
from shardvit.model.init import initialise
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.training.stages import build_stage_model
torch.set_num_threads(1)
recipe = load_recipe(sys.argv[1])
config = recipe.train_stage("pretrain")
start = time.process_time()
initialise(build_stage_model(recipe, config, num_classes=21843), seed=0, style=config.init_style)
print(json.dumps(time.process_time() - start))
"""
_WRITE = """
import json, os, sys, tempfile, time
from pathlib import Path
import torch
from shardvit.pipeline.engine.saved_state.state_files import digest_of, state_file, write_file
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
    content = torch.randint(256, (int(sys.argv[2]) * 10**6,), dtype=torch.uint8)
    begin, cpu = time.perf_counter(), time.process_time()
    write_file(Path(name), state_file("state.pt", {"state": content}))
    print(json.dumps([time.perf_counter() - begin, time.process_time() - cpu]))
"""


@dataclass(frozen=True)
class Range:
    """Of several measurements, as other programs may run on these cores: the least says what it takes."""

    least: float
    median: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Range:
        return cls(min(found), median(found))


@dataclass(frozen=True)
class FailureCosts:
    """Seconds."""

    failures: int
    noticing: Range  # from the kill of a process until another one has recorded it
    ending: Range  # from there until the next processes start, the pause included
    start: Range  # from a process's first instruction to its first step
    imports: Range  # of that, until its libraries are there
    start_cpu: Range  # CPU seconds of rank 0's start
    stall: Range  # of a tiny save: agreement and bookkeeping
    building: Mapping[str, float]  # CPU seconds of ViT-L and H, by key of MODELS
    writing: float  # a GB by one process, flushed and read back
    writing_cpu: float  # CPU seconds of that


def measure(*, failures: int) -> FailureCosts:
    """Run, kill, and read the records. RuntimeError if a run ends by itself."""
    with tempfile.TemporaryDirectory(prefix="shardvit-goodput-") as name:
        kills = _run_and_kill(Path(name), failures=failures)
        run = read_run(run_folder_at(Path(name) / "runs/goodput"))
        found = attempts(next(stage for stage in run.stages if stage.rows))
        writing, writing_cpu = _in_process(_WRITE, name, str(_WRITTEN_MB))
    again, ended = found[1:], [attempt.end for attempt in found[:-1]]  # the first reads the libraries from disk
    assert all(end and end.kind == "failed" for end in ended)
    noticed = [end.time for end in ended if end]
    return FailureCosts(
        failures=failures,
        noticing=Range.of([end - kill for end, kill in zip(noticed, kills, strict=True)]),
        ending=Range.of([attempt.begin - end for attempt, end in zip(again, noticed, strict=True)]),
        start=Range.of([attempt.first - attempt.begin for attempt in again]),
        imports=Range.of([sum(attempt.parts.get(part, 0.0) for part in _IMPORTS) for attempt in again]),
        start_cpu=Range.of([attempt.cpu_seconds for attempt in again]),
        stall=Range.of([each for attempt in found for each in _stalls(attempt)]),
        building={key: _in_process(_BUILD, recipe) for key, recipe in MODELS.items()},
        writing=writing * 1000 / _WRITTEN_MB,
        writing_cpu=writing_cpu * 1000 / _WRITTEN_MB,
    )


def _stalls(attempt: Attempt) -> list[float]:
    """Seconds of each save: a point of the curve precedes each."""
    at_saves = [attempt.stalled_seconds(row) for row in attempt.curve if row.step % _SAVE_STEPS == 0]
    return [after - before for before, after in pairwise(at_saves)]


def _run_and_kill(root: Path, *, failures: int) -> list[float]:
    """Train, and kill a process after a new checkpoint, so many times; returns when, in unix seconds."""
    pack("digits", root / "shards", holdout=0.2, report=lambda text: None)
    recipe = root / "recipe.yaml"
    recipe.write_text(json.dumps(_recipe(root / "shards")))  # JSON is YAML
    with (root / "output.txt").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "shardvit.launch.cli", "run", str(recipe), "--max-restarts", str(failures)],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    events, kills = root / "runs/goodput/pretrain" / EVENTS_FILE, list[float]()
    try:
        while len(kills) <= failures:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not _has_saved(events, attempt=len(kills)):
                if run.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((root / "output.txt").read_text())
                time.sleep(0.05)
            if len(kills) == failures:
                break
            ranks = marked_ranks(SUPERVISOR_PID, str(run.pid))
            victim = max(ranks, key=lambda rank: int(rank.environ()["RANK"]))
            kills.append(time.time())
            victim.kill()
        run.terminate()
        run.wait()
    finally:
        kill_all(SUPERVISOR_PID, str(run.pid))
        run.kill()
        run.wait()
    return kills


def _recipe(shards: Path) -> dict[str, Any]:
    """A ViT of one block that saves every few seconds."""
    stage = {
        **{"train": str(shards / "train"), "eval": str(shards / "val"), "image_size": 8, "global_batch_size": 32},
        **{"duration": "100000 steps", "optimizer": {"name": "adamw", "lr": 1e-4}, "schedule": {"warmup": "10%"}},
        **{"log_every": "5 steps", "eval_every": "20%", "save_every": f"{_SAVE_STEPS} steps"},
    }
    return {
        **{"name": "goodput", "processes": 2, "tracking": {"to": []}},
        "model": {"width": 32, "depth": 1, "heads": 2, "patch_size": 4},
        "stages": {"pretrain": stage},
    }


def _has_saved(events: Path, *, attempt: int) -> bool:
    """Whether an attempt, from 0, has saved several times."""
    kinds = [event.kind for event in read_events(events)]
    starts = [number for number, kind in enumerate(kinds) if kind == "start"]
    return len(starts) > attempt and kinds[starts[attempt] :].count("checkpoint") >= _SAVES


def _in_process(code: str, *arguments: str) -> Any:
    """The JSON that Python code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
