"""Draw the pictures due at each moment of a stage, or still missing.

A drawer maps a `DrawRequest` to pictures, reading only files (recipe, shards, STAGE/evaluations, model). Each result is
saved in STAGE/pictures as it comes; a failing drawer loses only its own. drawn.json there records what was drawn.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence

from shardvit.data_shards.durable import make_folders, replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import read_inside, require_inside
from shardvit.data_shards.text import one_line, parse_json, show_duration
from shardvit.pipeline.pictures.style import Drawn, keep_drawn
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import PICTURES_FOLDER, RECIPE_FILE, StageName
from shardvit.pipeline.runs.evaluations import evaluated_step, evaluations
from shardvit.pipeline.runs.pictures import DrawRequest, Moment
from shardvit.pipeline.runs.run_folder import RunFolder

Drawer = Callable[[DrawRequest], Iterable[Drawn]]
Say = Callable[[str], None]

_DRAWN_FILE = "drawn.json"
_LONGEST_REASON = 300
_SHOWN: dict[Moment, str] = {"begin": "beginning", "evaluated": "evaluation", "end": "end"}


def drawers(moment: Moment) -> Sequence[Drawer]:
    """Import the drawers of a moment: begin (data as the model sees it), evaluated (results), end (the model)."""
    if moment != "evaluated":
        from shardvit.model.without_compiler import import_timm

        import_timm()  # before they do
    match moment:
        case "begin":
            from shardvit.pipeline.pictures.training_batch import draw_training_batch

            return (draw_training_batch,)
        case "evaluated":
            from shardvit.pipeline.pictures.accuracy import draw_per_class, draw_per_class_table, draw_reliability
            from shardvit.pipeline.pictures.confusion import draw_confused_pairs, draw_confusion_matrix
            from shardvit.pipeline.pictures.evaluation_grid import draw_evaluation_grid, draw_worst_mistakes

            return (
                draw_evaluation_grid,
                draw_worst_mistakes,
                draw_confused_pairs,
                draw_confusion_matrix,
                draw_reliability,
                draw_per_class,
                draw_per_class_table,
            )
        case "end":
            from shardvit.pipeline.pictures.masked_patches import draw_masked_patches
            from shardvit.pipeline.pictures.paper.model_figures import draw_paper_figures
            from shardvit.pipeline.pictures.reconstructions import draw_reconstructions

            return (draw_paper_figures, draw_masked_patches, draw_reconstructions)


def draw(request: DrawRequest, *, moment: Moment, say: Say) -> None:
    """Draw everything due at a moment; report a failing drawer and continue with the others."""
    begun, at, failed = time.monotonic(), f"{request.stage}, step {request.step}", 0
    for drawer in drawers(moment):
        try:
            keep_drawn(request, drawer(request))
        except Exception as error:  # noqa: BLE001 - a picture is never worth a run
            failed += 1
            reason = one_line(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
            say(f"{at}: {drawer.__name__} failed: {reason}")
    say(f"{at}: what is due at its {_SHOWN[moment]} was drawn in {show_duration(time.monotonic() - begun)}")
    if not failed:
        _note_drawn(request, moment=moment)


def draw_missing(folder: RunFolder, *, say: Say) -> None:
    """Draw what training did not. UserError if the recipe cannot be read, or a model links out of the run."""
    recipe = parse_recipe(folder.path / RECIPE_FILE)
    for stage in recipe.stages.names:
        record = folder.peek(stage)
        if stage == "swap_head" or folder.leads_out(stage) or record.state == "new":
            continue
        require_inside(folder.model(stage), folder=folder.boundary)
        drawn = _drawn(folder, stage=stage)
        due: list[tuple[Moment, int]] = [("begin", 0)]
        kept = [evaluated_step(each) for of_set in evaluations(folder.stage(stage)).values() for each in of_set]
        if newest := max(kept, default=0):
            due.append(("evaluated", newest))
        if record.state == "done":
            due.append(("end", record.total_steps or record.last_saved_step))
        for moment, step in due:
            if drawn.get(moment, -1) < step:
                draw(DrawRequest(folder, recipe, stage, step), moment=moment, say=say)


def _drawn(folder: RunFolder, *, stage: StageName) -> dict[str, int]:
    """Last step drawn at each moment; empty if unreadable: drawing again is harmless."""
    own = folder.stage(stage)
    try:
        record = parse_json(read_inside(own / PICTURES_FOLDER / _DRAWN_FILE, folder=own))
        return {str(moment): int(step) for moment, step in record.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _note_drawn(request: DrawRequest, *, moment: Moment) -> None:
    file = request.stage_folder / PICTURES_FOLDER / _DRAWN_FILE
    drawn = _drawn(request.folder, stage=request.stage)
    make_folders(file.parent, below=request.stage_folder)
    text = json.dumps({**drawn, moment: max(request.step, drawn.get(moment, -1))})
    replace_text(file, text + "\n", sync="none", writers="several")


def request_of(folder: RunFolder, *, stage: str, step: int) -> DrawRequest:
    """Build the request from a run on disk. UserError if the recipe cannot be read or lacks the stage."""
    recipe = parse_recipe(folder.path / RECIPE_FILE)
    for name in recipe.stages.names:
        if name == stage:
            return DrawRequest(folder, recipe, name, step)
    raise UserError(f"{folder.path}: its recipe has no stage {stage}")
