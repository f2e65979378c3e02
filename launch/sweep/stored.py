"""A sweep as its folder has it, for the jobs of a batch system: they need neither the recipe's file nor the command.

RUNS/NAME-sweep/POINT/recipe.yaml           each point's recipe
RUNS/NAME-sweep/slurm/finals/POINT.yaml     the final run's, if this point is chosen
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from data_shards.durable import replace_text
from data_shards.errors import UserError
from data_shards.text import parse_json, printable, table
from launch.sweep.grid import Axis
from launch.sweep.points import Earlier, Point, Sweep
from launch.sweep.record import RULE
from pipeline.recipe.io import dump_recipe, parse_recipe
from pipeline.recipe.vocabulary import RECIPE_FILE, SWEEP_FILE, StageName
from pipeline.runs.run_folder import RunFolder

_FINALS = Path("slurm") / "finals"


def store_finals(sweep: Sweep) -> None:
    """Write the recipes of the final runs that may be chosen."""
    folder = sweep.root / _FINALS
    folder.mkdir(parents=True, exist_ok=True)
    for point in sweep.points:
        replace_text(folder / f"{point.name}.yaml", dump_recipe(point.final))


def read_sweep(root: Path) -> Sweep:
    """The sweep in a folder that has its points and finals; UserError: something is missing or damaged."""
    path = root / SWEEP_FILE
    try:
        tree: Any = parse_json(path.read_text(encoding="utf-8"))
        axes = tuple(Axis(str(key), tuple(map(str, values))) for key, values in tree["grid"].items())
        stage: StageName = tree["stage"]
        points = tuple(_point(root, one, stage=stage) for one in tree["points"])
        return Sweep(str(tree["recipe"]), root, stage=stage, hold_out=float(tree["hold_out"]), axes=axes, points=points)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is missing or damaged ({error}): give the command of the sweep again") from None


def _point(root: Path, one: Any, *, stage: StageName) -> Point:
    name = str(one["name"])
    recipe = parse_recipe(root / name / RECIPE_FILE)
    trained = recipe.stages.trained
    earlier = None
    for before in trained[: trained.index(stage)]:
        link = root / name / before
        if link.is_symlink():
            of = Path(os.path.normpath(link.parent / os.readlink(link))).parent
            earlier = Earlier(before, recipe, RunFolder(runs_root=of.parent, name=of.name))
    final = parse_recipe(root / _FINALS / f"{name}.yaml")
    return Point(name, {str(key): str(text) for key, text in one["values"].items()}, recipe, final, earlier)


def show_sweep(root: Path, *, form: Literal["text", "json"]) -> str:
    """Each run of the sweep: state and step of its last stage; what was chosen. UserError: sweep.json is damaged."""
    try:
        tree: Any = parse_json((root / SWEEP_FILE).read_text(encoding="utf-8"))
        names = [str(one["name"]) for one in tree["points"]]
        values = {str(one["name"]): [str(text) for text in one["values"].values()] for one in tree["points"]}
        keys, chosen = list(tree["grid"]), tree["chosen"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{root / SWEEP_FILE} is damaged ({error}): give the command of the sweep again") from None
    runs = [_run(root, name) for name in [*names, "final"]]
    if form == "json":
        return json.dumps({"sweep": str(root), "runs": runs, "chosen": chosen}, indent=1)
    rows = [("run", *keys, "stage", "state", "saved step", "")]
    for run in runs:
        mark = "chosen" if run["run"] == chosen else ""
        own = values.get(str(run["run"]), [""] * len(keys))
        rows.append((str(run["run"]), *own, str(run["stage"]), str(run["state"]), str(run["step"]), mark))
    lines = [f"sweep {root}", table(rows, align="l" * (len(keys) + 3) + "rl", heading="ruled")]
    lines += [f"Chosen: {RULE}.", f"More of one run: shardvit watch {root / names[0]}"]
    return printable("\n".join(lines))


def _run(root: Path, name: str) -> dict[str, object]:
    """The first stage that is not done, or the last one."""
    folder = RunFolder(runs_root=root, name=name)
    path = folder.path / RECIPE_FILE
    if not path.exists():
        return {"run": name, "stage": "", "state": "new", "step": 0}
    stages = parse_recipe(path).stages.names
    records = {stage: folder.peek(stage) for stage in stages}
    stage = next((each for each in stages if records[each].state != "done"), stages[-1])
    return {"run": name, "stage": stage, "state": records[stage].state, "step": records[stage].last_saved_step}
