"""Commit, prune, restore and read checkpoints, each complete or absent. `saver` writes them.

A checkpoint is a folder `step-00000400`: the engine's sharded state, our `state.json`, the resolved recipe, and
`manifest.json` with every file's size and digest. It is written as `.writing-step-...`, the manifest last, flushed and
read back, then renamed, so a folder of that name is always complete. Pruning first renames to `.removing-...`. The
newest is the highest number; no pointer can be wrong. Restoring checks every digest (half a GiB/s a core, each rank an
equal share) and falls back to older checkpoints; if none is good it fails, never silently starting from step 0. A
commit takes nine operations on the file server for any number of files; rank 0 reads names, manifest and state for all.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from shardvit.data_shards.durable import flush, write_text
from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.identity import check_identity, read_state_file
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.saved_state.average import AVERAGE
from shardvit.pipeline.engine.saved_state.portable import WEIGHT, open_state
from shardvit.pipeline.engine.saved_state.state_files import Seal, piece_digests, piece_sizes, whole_digest
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.vocabulary import PROJECTION, WeightsKind
from shardvit.pipeline.runs.run_folder import FOLDER_PREFIX, checkpoint_folders

MANIFEST = "manifest.json"
_WRITING = ".writing-"
_REMOVING = ".removing-"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep."""

    last: int  # keep this many newest ones, at least 1
    every_steps: int = 0  # keep for good the first in each stretch of this many steps; 0: none
    best: str | None = None  # keep the best by this evaluation metric, such as "val/loss"; None: none
    reach_steps: int = 0  # keep back to one at least this many steps older than the newest; 0: no


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint."""

    folder: Path
    state: TrainState
    notes: tuple[str, ...]  # damaged newer checkpoints that were skipped
    identity: dict[str, Any]  # of the writing run
    written_by: dict[str, str]  # facts about the writing process


def beside_of(root: Path, step: int) -> Path:
    """Temporary folder in which the checkpoint of `step` is written."""
    return root / f"{_WRITING}{FOLDER_PREFIX}{step:08d}"


def open_beside(root: Path, *, step: int) -> None:
    """Make a fresh `beside_of`, on one rank. OSError if it cannot be made or the stage's folder is gone."""
    collect_leftovers(root)
    root.mkdir(exist_ok=True)
    beside_of(root, step).mkdir()


def commit_checkpoint(root: Path, *, step: int, seals: Mapping[str, Seal]) -> Path:
    """Give the written folder its final name, check it again, and return it; on one rank, once all have written.
    `seals`: every verified file, by path. OSError if the disk is full or fails, or the files are not those written."""
    beside, final = beside_of(root, step), root / f"{FOLDER_PREFIX}{step:08d}"
    files = {name: {"bytes": seal.num_bytes, "blake2b": seal.blake2b} for name, seal in sorted(seals.items())}
    there = _names(beside, folders=_folders(files))
    if absent := [name for name in files if name not in there]:
        raise OSError(
            errno.ENOENT, f"{absent[0]} was written and is not there: do all machines have the same folder there?"
        )
    manifest = json.dumps({"version": 1, "files": files}, indent=1) + "\n"
    write_text(beside / MANIFEST, manifest)
    for folder in _folders(files):
        flush(beside / folder)
    try:
        beside.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _set_aside(final)  # was skipped as damaged, and is now redone
        beside.rename(final)
    try:
        flush(root)
        # The writers have read back the other files.
        if (final / MANIFEST).read_text(encoding="utf-8") != manifest:
            raise OSError(errno.EIO, f"{final.name} is not what was written")
    except OSError:
        with contextlib.suppress(OSError):  # it may be complete, but nobody can tell
            _set_aside(final)
        raise
    return final


def to_delete(metrics: Mapping[int, float | None], *, retention: Retention) -> list[int]:
    """List the steps of checkpoints to delete, oldest first. `metrics`: `retention.best` at each checkpoint's own step,
    None if not evaluated. Always keeps the newest; `every_steps` keeps the first at or after each multiple."""
    there = sorted(metrics)
    keep = set(there[-max(retention.last, 1) :])
    if retention.reach_steps:
        oldest = max((step for step in there if step <= there[-1] - retention.reach_steps), default=there[0])
        keep |= {step for step in there if step >= oldest}
    if retention.every_steps:
        first: dict[int, int] = {}
        for step in there:
            first.setdefault(step // retention.every_steps, step)
        keep |= {step for stretch, step in first.items() if stretch > 0}
    if retention.best is not None:
        sign = -1.0 if retention.best.endswith("loss") else 1.0
        known = [
            (sign * metric, step) for step, metric in metrics.items() if metric is not None and not math.isnan(metric)
        ]
        keep |= {step for _, step in sorted(known)[-1:]}
    return [step for step in there if step not in keep]


def prune_checkpoints(root: Path, *, newest_step: int, retention: Retention) -> None:
    """Remove what retention does not keep, once `newest_step` is verified; on one rank. Newer checkpoints were skipped
    as damaged: they must not displace good ones, and are redone when reached."""
    numbered = {int(folder.name.removeprefix(FOLDER_PREFIX)): folder for folder in checkpoint_folders(root)}
    metrics = {step: _metric(path, name=retention.best) for step, path in numbered.items() if step <= newest_step}
    for step in to_delete(metrics, retention=retention):
        with contextlib.suppress(OSError):  # the next pruning retries
            _set_aside(numbered[step])
    collect_leftovers(root)


def remove_checkpoint(folder: Path) -> None:
    """Remove a committed checkpoint; on one rank. OSError if it cannot be renamed; it then stays."""
    _set_aside(folder)
    collect_leftovers(folder.parent)


def collect_leftovers(root: Path) -> None:
    """Remove folders of killed writers and removers."""
    for prefix in (_WRITING, _REMOVING):
        for leftover in root.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def restore_checkpoint(
    root: Path, *, engine: Engine, ranks: Ranks, identity: dict[str, Any], without: Collection[Path] = ()
) -> Restored | None:
    """Load the newest undamaged checkpoint not in `without`, as rank 0 sees them, or return None if there is none;
    collective. UserError if all are damaged, or the newest good one has another `identity`."""
    notes: list[str] = []
    names: list[str] = []
    if ranks.place.is_main:
        collect_leftovers(root)
        names = [folder.name for folder in checkpoint_folders(root) if folder not in without]
    # All use rank 0's list: another machine's may be stale, and ranks would restore different steps.
    for folder in (root / name for name in ranks.from_main(names)):
        seals = ranks.from_main(_listed(folder) if ranks.place.is_main else None)
        share = (ranks.place.rank, ranks.place.world_size)
        found = f"no readable {MANIFEST}" if seals is None else _damage(folder, seals, share=share)
        damage = [text for text in ranks.gather_objects(found) if text]
        if damage:
            notes.append(f"{folder} is damaged ({damage[0]}): it is skipped")
            continue
        content = ranks.from_main(read_state_file(folder) if ranks.place.is_main else {})
        check_identity(content["identity"], identity, folder=folder)
        engine.load(folder, written=content["identity"])
        return Restored(
            folder=folder,
            state=TrainState(**content["state"]),
            notes=tuple(notes),
            identity=content["identity"],
            written_by=content["written_by"],
        )
    if notes:
        raise UserError(
            f"all {len(notes)} checkpoints in {root} {'to go back to ' if without else ''}are damaged "
            f"({'; '.join(notes)}): bring one back, or begin "
            f"the stage again with --restart {identity['stage']}"
        )
    return None


def damage_of(folder: Path) -> str:
    """Describe a checkpoint's first damage; "": none."""
    seals = _listed(folder)
    return f"no readable {MANIFEST}" if seals is None else _damage(folder, seals, share=(0, 1))


def checkpoint_weights(folder: Path, *, model: nn.Module, of: WeightsKind = "weights") -> dict[str, Tensor]:
    """Read the weights, or their moving average, from RUNS/NAME/STAGE/checkpoints/step-*, with the bits of
    `Engine.weights`, in seconds for ViT-L. `model`, perhaps on the meta device, gives names, order and shapes. Runs no
    code from a file; does not check for damage. UserError if it is of another model, no engine's, or has no average."""
    try:
        return assemble(folder, written=read_state_file(folder)["identity"], model=model, of=of)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # readable, but not ours
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"checkpoint {folder} is not what an engine writes ({reason}): take another one") from error


def assemble(
    folder: Path, *, written: Mapping[str, Any], model: nn.Module, of: WeightsKind = "weights"
) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of identity `written`."""
    saved = open_state(folder, written=written, model=model, besides=PROJECTION)
    if of == "ema" and saved.average_updates is None:
        raise UserError(f"checkpoint {folder} has no moving average of the weights: its stage was trained without ema")
    tensors = AVERAGE if of == "ema" else WEIGHT
    kept = [name for name in saved.shapes if not name.startswith(f"{PROJECTION}.")]
    state = {name: saved.whole(name, of=tensors).clone() for name in kept}  # the file may be deleted
    return state | {name: buffer.detach().to(torch.float32) for name, buffer in saved.buffers.items()}


def _listed(folder: Path) -> dict[str, Seal] | None:
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {
            name: Seal(int(entry["bytes"]), str(entry["blake2b"])) for name, entry in sorted(content["files"].items())
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _damage(folder: Path, seals: Mapping[str, Seal], *, share: tuple[int, int]) -> str:
    """Describe the first damage in one share (index, count) of the files; "": none."""
    for name, run in shared_out(seals, share=share).items():
        path, seal = folder / name, seals[name]
        expected = seal.blake2b.split(" ")
        try:
            if run.start == 0 and not path.is_file():
                return f"{name} is missing"
            if run.start == 0 and path.stat().st_size != seal.num_bytes:
                return f"{name} has {path.stat().st_size} bytes instead of {seal.num_bytes}"
            if len(expected) == 1 != len(piece_sizes(seal.num_bytes)):
                found = [whole_digest(path)]
            else:
                found, expected = piece_digests(path, first=run.start, count=len(run)), expected[run.start : run.stop]
            if found != expected:
                return f"{name} has changed since it was written"
        except OSError as error:  # must not leave the other ranks waiting
            return f"{name} cannot be read: {error.strerror}"
    return ""


def shared_out(seals: Mapping[str, Seal], *, share: tuple[int, int]) -> dict[str, range]:
    """Choose the pieces that share (index, count) verifies; shares have about equal bytes."""
    number, of = share
    total = sum(seal.num_bytes for seal in seals.values())
    mine: dict[str, range] = {}
    position = 0
    for name, seal in seals.items():
        sizes = piece_sizes(seal.num_bytes)
        if len(seal.blake2b.split(" ")) == 1:  # a small file, or an old manifest
            sizes = [seal.num_bytes]
        for piece, size in enumerate(sizes):
            if min(of - 1, (2 * position + size) * of // max(1, 2 * total)) == number:  # by its midpoint
                mine[name] = range(mine[name].start if name in mine else piece, piece + 1)
            position += size
    return mine


def _folders(names: Collection[str]) -> list[str]:
    return sorted({above.as_posix() for name in names for above in PurePosixPath(name).parents})


def _names(top: Path, *, folders: Collection[str]) -> set[str]:
    found: set[str] = set()
    for folder in folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(top / folder) as entries:
            found |= {(PurePosixPath(folder) / entry.name).as_posix() for entry in entries}
    return found


def _metric(folder: Path, *, name: str | None) -> float | None:
    if name is None:
        return None
    try:
        state = read_state_file(folder)["state"]
        return float(state["evaluation"][name]) if state["evaluation_step"] == state["step"] else None
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or without an evaluation
        return None


def _set_aside(folder: Path) -> None:
    """Rename before deletion, so that a kill never leaves a half-deleted checkpoint."""
    aside = folder.with_name(f"{_REMOVING}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
