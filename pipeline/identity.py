"""Whose checkpoint is this? What a run must agree on with the run that wrote one, and the check. No torch here.

`launch` asks before it starts any process; `checkpoint` asks again when it restores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from pipeline.recipe import Recipe, StageName
from pipeline.run_folder import recipe_digest

STATE = "state.json"
FOLDER_PREFIX = "step-"


def checkpoint_identity(recipe: Recipe, *, stage: StageName, processes: int) -> dict[str, Any]:
    """What must agree between the run that wrote a checkpoint and the one that restores it."""
    return {
        "stage": stage,
        "recipe": recipe_digest(recipe, stage=stage),
        "backend": recipe.engine.backend,
        "zero_stage": recipe.engine.zero_stage,
        "precision": recipe.engine.precision,
        "processes": processes,
    }


def check_identity(found: dict[str, Any], expected: dict[str, Any], *, folder: Path) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        UserError: naming what differs.
    """
    different = [key for key in expected if found.get(key) != expected[key]]
    if not different:
        return
    shown = ", ".join(f"{key} {found.get(key)} (now {expected[key]})" for key in different)
    advice = (
        f"go on with processes={found.get('processes')}"
        if different == ["processes"]
        else "go on with the recipe that wrote it, or give the run another name"
    )
    raise UserError(
        f"checkpoint {folder} was written with {shown}: {advice}, or begin again with --restart {expected['stage']}"
    )


def checkpoint_folders(root: Path) -> list[Path]:
    """The committed checkpoints below `root`, newest first."""
    return sorted((path for path in root.glob(f"{FOLDER_PREFIX}*") if path.is_dir()), reverse=True)


def check_newest(root: Path, *, expected: dict[str, Any]) -> None:
    """Refuse, before anything is launched, a folder whose newest readable checkpoint is another run's.

    Raises:
        UserError: see `check_identity`.
    """
    for folder in checkpoint_folders(root):
        try:
            found = dict(json.loads((folder / STATE).read_text(encoding="utf-8"))["identity"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: restoring says so and takes the next
        return check_identity(found, expected, folder=folder)
