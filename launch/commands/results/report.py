"""`shardvit report` and `shardvit compare`: flags and default locations. Heavy imports are lazy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import Force, demand_target, page_mark
from shardvit.pipeline.recipe.vocabulary import PAGE_FILE

if TYPE_CHECKING:
    from shardvit.pipeline.runs.read import Run

PageFile = Annotated[
    Path | None,
    Parameter(
        name="--output",
        help="File to write; default of report: RUN/report.html, of several runs report.html beside them; of compare: "
        "no page.",
    ),
]
NoDraw = Annotated[
    bool,
    Parameter(
        name="--no-draw", negative="", help="Show the pictures that are there; draw none that the run has not drawn."
    ),
]


def report(*runs: Path, output: PageFile = None, no_draw: NoDraw = False, force: Force = False) -> int:
    """Write a run's results, curves, pictures and tables as one offline HTML page.

    RUN is the folder of a run that is training or has trained, RUNS/NAME.
    Several runs are overlaid, with the differences between their recipes.

    Some examples:
        shardvit report runs/digits
        shardvit report runs/digits runs/digits-scratch --output compared.html
    """
    from shardvit.launch.pages.sections import default_place, drawn, write_runs

    histories = _histories(runs, least=1)
    place = _place(output or default_place(histories))
    own = histories[0].folder.path / PAGE_FILE
    demand_target(place, flag="--output", force=force, mark=page_mark("report"), own_place=own)
    if not no_draw:
        histories = drawn(histories)
    print(f"report  {write_runs(histories, output=place)}")
    return 0


def compare(*runs: Path, output: PageFile = None, no_draw: NoDraw = False, force: Force = False) -> int:
    """Compare runs' recipes, metrics and curves, here or as a page.

    The others are compared with the first run.

    Some examples:
        shardvit compare runs/digits runs/digits-scratch
        shardvit compare runs/a runs/b runs/c --output abc.html
    """
    if output is None and (no_draw or force):
        raise UserError("--no-draw, --force: they are about the page that --output names; give that too")
    histories = _histories(runs, least=2)
    output = output and _place(output)
    demand_target(output, flag="--output", force=force, mark=page_mark("report"))
    from shardvit.launch.pages.compare import comparison
    from shardvit.launch.pages.sections import drawn, named, write_runs

    print(comparison(named(histories)))
    if output is not None:
        histories = histories if no_draw else drawn(histories)
        print(f"\nreport  {write_runs(histories, output=output)}")
    return 0


def _place(path: Path) -> Path:
    return path / PAGE_FILE if path.is_dir() else path


def _histories(runs: Sequence[Path], *, least: int) -> list[Run]:
    from shardvit.pipeline.runs.read import read_run, run_folder_at

    if len(runs) < least:
        raise UserError("give the folders of two runs or more" if least > 1 else "give a run's folder, RUNS/NAME")
    folders = [run_folder_at(run) for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder.path} is given twice: leave one out")
    return [read_run(folder) for folder in folders]
