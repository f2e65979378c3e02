"""The SLURM jobs of a sweep that do not train: choose a point and prepare the final run; summarize at the end.

    python -m shardvit.launch.sweep.step RUNS/NAME-sweep --do choose
    python -m shardvit.launch.sweep.step RUNS/NAME-sweep --do sum-up

Reads recipes from the sweep's folder: POINT/recipe.yaml, and slurm/finals/POINT.yaml for a final run with the point's
values. Exit code 1: no point can be chosen, or the final run is not done; 2: the folder is damaged.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.launch.local.output import say
from shardvit.launch.sweep.grid import Axis
from shardvit.launch.sweep.local import begin_final
from shardvit.launch.sweep.points import FINAL, Point, SharedStage, Sweep, open_point
from shardvit.launch.sweep.record import Outcome, SweepRecord, as_table, choose, log_to_mlflow, make_record, read_record
from shardvit.pipeline.recipe.io import dump_recipe, parse_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_USER_ERROR, RECIPE_FILE, StageName
from shardvit.pipeline.runs.run_folder import RunFolder

_FINALS = Path("slurm") / "finals"


def store_finals(sweep: Sweep) -> None:
    """Write the final run's recipe for each point."""
    folder = sweep.root / _FINALS
    folder.mkdir(parents=True, exist_ok=True)
    for point in sweep.points:
        replace_text(folder / f"{point.name}.yaml", dump_recipe(point.final))


def read_sweep(root: Path) -> Sweep:
    """Read a sweep back from its folder; UserError if something is missing or damaged."""
    record = read_record(root)
    axes = tuple(Axis(key, tuple(values)) for key, values in record.grid.items())
    points = tuple(_read_point(root, one, stage=record.stage) for one in record.points)
    return Sweep(record.recipe, root, stage=record.stage, hold_out=record.hold_out, axes=axes, points=points)


def _read_point(root: Path, one: Outcome, *, stage: StageName) -> Point:
    recipe = parse_recipe(root / one.name / RECIPE_FILE)
    trained, shared = recipe.stages.trained, None
    for before in trained[: trained.index(stage)]:
        link = root / one.name / before
        if link.is_symlink():
            run = Path(os.path.normpath(link.parent / os.readlink(link))).parent
            shared = SharedStage(before, recipe, RunFolder(runs_root=run.parent, name=run.name))
    return Point(one.name, dict(one.values), recipe, parse_recipe(root / _FINALS / f"{one.name}.yaml"), shared)


def prepare_final(sweep: Sweep, record: SweepRecord) -> int:
    """Create the final run's folder with the chosen values; returns the exit code."""
    chosen = next((point for point in sweep.points if point.name == record.chosen), None)
    if chosen is None:
        log_to_mlflow(sweep, record, status="FAILED")
        say(f"none of the {len(sweep.points)} points can be chosen, see the table; their runs are in {sweep.root}")
        return EXIT_FAILED
    begin_final(sweep, chosen)
    folder = sweep.folder(FINAL)
    open_point(folder, chosen.final, shared=chosen.shared)
    (folder.path / "slurm").mkdir(exist_ok=True)
    replace_text(folder.path / "slurm" / RECIPE_FILE, dump_recipe(chosen.final))
    log_to_mlflow(sweep, record, status="RUNNING")
    return 0


def sum_up(sweep: Sweep, record: SweepRecord) -> int:
    """Report to MLflow whether the final run is done; returns the exit code."""
    is_done = record.final is not None and record.final.state == "done"
    log_to_mlflow(sweep, record, status="FINISHED" if is_done else "FAILED")
    return 0 if is_done else EXIT_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two jobs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shardvit.launch.sweep.step", description="Choose, or sum up, in a sweep."
    )
    parser.add_argument("root", type=Path, help="RUNS/NAME-sweep")
    parser.add_argument("--do", required=True, choices=("choose", "sum-up"))
    options = parser.parse_args(arguments)
    try:
        sweep = read_sweep(options.root)
        # No run is active any more, so any that is not done has failed.
        failed = {point.name: "it is not done, see its log" for point in sweep.points}
        best = choose(make_record(sweep, failed=failed).points)
        chosen = next((point for point in sweep.points if best and point.name == best.name), None)
        record = make_record(sweep, failed=failed, chosen=chosen)
        record.write(sweep.root)
        print(as_table(record), flush=True)
        return (prepare_final if options.do == "choose" else sum_up)(sweep, record)
    except (UserError, OSError) as error:
        say(str(error))
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
