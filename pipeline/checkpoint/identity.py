"""Check that a run may resume from a checkpoint. No torch here.

`launch` checks before it starts any process, `store` again on restore. World size and ZeRO stage may differ:
`Engine.load` converts, and losses agree with an uninterrupted run's up to rounding (with dropout's masks per process,
only in distribution). Backend and precision must not: they store state differently.
"""

import json
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.schema import FEW_PROCESSES, Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import checkpoint_folders, recipe_digest

STATE = "state.json"
_LAYOUT = ("zero_stage", "processes")  # how the state is sharded
_FIXED_ENGINE = ("backend", "precision")


def checkpoint_identity(recipe: Recipe, *, stage: StageName, processes: int) -> dict[str, Any]:
    """Build the identity that `check_identity` compares."""
    many = {}
    if recipe.data.lanes == "auto" and processes > FEW_PROCESSES:  # the sample order differs
        many = {"lanes": recipe.lanes(recipe.train_stage(stage), processes=processes)}
    return {
        "stage": stage,
        "recipe": recipe_digest(recipe, stage=stage),
        "backend": recipe.engine.backend,
        "zero_stage": recipe.engine.zero_stage,
        "precision": recipe.engine.precision,
        "processes": processes,
        **many,
    }


def check_identity(found: dict[str, Any], expected: dict[str, Any], *, folder: Path) -> None:
    """UserError, naming what differs, if the checkpoint belongs to another run."""
    if found.get("lanes") != expected.get("lanes"):
        raise UserError(
            f"checkpoint {folder} was written by {found.get('processes')} processes: data.lanes auto has one "
            f"order of samples for up to {FEW_PROCESSES} processes and another for more, which had "
            f"{found.get('lanes') or expected.get('lanes')} lanes: use a number of processes on the same side, or "
            "begin again with data.lanes set to a number that both divide"
        )
    different = [
        key for key, value in expected.items() if key not in found or (found[key] != value and key not in _LAYOUT)
    ]
    if not different:
        return
    advice = "continue with the recipe that wrote it (and, before 0.1, with that version of shardvit)"
    engine = [key for key in different if key in _FIXED_ENGINE and key in found]
    if engine and {"recipe", *engine}.issuperset(different):
        advice = "set " + " and ".join(f"engine.{key}={found[key]}" for key in engine)
        different = engine  # the recipe digest differs too, but tells less
    shown = ", ".join(f"{key} {found.get(key)} (now {expected[key]})" for key in different)
    raise UserError(
        f"checkpoint {folder} was written with {shown}: {advice}, give the run another name, or begin again with "
        f"--restart {expected['stage']}"
    )


def read_state_file(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json. OSError or ValueError if unreadable."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def check_newest(root: Path, *, expected: dict[str, Any]) -> None:
    """`check_identity` of the newest readable checkpoint, before launch."""
    for folder in checkpoint_folders(root):
        try:
            found = dict(read_state_file(folder)["identity"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: restoring reports it and takes the next
        return check_identity(found, expected, folder=folder)
