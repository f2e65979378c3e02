"""Checkpoints that are whole or not there.

One checkpoint is a folder `step-00000400`: the engine's sharded state, our own `state.json`, and `manifest.json` with
the size and digest of every file. It is written beside its place (`.writing-step-...`), the manifest last, everything
flushed to disk, and then renamed; so a folder of that name is complete, whatever was killed and whenever. Restoring
checks every digest, falls back to the next older checkpoint when one is damaged, and says so; when there are
checkpoints but none is good, that is an error and never a silent start from zero.

Cost: the state is read once for its digests when it is saved (half a GiB a second and core, shared by the ranks).
This does not change the number of processes: a checkpoint is restored on as many as wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from pipeline.engine import Engine
from pipeline.identity import FOLDER_PREFIX, STATE, check_identity, checkpoint_folders
from pipeline.ranks import Ranks
from pipeline.state import TrainState

MANIFEST = "manifest.json"
_WRITING = ".writing-"


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded."""

    folder: Path
    state: TrainState
    notes: tuple[str, ...]  # damaged newer checkpoints that were passed over


def save_checkpoint(
    root: Path, *, engine: Engine, state: TrainState, ranks: Ranks, identity: dict[str, Any], keep: int
) -> Path:
    """Write and commit one checkpoint; collective.

    Args:
        root: the stage's folder of checkpoints.
        engine: what to save.
        state: our part.
        ranks: the processes.
        identity: what a run must agree on to restore it (stage, recipe, layout).
        keep: older checkpoints beyond this many are removed, once the new one is committed.

    Returns:
        The committed folder.
    """
    final = root / f"{FOLDER_PREFIX}{state.step:08d}"
    beside = root / f"{_WRITING}{final.name}"
    if ranks.place.is_main:
        for leftover in [*root.glob(f"{_WRITING}*"), final]:  # of a killed writer, or a damaged one being redone
            shutil.rmtree(leftover, ignore_errors=True)
        beside.mkdir(parents=True)
        _write_json(beside / STATE, {"identity": identity, "state": state.to_json()})
    ranks.barrier()
    engine.save(beside)
    ranks.barrier()
    mine = _files(beside)[ranks.place.rank :: ranks.place.world_size]
    parts = ranks.gather_objects({str(path.relative_to(beside)): _seal(path) for path in mine})
    if ranks.place.is_main:
        files = {name: entry for part in parts for name, entry in part.items()}  # pyright: ignore[reportAttributeAccessIssue]
        _write_json(beside / MANIFEST, {"version": 1, "files": dict(sorted(files.items()))})
        for folder in {path.parent for path in _files(beside)}:
            _flush(folder)
        beside.rename(final)
        _flush(root)
        # Newer ones were passed over as damaged: they must not push out the good ones, and are redone when reached.
        for old in [folder for folder in checkpoint_folders(root) if folder.name <= final.name][keep:]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()
    return final


def restore_checkpoint(root: Path, *, engine: Engine, ranks: Ranks, identity: dict[str, Any]) -> Restored | None:
    """Load the newest checkpoint that is whole; None when there is none at all; collective.

    Raises:
        UserError: every checkpoint is damaged, or the newest good one belongs to another recipe or layout.
    """
    notes: list[str] = []
    folders = checkpoint_folders(root)
    for folder in folders:
        share = (ranks.place.rank, ranks.place.world_size)
        damage = [text for text in ranks.gather_objects(damage_of(folder, share=share)) if text]
        if damage:
            notes.append(f"{folder} is damaged ({damage[0]}); the one before it is used")
            continue
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        check_identity(content["identity"], identity, folder=folder)
        engine.load(folder)
        return Restored(folder=folder, state=TrainState.from_json(content["state"]), notes=tuple(notes))
    if folders:
        raise UserError(
            f"all {len(folders)} checkpoints in {root} are damaged ({'; '.join(notes)}): bring one back, or begin "
            f"the stage again with --restart {identity['stage']}"
        )
    return None


def damage_of(folder: Path, *, share: tuple[int, int] = (0, 1)) -> str:
    """What is wrong with a checkpoint's files, or with a share of them (number, of how many); empty: nothing."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"no readable {MANIFEST}"
    first, step = share
    for name in sorted(files)[first::step]:
        path, (num_bytes, digest) = folder / name, files[name]
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != num_bytes:
                return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
            if _digest(path) != digest:
                return f"{name} has changed since it was written"
        except OSError as error:  # one rank's bad disk must not leave the others waiting
            return f"{name} cannot be read: {error.strerror}"
    return ""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _seal(path: Path) -> dict[str, Any]:
    """Flush a file to disk; its size and digest."""
    _flush(path)
    return {"bytes": path.stat().st_size, "blake2b": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
