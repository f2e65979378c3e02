"""Write the page of one run or several: results, stages from the last, recipe, environment, commands.

Shows everything readable; notes at the top list the rest.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import open_inside, read_inside
from shardvit.data_shards.text import one_line, parse_json, printable
from shardvit.launch.local.output import say
from shardvit.launch.pages.blocks import PageBlock, PageCell, PageSection, PageTable, PageText
from shardvit.launch.pages.curves import DATA_BYTES, metric_words, stage_charts
from shardvit.launch.pages.facts import (
    BESIDE_SCORE,
    duration_cell,
    headline,
    held_out_fact,
    held_out_table,
    metric_cell,
    stage_brief,
    stage_result,
    stage_table,
)
from shardvit.launch.pages.kept import LONG_TABLE, MOST_ROWS, figures_across, pictures_beside, stage_pictures
from shardvit.launch.pages.page import Page, render_page
from shardvit.launch.pages.timeline import event_table, time_line
from shardvit.model.formats.export import formats_of
from shardvit.pipeline.checkpoint.identity import STATE
from shardvit.pipeline.recipe.io import differences, dump_recipe, flatten
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, DIFFERENCE_FILE, PAGE_FILE, RECIPE_FILE, StageName
from shardvit.pipeline.runs.read import Run, read_run
from shardvit.pipeline.runs.run_folder import RunFolder, checkpoint_folders
from shardvit.pipeline.stage.initial_model import stage_model
from shardvit.pipeline.transfer.results import TransferRecord, transfer_records

_MOST_TEXT_BYTES = 100_000
_ONE_RUN = "Lines are training, lines with dots held-out images. Dotted rules mark restarts and trouble."
_OVER_ONE_ANOTHER = "Pale lines are training, lines with dots held-out images; a colour and its dashes are one run."


def run_page(history: Run, *, everyone: Mapping[str, Run] = MappingProxyType({})) -> Page:
    """Make the page of one run; `everyone` (runs by name, this one first) adds a section comparing their stages."""
    notes = list(history.notes)
    lead, facts = headline(history)
    sections = [
        _results(history, everyone, notes=notes),
        *_stages(history, notes=notes),
        *_beside(everyone, notes=notes),
        _recipe(history),
        _environment(history),
        _commands(history),
    ]
    foot = f"Made by shardvit report from {history.folder.path}."
    return render_page(history.name, lead=lead, facts=facts, sections=sections, notes=notes, foot=foot)


def runs_page(runs: Mapping[str, Run]) -> Page:
    """Make the page comparing several runs, by name."""
    notes = [f"{name}: {note}" for name, history in runs.items() for note in history.notes]
    lines = [time_line(history, title=f"Time line of {name}") for name, history in runs.items()]
    tables = [*_comparison_tables(runs), *_transfer(runs)]
    sections = [
        PageSection("Results", [*tables, *(line for line in lines if line is not None)]),
        PageSection("Recipes", [_recipe_table(runs)]),
        *(
            PageSection(stage, curves, intro=_OVER_ONE_ANOTHER, state="closed" if number else "open")
            for number, (stage, curves) in enumerate(_curves(runs, notes=notes))
        ),
        PageSection("The paper's figures of these runs", figures_across(runs, notes=notes), state="closed"),
        pictures_beside(runs, notes=notes),
    ]
    scores = {name: score for name, history in runs.items() if (score := held_out_fact(history)) is not None}
    return render_page(
        " · ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs",
        lead=f"{len(runs)} runs over one another.",
        facts=[(score, f"{name}: {what}") for name, (score, what) in scores.items()],
        legend=list(runs),
        sections=sections,
        notes=notes,
        foot=f"Made by shardvit report from {', '.join(str(history.folder.path) for history in runs.values())}.",
    )


def write_runs(runs: Sequence[Run], *, output: Path | None = None) -> Path:
    """Write the page of one run or several, and return its path. UserError if that fails."""
    page = run_page(runs[0]) if len(runs) == 1 else runs_page(named(runs))
    return _written(page, output or default_place(runs))


def write_beside(folder: RunFolder, *, others: Sequence[RunFolder]) -> Path:
    """Draw missing pictures, and write a run's page with its stages compared to `others`. UserError if that fails."""
    runs = drawn([read_run(each) for each in (folder, *others)])
    return _written(run_page(runs[0], everyone=named(runs)), default_place(runs[:1]))


def drawn(runs: Sequence[Run]) -> list[Run]:
    """Draw the pictures training did not, and return the runs."""
    from shardvit.pipeline.pictures.drawing import draw_missing

    for run in runs:
        try:
            draw_missing(run.folder, say=say)
        except (UserError, OSError) as error:  # the page lists what cannot be read
            say(f"{run.folder.path}: nothing is drawn ({error})")
    return list(runs)


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Key runs by name, or all by folder if names repeat."""
    by_name = {run.name: run for run in runs}
    return by_name if len(by_name) == len(runs) else {str(run.folder.path): run for run in runs}


def default_place(runs: Sequence[Run]) -> Path:
    """RUN/report.html; for several runs, report.html in their common folder."""
    common = Path(os.path.commonpath([run.folder.path.absolute() for run in runs]))
    return (common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common) / PAGE_FILE


def _written(page: Page, file: Path) -> Path:
    for note in page.notes:
        say(note)
    return page.write(file, command="report")


# ---- results and curves ----


def _results(history: Run, everyone: Mapping[str, Run], *, notes: list[str]) -> PageSection:
    blocks: list[PageBlock | None] = [held_out_table(history)]
    blocks += _comparison_tables(everyone, only=_shared(everyone))
    blocks += [*_transfer({"": history}), stage_table(history)]
    try:
        blocks += [time_line(history, title="Time line"), event_table(history)]
    except (ValueError, OverflowError, OSError) as error:  # a hostile file's times
        notes.append(one_line(f"the time line cannot be drawn ({error})"))
    return PageSection("Results", [block for block in blocks if block is not None])


def _stages(history: Run, *, notes: list[str]) -> list[PageSection]:
    curves, sections = dict(_curves({"": history}, notes=notes)), list[PageSection]()
    for stage in reversed(history.stages):
        blocks = [*curves.get(stage.name, ()), *stage_pictures(history, stage, notes=notes)]
        if blocks:
            intro, state = _ONE_RUN if stage.name in curves else "", "closed" if sections else "open"
            if intro and any(event.kind == "image_size" for event in stage.events):
                intro += " Some rules mark where the images grow."
            sections.append(PageSection(stage.name, blocks, intro, stage_brief(history, stage), state))
    return sections


def _curves(
    runs: Mapping[str, Run], *, notes: list[str], only: Sequence[StageName] = ALL_STAGES
) -> list[tuple[StageName, list[PageBlock]]]:
    present = {stage.name for history in runs.values() for stage in history.stages if stage.rows}
    stages: list[StageName] = [name for name in reversed(only) if name in present]
    found: list[tuple[StageName, list[PageBlock]]] = []
    for name in stages:
        of_runs = {run: stage for run, history in runs.items() if (stage := history.stage(name)) is not None}
        key, title, room = f"{name}-{len(runs)}", f"Curves of {name}", DATA_BYTES // len(stages)
        try:
            block, zero = stage_charts(of_runs, key=key, title=title, runs=list(runs), data_bytes=room)
        except (ValueError, OverflowError) as error:  # numbers of a hostile file
            notes.append(one_line(f"the curves of {name} cannot be drawn ({error})"))
            continue
        blocks: list[PageBlock] = [] if block is None else [block]
        if zero and len(runs) == 1:
            blocks.append(PageText(f"Always zero, and not drawn: {', '.join(each.lower() for each in zero)}.", "note"))
        found.append((name, blocks))
    return found


def _shared(runs: Mapping[str, Run]) -> list[StageName]:
    """Stages with curves in at least two runs."""
    counts = [stage.name for history in runs.values() for stage in history.stages if stage.rows]
    return [name for name in ALL_STAGES if counts.count(name) > 1]


def _beside(runs: Mapping[str, Run], *, notes: list[str]) -> list[PageSection]:
    shared, (_, *others) = _shared(runs), runs or [""]
    if not shared:
        return []
    blocks = [block for _, of_stage in _curves(runs, notes=notes, only=shared) for block in of_stage]
    blocks += [_recipe_table(runs), *figures_across(runs, notes=notes)]
    return [PageSection(f"Beside {', '.join(others)}", blocks, intro=_OVER_ONE_ANOTHER, state="closed")]


def _transfer(runs: Mapping[str, Run]) -> list[PageBlock]:
    rows: list[list[PageCell]] = []
    means: list[list[PageCell]] = []
    first = ("run",) if len(runs) > 1 else ()
    for run, record in ((name, record) for name, history in runs.items() for record in _records(history)):
        name = [run] if first else []
        images = {each.name: each.eval_images for each in record.data_sets}
        at = f"{record.stage or ''}{'' if record.step is None else f', step {record.step:,}'}"
        for score in record.results:
            settings = ", ".join(f"{key} {value}" for key, value in score.settings.items())
            value = metric_cell(score.value, name=f"val/{score.metric}")
            cells = (score.data_set, score.method, settings, at, images.get(score.data_set))
            rows.append([*name, *cells, metric_words(score.metric), value])
        if record.mean is not None:
            means.append([*name, record.name, len(record.data_sets), metric_cell(record.mean)])
    title, blocks = "Transfer to other data", list[PageBlock]()
    if means:
        blocks.append(PageTable((*first, "table", "data sets", "mean"), means, title=f"{title}: tables"))
    if rows:
        columns = (*first, "data set", "method", "settings", "stage", "held-out images", "metric", "value")
        folded = len(rows) > LONG_TABLE
        blocks.append(PageTable(columns, rows[:MOST_ROWS], title=title, folded=folded, highlight="last_column"))
    return blocks


def _records(history: Run) -> list[TransferRecord]:
    try:
        return transfer_records(history.folder.path)
    except (OSError, ValueError, RecursionError):
        return []


# ---- several runs ----


def _recipe_table(runs: Mapping[str, Run]) -> PageBlock:
    rows = recipe_rows(list(runs.values()))
    if rows is None:
        return PageText("A recipe cannot be read: see above.")
    if not rows:
        return PageText("None: the recipes are alike, but for names and keys that do not affect the result.")
    return PageTable(("key", *runs), rows, title="Difference of the recipes")


def recipe_rows(histories: Sequence[Run]) -> list[list[str]] | None:
    """List keys that differ and affect the result, with each run's value; None if a recipe cannot be read."""
    known = [history.recipe for history in histories if history.recipe is not None]
    if len(known) < len(histories):
        return None
    keys = dict.fromkeys(key for other in known[1:] for key in differences(known[0], other) if key != "name")
    leaves = [flatten(recipe) for recipe in known]
    missing = {f"stages.{name}": [getattr(recipe.stages, name) is None for recipe in known] for name in ALL_STAGES}
    missing = {key: absent for key, absent in missing.items() if any(absent) and not all(absent)}
    rows = [[key, *("—" if each else "has it" for each in absent)] for key, absent in missing.items()]
    below = tuple(f"{stage}." for stage in missing)  # a stage missing from a recipe is one line
    return rows + [[key, *(each.get(key, "—") for each in leaves)] for key in keys if not f"{key}.".startswith(below)]


def _comparison_tables(runs: Mapping[str, Run], *, only: Sequence[StageName] = ALL_STAGES) -> list[PageBlock]:
    blocks: list[PageBlock] = []
    for name in reversed(only):
        rows: list[list[PageCell]] = []
        for run, history in runs.items():
            stage = history.stage(name)
            if stage is not None and stage.record.state != "new" and name != "swap_head":
                result = stage_result(history, stage)
                scores = map(metric_cell, (result.score, *result.beside, result.best))
                state, took = stage.record.state, duration_cell(stage.record.seconds)
                rows.append([run, state, result.images_seen, took, *scores, result.best_step, result.loss])
        if rows:
            more = (*BESIDE_SCORE, "best", "after step", "held-out loss")
            columns = ("run", "state", "images seen", "time", "score", *more)
            blocks.append(PageTable(columns, rows, title=f"{name}, run by run"))
    return blocks


# ---- recipe, environment, commands ----


def _recipe(history: Run) -> PageSection:
    recipe = history.recipe
    if recipe is None:
        return PageSection("Recipe", [])
    blocks: list[PageBlock] = []
    if difference := _text(history.folder.path / DIFFERENCE_FILE):
        blocks.append(PageText(difference, "code", title="What was changed of its parent"))
    blocks.append(PageText(dump_recipe(recipe, keys="changed"), "code", title="Keys that differ from their defaults"))
    rows = [[key, value] for key, value in flatten(recipe).items()]
    blocks.append(PageTable(("key", "value"), rows, title="All keys", folded=True))
    return PageSection("Recipe", blocks, state="closed")


def _text(file: Path) -> str:
    """Read a short text file; empty if unreadable."""
    try:
        with open_inside(file, folder=file.parent) as opened:
            return printable(opened.read(_MOST_TEXT_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _environment(history: Run) -> PageSection:
    """Tabulate versions, code revision and host from each stage's newest checkpoint."""
    written: dict[str, dict[str, str]] = {}
    for stage in history.stages:
        try:
            folders = checkpoint_folders(history.folder.checkpoints(stage.name))
            state = parse_json(read_inside(folders[0] / STATE, folder=stage.folder)) if folders else {}
            if by := dict(state.get("written_by", {})):
                identity = state.get("identity", {})
                by |= {key: identity[key] for key in ("processes", "backend", "zero_stage") if key in identity}
                written[stage.name] = {str(key): str(value)[:200] for key, value in by.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
            continue
    shown = {"revision": lambda revision: revision[:12], "time": lambda time: time.replace("T", " ")}
    rows = [
        [name.replace("_", " "), *(shown.get(name, str)(each.get(name, "")) for each in written.values())]
        for name in dict.fromkeys(name for each in written.values() for name in each)
    ]
    blocks = [PageTable(("of the newest checkpoint", *written), rows)] if written else []
    return PageSection("Environment", blocks, state="closed")


def _commands(history: Run) -> PageSection:
    folder, stages = history.folder, history.stages
    paths = (folder.path, folder.path / RECIPE_FILE, folder.runs_root)
    run, recipe, runs = (shlex.quote(str(path)) for path in paths)
    done = {each.name for each in stages if each.record.state == "done"}
    lines: list[str] = []
    if not done or len(done) < len(stages):
        lines += ["# continue", f"shardvit run {recipe} --runs {runs}", "# watch", f"shardvit watch {run}"]
    trained: list[StageName] = (
        [name for name in history.recipe.stages.trained if name in done] if history.recipe else []
    )
    formats = formats_of(stage_model(history.recipe, stage=trained[-1]))[0] if history.recipe and trained else []
    if formats:  # otherwise the model has no classes
        lines += ["# use the model", f"shardvit predict {run} IMAGE_OR_FOLDER", f"shardvit eval {run} SHARDS"]
        first, *others = sorted(formats, key=lambda each: each != "timm")
        lines += [f"shardvit export {run} --format {first}  # or {', '.join(others)}"]
    lines += ["# make this page again", f"shardvit report {run}"]
    return PageSection("Commands to continue", [PageText("\n".join(lines), "code")], state="closed")
