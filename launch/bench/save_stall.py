"""How long training stands still for a checkpoint, beside what the disk itself needs for as many bytes.

Run `python -m launch.bench.save_stall`; records/save_stall.txt has what it printed. One process trains a model on
random pixels (DeepSpeed, ZeRO-1, bf16), by turns without saving, with a blocking save and with one in the background,
in each round:

- the disk alone: a file of as many bytes as the checkpoint written and flushed, then dropped from the page cache and
  read back, and the digest of as many bytes taken in memory: what any save that is proven on the disk must do;
- blocking: seconds from the call of `save` to its return, when the checkpoint is committed and verified; the share of
  it that the disk alone explains, and with the two digests;
- a copy to fresh memory: of all of the state, for which training stood still in every save before there was a kept
  buffer; beside it a second copy to the same memory;
- background: seconds until training goes on, and that it stood still in all (`stall_seconds`: snapshot, what the next
  step waited for the copy, the ranks' agreements), as a share of the copy to fresh memory; seconds until it was
  committed, and the time of a step meanwhile beside the time of a step without saving. The first save of all also takes
  the buffer's memory from the system, beside the training.

Where other work shares the machine, as it did for the record, the best round tells most. Needs about 40 bytes of
memory and of disk a parameter: 13 GB each for ViT-L/16. Costs 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from model.build import build_model
from model.init import initialise
from pipeline.checkpoint.room import estimate_bytes
from pipeline.checkpoint.saver import CheckpointSaver
from pipeline.checkpoint.store import Retention
from pipeline.checkpoint.train_state import TrainState
from pipeline.engine.host_copy import HostBuffer, HostCopy
from pipeline.engine.open import open_engine
from pipeline.engine.protocol import Engine
from pipeline.ranks.group import Ranks
from pipeline.ranks.place import Place
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schedule import Schedule
from pipeline.recipe.schema import EngineConfig, Recipe
from pipeline.recipe.stage_plan import StagePlan

_PIECE_BYTES = 1 << 26
_CLASSES = 10
_CALM_STEPS = 3
# name, model, pixels, images of a step
_MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "demo": ({"width": 64, "depth": 6, "heads": 4, "patch_size": 4}, 16, 64),
    "ViT-B/16": ({"variant": "B/16"}, 32, 4),
    "ViT-L/16": ({"variant": "L/16"}, 32, 4),
}


class _Training:
    """A model in training on random pixels, and a place for its checkpoints."""

    def __init__(self, name: str, *, ranks: Ranks, folder: Path) -> None:
        sizes, pixels, images = _MODELS[name]
        recipe = _recipe(sizes, pixels=pixels, images=images)
        model = build_model(recipe.model, image_size=pixels, num_classes=_CLASSES, head="linear")
        initialise(model, seed=0)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.folder, self.committed_at = folder, 0.0
        self._ranks, self._step = ranks, 0
        self._images, self._labels = torch.randn(images, 3, pixels, pixels), torch.arange(images) % _CLASSES
        plan = _plan(images)
        self._engine: Engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)

    def step(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        logits = self._engine.forward(self._images.to(self._engine.input_dtype))
        self._engine.backward(torch.nn.functional.cross_entropy(logits.float(), self._labels))
        self._engine.step(lr=1e-3, flags=(False, False))
        self._step += 1
        return time.perf_counter() - begin

    def saver(self, mode: Literal["background", "blocking"]) -> CheckpointSaver:
        return CheckpointSaver(
            self.folder,
            engine=self._engine,
            ranks=self._ranks,
            identity={},
            written_by={},
            recipe_text="",
            inputs={},
            retention=Retention(last=1),
            mode=mode,
            say=print,
            on_commit=self._note_commit,
        )

    def state(self) -> TrainState:
        return TrainState(step=self._step)

    def copy_seconds(self) -> tuple[float, float]:
        """Of all of the state to memory that was never used, and then to the same memory again."""
        buffer, snapshot = HostBuffer(self._engine.device), self._engine.snapshot()
        fresh, again = (_seconds(HostCopy(snapshot, buffer=buffer).run) for _ in range(2))
        buffer.free()
        return fresh, again

    def checkpoint_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def _note_commit(self, state: TrainState) -> None:
        self.committed_at = time.perf_counter()


def measure(name: str, *, ranks: Ranks, folder: Path, rounds: int) -> None:
    """Print one model's table."""
    training = _Training(name, ranks=ranks, folder=folder)
    for _ in range(2):
        training.step()
    blocking, background = training.saver("blocking"), training.saver("background")
    blocking.save(training.state())  # the first one opens files and libraries for the first time
    num_bytes = training.checkpoint_bytes()
    results: dict[str, list[float]] = {}

    def note(row: str, seconds: float) -> None:
        results.setdefault(row, []).append(seconds)

    fresh, again = training.copy_seconds()  # once, before the kept buffer takes its memory
    note("a copy to fresh memory, s", fresh)
    note("a second copy to the same memory, s", again)
    for _ in range(rounds):
        alone = _disk_alone(folder, num_bytes=num_bytes)
        for row, seconds in alone.items():
            note(row, seconds)
        calm = statistics.median(training.step() for _ in range(_CALM_STEPS))
        note("a step without saving, s", calm)

        seconds = _seconds(lambda: blocking.save(training.state()))
        note("blocking: training stands still, s", seconds)
        disk = alone["the disk alone: write and flush, s"] + alone["the disk alone: read back, s"]
        note("blocking: share that the disk explains, %", 100 * disk / seconds)
        digests = 2 * alone["one digest in memory, s"]
        note("blocking: share that disk and digests explain, %", 100 * (disk + digests) / seconds)

        training.step()
        begin, stood, committed = time.perf_counter(), background.stall_seconds, training.committed_at
        background.save(training.state())
        note("background: until training goes on, s", time.perf_counter() - begin)
        steps = []
        while training.committed_at == committed:
            steps.append(training.step())
            background.poll()
        note("background: training stands still in all, s", background.stall_seconds - stood)
        note("background: ..., of a copy to fresh memory, %", 100 * (background.stall_seconds - stood) / fresh)
        note("background: until committed, s", training.committed_at - begin)
        # The first step may have run its course before the writer began in earnest, the last after it ended.
        note("background: a step meanwhile, s", statistics.median(steps))
        note("background: slower meanwhile, %", 100 * (statistics.median(steps) / calm - 1))
    estimate = estimate_bytes(
        training.num_parameters, engine=EngineConfig(), optimizer=OptimizerConfig(name="adamw", lr=1)
    )
    print(
        f"\n{name}: {training.num_parameters:,} parameters, {num_bytes:,} bytes of a checkpoint, "
        f"{num_bytes / training.num_parameters:.2f} a parameter; estimate_bytes says {estimate:,}"
    )
    print(f"{'':52}{'median':>10}{'best':>10}{'worst':>10}")
    for row, values in results.items():
        print(f"{row:52}{statistics.median(values):10.3f}{min(values):10.3f}{max(values):10.3f}", flush=True)


def _disk_alone(folder: Path, *, num_bytes: int) -> dict[str, float]:
    """Write and flush that many random bytes, read them back from the disk, and digest them in memory; seconds."""
    piece = os.urandom(min(_PIECE_BYTES, num_bytes))
    pieces = max(1, round(num_bytes / len(piece)))
    path = folder / "as_many_bytes"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(pieces):
                file.write(piece)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        buffer = bytearray(len(piece))
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def digest() -> None:
        digest = hashlib.blake2b(digest_size=16)
        for _ in range(pieces):
            digest.update(piece)

    try:
        return {
            "the disk alone: write and flush, s": _seconds(write),
            "the disk alone: read back, s": _seconds(read),
            "one digest in memory, s": _seconds(digest),
        }
    finally:
        path.unlink(missing_ok=True)


def _recipe(sizes: dict[str, Any], *, pixels: int, images: int) -> Recipe:
    stage = {
        "train": "none",
        "eval": "none",
        "image_size": pixels,
        "global_batch_size": images,
        "duration": "1000 steps",
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1},
    }
    engine = {"zero_stage": 1, "precision": "bf16"}
    return Recipe.model_validate({"name": "bench", "model": sizes, "engine": engine, "stages": {"pretrain": stage}})


def _plan(images: int) -> StagePlan:
    return StagePlan(
        world_size=1,
        global_batch_images=images,
        micro_batch_size=images,
        accumulation_steps=1,
        lanes=images,
        total_steps=1000,
        schedule=Schedule(),
        log_steps=1,
        eval_steps=0,
        save_steps=0,
        samples_per_epoch=1000,
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="How long training stands still for a checkpoint.")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {version('torch')}, DeepSpeed {version('deepspeed')}, ", end="")
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch, one process, no GPU")
    folder = Path(tempfile.mkdtemp(prefix="save_stall-", dir=args.folder))
    ranks = Ranks(Place(), timeout_seconds=600)
    try:
        for name in args.models:
            measure(name, ranks=ranks, folder=folder / name.replace("/", "-"), rounds=args.rounds)
    finally:
        ranks.leave()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
