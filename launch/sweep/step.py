"""A sweep's jobs that train nothing: choose a point and prepare the final run, and sum up at the end.

    python -m launch.sweep.step RUNS/NAME-sweep --do choose
    python -m launch.sweep.step RUNS/NAME-sweep --do sum-up

Exit code 0; 1: no point can be chosen, or the final run is not done; 2: the folder is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_shards.durable import replace_text
from data_shards.errors import UserError
from launch.local.output import say
from launch.sweep.local import begin_final
from launch.sweep.points import FINAL, Sweep, link_earlier
from launch.sweep.record import SweepRecord, as_table, choose, make_record, tell
from launch.sweep.stored import read_sweep
from pipeline.recipe.io import dump_recipe
from pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_USER_ERROR, RECIPE_FILE


def choose_point(sweep: Sweep, record: SweepRecord) -> int:
    """Choose among the points, and make the final run's folder."""
    chosen = next((point for point in sweep.points if point.name == record.chosen), None)
    if chosen is None:
        tell(sweep, record, status="FAILED")
        say(f"none of the {len(sweep.points)} points can be chosen, see the table; their runs are in {sweep.root}")
        return EXIT_FAILED
    begin_final(sweep, chosen)
    folder = sweep.folder(FINAL)
    link_earlier(folder, chosen.final, earlier=chosen.earlier)
    (folder.path / "slurm").mkdir(exist_ok=True)
    replace_text(folder.path / "slurm" / RECIPE_FILE, dump_recipe(chosen.final))
    tell(sweep, record, status="RUNNING")
    return 0


def sum_up(sweep: Sweep, record: SweepRecord) -> int:
    """True if the final run is done."""
    done = record.final is not None and record.final.state == "done"
    tell(sweep, record, status="FINISHED" if done else "FAILED")
    return 0 if done else EXIT_FAILED


def record_of(sweep: Sweep) -> SweepRecord:
    """The sweep as its runs are now, when none of them is at work: those that are not done have failed."""
    failed = {point.name: "it is not done, see its log" for point in sweep.points}
    best = choose(make_record(sweep, failed=failed).points)
    chosen = None if best is None else next(point for point in sweep.points if point.name == best.name)
    return make_record(sweep, failed=failed, chosen=chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one of the two."""
    parser = argparse.ArgumentParser(prog="python -m launch.sweep.step", description="Choose, or sum up, in a sweep.")
    parser.add_argument("root", type=Path, help="RUNS/NAME-sweep")
    parser.add_argument("--do", required=True, choices=("choose", "sum-up"))
    options = parser.parse_args(arguments)
    try:
        sweep = read_sweep(options.root)
        record = record_of(sweep)
        record.write(sweep.root)
        print(as_table(record), flush=True)
        return (choose_point if options.do == "choose" else sum_up)(sweep, record)
    except (UserError, OSError) as error:
        say(str(error))
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
