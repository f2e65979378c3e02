"""Rebuild an unreadable stage.json from the newest undamaged checkpoint, so that no training is repeated.

A checkpoint proves how far the stage got, not that STAGE/model is its result. So a rebuilt stage is never "done": it
resumes, perhaps with nothing left to train, and writes the same model again. The caller holds the run folder's lock.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.identity import read_state_file
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import BrokenRecord, RunFolder, StageRecord, checkpoint_folders


def mend_records(folder: RunFolder, stages: Iterable[StageName]) -> list[str]:
    """Rebuild broken records, keep the broken files, and return a line for each. UserError if a stage has no undamaged
    checkpoint; OSError if the disk is full or fails."""
    notes = []
    for stage in stages:
        try:
            folder.record(stage)
        except BrokenRecord as broken:
            record, what = StageRecord(), "the stage, in which nothing is trained, is done again"
            if stage != "swap_head":
                record, what = _from_checkpoints(folder, stage, broken)
            aside = _keep(broken.path)
            folder.write(stage, record)
            notes.append(f"{broken.path} was broken ({broken.why}) and is kept as {aside.name}: {what}")
    return notes


def _from_checkpoints(folder: RunFolder, stage: StageName, broken: BrokenRecord) -> tuple[StageRecord, str]:
    from shardvit.pipeline.checkpoint.store import damage_of  # torch

    for checkpoint in checkpoint_folders(folder.checkpoints(stage)):
        if damage_of(checkpoint):
            continue  # restoring reports it
        try:
            content = read_state_file(checkpoint)
            state = content["state"]
            record = StageRecord(
                state="running",
                last_saved_step=int(state["step"]),
                images_seen=int(state["images_seen"]),
                seconds=float(state["training_seconds"]),
                passed_over=[int(step) for step in state["passed_over"]],
                rollbacks=int(state["rollbacks"]),
                inputs={str(name): str(digest) for name, digest in content["inputs"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        return record, f"it is rebuilt from {checkpoint.name}, from which the stage resumes"
    raise UserError(
        f"{broken.path} is broken ({broken.why}), and there is no undamaged checkpoint to rebuild it from: restore "
        f"the file, or begin the stage again with --restart {stage}"
    )


def _keep(path: Path) -> Path:
    """Copy, not rename, so that a kill before the new record is written leaves the broken one."""
    aside, number = path.with_name(f"{path.name}.broken"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken.{number}")
    shutil.copy2(path, aside)
    return aside
