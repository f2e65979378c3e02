"""Room on the disk for checkpoints: what one needs, what is free, and the sentence when that is too little.

Quotas do not show in the free space; the write then fails, and the saver says why.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.text import show_bytes
from pipeline.recipe.schema import EngineConfig

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # those of the forward pass; the master copy comes on top
_MASTER_BYTES = 4
_OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4}  # both of Adam's averages, or the momentum, in float32


def estimate_bytes(num_parameters: int, *, engine: EngineConfig, optimizer: Literal["adamw", "sgd"]) -> int:
    """Size of one checkpoint of all processes together, before there is one, from what each parameter takes.

    For bf16 and ZeRO 1 that is what DeepSpeed writes, to 1 % (measured: launch/bench/records/save_stall.txt).
    `accelerate` and ZeRO 0 in float32 have no master copy beside the weights.
    """
    optimizer_bytes = _OPTIMIZER_BYTES[optimizer]
    if engine.backend == "accelerate" or (engine.zero_stage == 0 and engine.precision == "fp32"):
        return num_parameters * (_MASTER_BYTES + optimizer_bytes)
    return num_parameters * (_WEIGHT_BYTES[engine.precision] + _MASTER_BYTES + optimizer_bytes)


def free_bytes(root: Path) -> int:
    """What is free where `root` is, or will be made."""
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def check_free_space(root: Path, *, needed_bytes: int) -> None:
    """Refuse to begin what could not be saved.

    Raises:
        UserError: less is free than a checkpoint needs.
    """
    free = free_bytes(root)
    if free < needed_bytes:
        raise UserError(
            f"a checkpoint needs about {show_bytes(needed_bytes)} in {root}, but {show_bytes(free)} are free: make "
            "room, or let --runs name a folder on a larger disk"
        )
