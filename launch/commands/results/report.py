"""`shardvit report` and `shardvit compare`: flags, and where the page is written. Heavy imports are inside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from data_shards.errors import UserError
from launch.local.output import say
from launch.target import Force, demand_target, page_mark
from pipeline.recipe.vocabulary import PAGE_FILE

if TYPE_CHECKING:
    from launch.pages.page import Page
    from pipeline.runs.history import RunHistory
    from pipeline.runs.run_folder import RunFolder

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
    """Write all that is known of a run as one HTML page, which needs no network: results, curves, pictures, tables.

    RUN is a run's folder, RUNS/NAME, of a run that trains or has trained.
    Several runs stand over one another, with the difference of their recipes.

    Some examples:
        shardvit report runs/digits

        shardvit report runs/digits runs/digits-scratch --output compared.html
    """
    histories = _histories(runs, least=1)
    place = _place(output or _default_place(histories))
    own = histories[0].folder.path / PAGE_FILE
    demand_target(place, flag="--output", force=force, mark=page_mark("report"), own_place=own)
    if not no_draw:
        histories = _drawn(histories)
    print(f"report  {write_report(histories, output=place)}")
    return 0


def compare(*runs: Path, output: PageFile = None, no_draw: NoDraw = False, force: Force = False) -> int:
    """Compare runs: the difference of their recipes, their metrics and curves, here and, if asked for, as a page.

    The first run is the one that the others are compared with.

    Some examples:
        shardvit compare runs/digits runs/digits-scratch

        shardvit compare runs/a runs/b runs/c --output abc.html
    """
    if output is None and (no_draw or force):
        raise UserError("--no-draw, --force: they are about the page that --output names; give that too")
    histories = _histories(runs, least=2)
    output = output and _place(output)
    demand_target(output, flag="--output", force=force, mark=page_mark("report"))
    from launch.pages.compare import comparison

    print(comparison(histories, run_names(histories)))
    if output is not None:
        histories = histories if no_draw else _drawn(histories)
        print(f"\nreport  {write_report(histories, output=output)}")
    return 0


def write_report(histories: Sequence[RunHistory], *, output: Path | None = None) -> Path:
    """Write the page of these runs and return its path. UserError: it cannot be written there."""
    from launch.pages.sections import run_page, runs_page

    page = run_page(histories[0]) if len(histories) == 1 else runs_page(histories, run_names(histories))
    return _write(page, output or _default_place(histories))


def report_beside(folder: RunFolder, *, others: Sequence[RunFolder]) -> Path:
    """Draw what is missing, write a run's page with its stages beside those of other runs, and return its path.
    UserError: it cannot be written."""
    from launch.pages.sections import run_page
    from pipeline.runs.history import read_history

    histories = _drawn([read_history(each) for each in (folder, *others)])
    page = run_page(histories[0], beside=histories[1:], names=run_names(histories))
    return _write(page, _default_place(histories[:1]))


def _write(page: Page, path: Path) -> Path:
    from data_shards.durable import replace_text

    try:
        replace_text(path, page.html + page_mark("report"), sync="none", writers="several")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give another place with --output") from None
    for note in page.notes:
        say(note)
    return path


def _place(path: Path) -> Path:
    return path / PAGE_FILE if path.is_dir() else path


def run_names(histories: Sequence[RunHistory]) -> list[str]:
    """What the runs are called beside one another: their names, with folders where two have one."""
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        names = [str(history.folder.path) for history in histories]
    return names


def _histories(runs: Sequence[Path], *, least: int) -> list[RunHistory]:
    from pipeline.runs.history import read_history, run_folder_at

    if len(runs) < least:
        raise UserError("give the folders of two runs or more" if least > 1 else "give a run's folder, RUNS/NAME")
    folders = [run_folder_at(run) for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder.path} is given twice: leave one out")
    return [read_history(folder) for folder in folders]


def _drawn(histories: Sequence[RunHistory]) -> list[RunHistory]:
    """The runs, once what their training did not draw is drawn."""
    from pipeline.pictures.drawing import draw_missing

    for history in histories:
        try:
            draw_missing(history.folder, say=say)
        except (UserError, OSError) as error:  # the page says what cannot be read
            say(f"{history.folder.path}: nothing is drawn ({error})")
    return list(histories)


def _default_place(histories: Sequence[RunHistory]) -> Path:
    """RUN/report.html; of several runs report.html in the folder of all of them."""
    common = Path(os.path.commonpath([history.folder.path.absolute() for history in histories]))
    return (common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common) / PAGE_FILE
