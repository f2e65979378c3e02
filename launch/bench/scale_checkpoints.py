"""Measures of `launch.bench.scale`: the checkpoint of 1,024 ranks, from commit to loading. No disks or networks.

Commits and prunes a checkpoint of 1,024 tiny files; counts flushes without making them. A few ranks load a small one,
one after the other; the files they open give the bytes that 1,024 ranks would read for ViT-L/16 and ViT-H/14.
"""

import io
import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from shardvit.data_shards.text import show_bytes
from shardvit.launch.bench.scale import RANKS, Row
from shardvit.pipeline.checkpoint.saver import CheckpointSaver, Origin, SaveHooks
from shardvit.pipeline.checkpoint.store import Retention, beside_of, commit_checkpoint, open_beside, shared_out
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Hold
from shardvit.pipeline.engine.saved_state.portable import WEIGHT, open_shared
from shardvit.pipeline.engine.saved_state.state_files import Seal, StateFile, digest_of, piece_sizes
from shardvit.pipeline.ranks.place import Place

_FOLDER = "deepspeed"
_MODEL_FILE = "mp_rank_00_model_states.pt"
_SHARD_FILE = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Parameters with 1,000 classes; each takes 2 bytes in the model's file and 12 in the shards (bf16, AdamW, ZeRO 1).
_MODELS = {"L": 304_326_632, "H": 632_045_800}
_MODEL_BYTES, _SHARD_BYTES = 2, 12
_LOADING = 16  # simulated ranks
_SEEN = ("open", "stat", "lstat", "scandir", "listdir", "rename", "remove", "unlink")  # functions of os


@dataclass
class Seen:
    """File operations by name: all, and those on the main thread."""

    operations: Counter[str] = field(default_factory=Counter[str])
    on_main: Counter[str] = field(default_factory=Counter[str])

    def note(self, name: str) -> None:
        self.operations[name] += 1
        if threading.current_thread() is threading.main_thread():
            self.on_main[name] += 1


@contextmanager
def watched() -> Iterator[Seen]:
    """Count file operations; flushes are counted but not made."""
    seen = Seen()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            seen.note(name)
            return real(*args, **keywords) if real else None

        return call

    calls = [(os, name, getattr(os, name)) for name in _SEEN]
    with ExitStack() as stack:
        for owner, name, real in (*calls, (io, "open", io.open), (os, "fsync", None)):
            stack.enter_context(patch.object(owner, name, counted(name, real)))
        yield seen


def commit_operations(*, files: int) -> Seen:
    """Count the operations to commit `files` shards and the model's file."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "checkpoints"
        open_beside(root, step=1)
        beside = beside_of(root, 1)
        (beside / _FOLDER).mkdir()
        names = [f"{_FOLDER}/{_MODEL_FILE}", *(f"{_FOLDER}/{_SHARD_FILE.format(rank)}" for rank in range(files))]
        for each in names:
            (beside / each).touch()
        empty = Seal(0, digest_of(beside / names[0]))
        with watched() as seen:
            commit_checkpoint(root, step=1, seals=dict.fromkeys(names, empty))
        return seen


@dataclass
class _OneRank:
    """Stand-in for the process group when ranks run one after the other, rank 0 first."""

    place: Place
    told: list[Any] = field(default_factory=list)  # rank 0's messages, in order
    _heard: int = 0

    def from_main(self, value: Any) -> Any:
        if self.place.is_main:
            self.told.append(value)
            return value
        self._heard += 1
        return self.told[self._heard - 1]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


@dataclass
class _Engine:
    """Stand-in engine whose state is many tiny files."""

    files: int
    hold: Hold = field(default_factory=Hold)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def snapshot(self) -> tuple[StateFile, ...]:
        return tuple(StateFile(f"{_FOLDER}/{_SHARD_FILE.format(rank)}", b"x") for rank in range(self.files))


def saves(*, files: int) -> Seen:
    """Count the file operations of two background saves, the second of which prunes the first."""
    with tempfile.TemporaryDirectory() as name:
        committed: list[TrainState] = []
        saver = CheckpointSaver(
            Path(name) / "checkpoints",
            engine=_Engine(files),  # pyright: ignore[reportArgumentType]
            ranks=_OneRank(Place()),  # pyright: ignore[reportArgumentType]
            origin=Origin({}, {}, inputs={}, recipe_text=""),
            retention=Retention(last=1),
            mode="background",
            hooks=SaveHooks(list[str]().append, committed.append),
        )
        seen = Seen()
        for step in (1, 2):
            with watched() as during:
                saver.save(TrainState(step=step))
                begun = Counter(during.on_main)
                for later in itertools.count(step + 2):
                    if not saver.poll(later, others="busy" if saver.is_busy else "done"):
                        break
                saver.finish()
            seen.operations += during.operations - begun
            seen.on_main += during.on_main - begun
        return seen


def digest_shares(parameters: int, *, ranks: int) -> tuple[int, int]:
    """The most bytes that a rank digests at a restart: by whole files, as before; by pieces, as now."""
    shard = _SHARD_BYTES * parameters // ranks
    sizes = {_MODEL_FILE: _MODEL_BYTES * parameters, **{_SHARD_FILE.format(rank): shard for rank in range(ranks)}}
    seals = {name: Seal(size, " ".join(["d"] * len(piece_sizes(size)))) for name, size in sorted(sizes.items())}
    pieces = {name: piece_sizes(size) for name, size in sizes.items()}
    by_files = max(sum(sizes[name] for name in list(seals)[rank::ranks]) for rank in range(ranks))
    by_pieces = [
        sum(sum(pieces[name][run.start : run.stop]) for name, run in shared_out(seals, share=(rank, ranks)).items())
        for rank in range(ranks)
    ]
    assert sum(by_pieces) == sum(sizes.values()), "not every byte is looked at once"
    return by_files, max(by_pieces)


class Loading(NamedTuple):
    """File system accesses of a load."""

    opened: list[set[str]]  # file names, by rank
    looked: int  # `stat` and `lstat`, all ranks together


def load(*, ranks: int) -> Loading:
    """Load a ZeRO 1 checkpoint of `ranks` ranks, each its own share."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "step-00000001", nn.Linear(64, ranks)
        state = _write(folder / _FOLDER, model, ranks=ranks)
        told: list[Any] = []
        opened, looked = list[set[str]](), 0
        for rank in range(ranks):
            files = set[str]()
            read = torch.load

            def noted(file: Path, read: Any = read, files: set[str] = files, **more: Any) -> Any:
                files.add(Path(file).name)
                return read(file, **more)

            with watched() as seen, patch.object(torch, "load", noted):
                saved = open_shared(
                    folder,
                    written={"backend": "deepspeed", "zero_stage": 1, "processes": ranks},
                    model=model,
                    ranks=_OneRank(Place(rank, ranks), told),  # pyright: ignore[reportArgumentType]
                    keeps="shard",
                )
                size = state[WEIGHT].numel() // ranks
                for of in (WEIGHT, *_MOMENTS):
                    found = saved.part("weight", of=of, first=rank * size, count=size)
                    assert torch.equal(found, state[of][rank * size :][:size]), "it is not what was written"
            opened.append(files)
            looked += seen.operations["stat"] + seen.operations["lstat"]
        return Loading(opened, looked)


def _write(folder: Path, model: nn.Linear, *, ranks: int) -> dict[str, torch.Tensor]:
    """Write one weight as DeepSpeed would; returns its contents. The bias is dropped."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # slow to import

    folder.mkdir(parents=True)
    model.register_parameter("bias", None)
    whole = {of: torch.randn(model.weight.numel()) for of in (WEIGHT, *_MOMENTS)}
    size = model.weight.numel() // ranks
    for rank in range(ranks):
        part = {of: flat[rank * size :][:size].clone() for of, flat in whole.items()}
        moments = {"step": torch.tensor(1.0), **{of: part[of] for of in _MOMENTS}}
        content = {
            "single_partition_of_fp32_groups": [part[WEIGHT]],
            "base_optimizer_state": {"state": {0: moments}, "param_groups": []},
            "group_paddings": [0],
            "param_alignment_paddings": [[0]],
            "loss_scaler": LossScaler(scale=1),
        }
        torch.save({"optimizer_state_dict": content}, folder / _SHARD_FILE.format(rank))
    about = {  # without the bf16 weights, which loading does not need
        "module": {},
        "buffer_names": [],
        "param_shapes": [{"weight": model.weight.shape}],
        "global_steps": 1,
        "global_samples": 1,
        "skipped_steps": 0,
    }
    torch.save(about, folder / _MODEL_FILE)
    return whole


def checkpoints() -> list[Row]:
    """Measure the checkpoint of 1,024 ranks."""
    return [_commit_row(), *_save_rows(), _digest_row(), *_load_rows()]


def _commit_row() -> Row:
    seen = commit_operations(files=RANKS)
    flushes = seen.operations.pop("fsync", 0)
    return Row(
        f"commit of {RANKS + 1:,} files: operations on the file server",
        "2,058",
        f"{seen.operations.total():,}",
        "<= 10",
        f"Opened, listed, renamed and looked at (stat), in a folder of empty files; beside them {flushes} flushes, of "
        "the manifest and three folders, as before.",
    )


def _digest_row() -> Row:
    shares = [digest_shares(parameters, ranks=RANKS) for parameters in _MODELS.values()]
    before, now = (" / ".join(f"{each[column] / 1e6:,.0f} MB" for each in shares) for column in (0, 1))
    return Row(
        f"digests at a restart: the most of a rank, {' / '.join(_MODELS)}",
        before,
        now,
        "",
        f"Calculated for each of {RANKS:,} ranks by the product's division, from the sizes of the files; every byte is "
        "looked at once. Pieces have 16 MiB; before, a rank had whole files.",
    )


def _save_rows() -> list[Row]:
    seen = saves(files=RANKS)
    in_all, flushes = seen.operations, seen.on_main["fsync"]
    return [
        Row(
            "two saves in the background: operations on rank 0's main thread after the copy; of them flushes",
            "5,177; 8",
            f"{seen.on_main.total():,}; {flushes}",
            "",
            f"{RANKS + 2:,} files each, by a saver of one rank, until they are committed and the first is pruned: all "
            f"{in_all.total():,} operations are other threads'.",
        ),
        Row(
            "files removed by pruning, on the main thread / in another",
            f"{RANKS + 3:,} / 0",
            f"{seen.on_main['unlink']:,} / {in_all['unlink'] - seen.on_main['unlink']:,}",
            "",
            "Of the same saves: the second one's retention removes the first. On a file server that takes 1 to 3 s, "
            "estimated, for which all ranks waited.",
        ),
    ]


def _load_rows() -> list[Row]:
    load(ranks=2)  # imports stat files, too
    half, found = load(ranks=_LOADING // 2), load(ranks=_LOADING)
    shards = sum(_SHARD_FILE.format(rank) in files for rank, files in enumerate(found.opened))
    others = sum(len(files) for files in found.opened) - shards - (_MODEL_FILE in found.opened[0])
    readers = sum(_MODEL_FILE in files for files in found.opened)
    assert (shards, readers, others) == (_LOADING, 1, 0), "a rank opened more than its own shard and the model's file"
    names = " / ".join(_MODELS)
    each = (found.looked - half.looked) / (_LOADING - _LOADING // 2)
    looked = round(found.looked + each * (RANKS - _LOADING))
    simulated = f"{_LOADING} ranks, one after the other, load a checkpoint of {_LOADING}; calculated for {RANKS:,}."
    return [
        Row(
            f"bytes read to load a state, {names}",
            " / ".join(show_bytes((RANKS * _MODEL_BYTES + _SHARD_BYTES) * number) for number in _MODELS.values()),
            " / ".join(show_bytes((readers * _MODEL_BYTES + _SHARD_BYTES) * number) for number in _MODELS.values()),
            "",
            f"bf16, ZeRO 1, AdamW. {simulated} Each opened its own shard, rank 0 the model's file too; at most all of "
            "both is read. The digests before it read everything once more.",
        ),
        Row(
            "files looked at (stat) to load a state",
            f"{RANKS**2:,}",
            f"{looked:,}",
            "",
            f"{simulated} Counted: {half.looked} of {_LOADING // 2} ranks, {found.looked} of {_LOADING}. Before: "
            "DeepSpeed's load looks for every shard on every rank (read in its source).",
        ),
    ]
