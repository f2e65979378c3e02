"""Whose checkpoint is this? What a run must agree on with the run that wrote one, and the check. No torch here.

`launch` asks before it starts any process, `store` again when it restores. Another number of processes or another ZeRO
stage is no obstacle: the engine converts while it loads (`Engine.load`). Losses then agree with those of an
uninterrupted run up to rounding, and with dropout only in distribution, because each process draws its own. Backend
and precision keep their state in other forms; those do not change within a stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from pipeline.recipe.schema import Recipe, StageName
from pipeline.run_folder import recipe_digest

STATE = "state.json"
FOLDER_PREFIX = "step-"
_LAYOUT = ("zero_stage", "processes")  # how the state is cut up
_FIXED_ENGINE = ("backend", "precision")


def checkpoint_identity(recipe: Recipe, *, stage: StageName, processes: int) -> dict[str, Any]:
    """What a checkpoint is known by: `check_identity` says what of it must agree with the run that restores it."""
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
    different = [
        key for key, value in expected.items() if key not in found or (found[key] != value and key not in _LAYOUT)
    ]
    if not different:
        return
    advice = "go on with the recipe that wrote it"
    engine = [key for key in different if key in _FIXED_ENGINE and key in found]
    if engine and {"recipe", *engine}.issuperset(different):
        advice = "set " + " and ".join(f"engine.{key}={found[key]}" for key in engine)
        different = engine  # the recipe's digest differs with it, but tells a reader less
    shown = ", ".join(f"{key} {found.get(key)} (now {expected[key]})" for key in different)
    raise UserError(
        f"checkpoint {folder} was written with {shown}: {advice}, give the run another name, or begin again with "
        f"--restart {expected['stage']}"
    )


def checkpoint_folders(root: Path) -> list[Path]:
    """The committed checkpoints below `root`, newest first; a copy of the user's has another name."""
    paths = root.glob(f"{FOLDER_PREFIX}*")
    found = [path for path in paths if path.name.removeprefix(FOLDER_PREFIX).isdecimal() and path.is_dir()]
    return sorted(found, reverse=True)


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
