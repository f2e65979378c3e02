"""`shardvit status RUNS/NAME-sweep`: a sweep's table, from its run folders as they are now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from data_shards.errors import UserError
from data_shards.text import parse_json, printable, table
from launch.sweep.record import RULE
from pipeline.recipe.io import parse_recipe
from pipeline.recipe.vocabulary import RECIPE_FILE, SWEEP_FILE
from pipeline.runs.run_folder import RunFolder


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
    lines += [f"Chosen: {RULE}.", f"More of one run: shardvit status {root / names[0]}"]
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
