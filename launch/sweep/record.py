"""Read the points' results from their run folders, choose one, and write sweep.json.

The rule: the best held-out score of the swept stage's last evaluation (top-1; masked patch prediction: accuracy), at
equal scores the lower held-out loss, then the earlier point. A point that failed, or whose score or loss is not
finite, is shown and not chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_shards.durable import replace_text
from data_shards.text import parse_json, table
from launch.local.env import experiment_name, tracking_uri
from launch.sweep.points import FINAL, Point, Sweep
from launch.sweep.worth import beyond, standard_error
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import SWEEP_FILE, StageName
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.facts import RunStatus

RULE = "the best held-out score; at equal scores the lower loss, then the first"
_SCORES = ("top1", "accuracy")
_MOST_NAMED = 4

PointState = Literal["new", "begun", "done", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How far one run is, and what its swept stage (or the final run's) reached."""

    name: str
    values: Mapping[str, str]
    state: PointState
    why: str = ""  # it failed
    score: float | None = None
    loss: float | None = None
    images: int = 0  # on which they were measured
    seconds: float = 0.0  # of training, over all attempts
    balanced_accuracy: float | None = None
    commonest: float | None = None  # the share of the commonest class among the images


def outcome(
    folder: RunFolder, recipe: Recipe, *, stage: StageName, values: Mapping[str, str], failed: str = ""
) -> Outcome:
    """A run's state and results, those of the weights that become its model; `failed`: why it ended, if it did not end
    well."""
    config = recipe.train_stage(stage)
    record = folder.peek(stage)
    results = record.results
    score = next((results[key] for name in _SCORES if (key := config.judged_by(name)) in results), None)
    loss = results.get(config.judged_by("loss"))
    seconds = record.seconds
    if record.state != "done":
        state: PointState = "failed" if failed else "begun" if folder.path.exists() and record.state != "new" else "new"
        return Outcome(folder.name, values, state, why=failed, seconds=seconds)
    measured = {"score": score, "loss": loss, "images": int(results.get("val/images", 0)), "seconds": seconds}
    measured["balanced_accuracy"] = results.get(config.judged_by("balanced_accuracy"))
    measured["commonest"] = results.get("val/commonest_class_share")
    if score is None or loss is None or not (math.isfinite(score) and math.isfinite(loss)):
        return Outcome(folder.name, values, "failed", "its held-out score or loss is not finite", **measured)
    return Outcome(folder.name, values, "done", **measured)


def choose(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The best of those that are done; None: none is."""
    done = [one for one in outcomes if one.state == "done"]  # those have both
    return max(done, key=lambda one: (one.score or 0.0, -(one.loss or 0.0)), default=None)


@dataclass(frozen=True)
class SweepRecord:
    """sweep.json."""

    recipe: str  # its name
    stage: StageName
    hold_out: float
    grid: Mapping[str, Sequence[str]]
    points: Sequence[Outcome]
    chosen: str | None = None  # a point's name; None: not yet
    final: Outcome | None = None

    def write(self, root: Path) -> None:
        """Replace sweep.json atomically; OSError: the disk is full or fails."""
        tree = {"version": 1, "rule": RULE, **asdict(self)}
        for one in (*tree["points"], tree["final"] or {}):  # JSON has no NaN
            one.update(
                {key: str(value) for key, value in one.items() if isinstance(value, float) and not math.isfinite(value)}
            )
        replace_text(root / SWEEP_FILE, json.dumps(tree, indent=1) + "\n")


def failures(root: Path) -> dict[str, str]:
    """Why points failed when the sweep was last run: name -> reason; none if sweep.json is missing or damaged."""
    try:
        tree: Any = parse_json((root / SWEEP_FILE).read_text(encoding="utf-8"))
        return {str(one["name"]): str(one["why"]) for one in tree["points"] if one["state"] == "failed"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def make_record(sweep: Sweep, *, failed: Mapping[str, str], chosen: Point | None = None) -> SweepRecord:
    """The sweep as its run folders have it now; `failed`: why points ended."""
    points = [
        outcome(
            sweep.folder(each.name),
            each.recipe,
            stage=sweep.stage,
            values=each.values,
            failed=failed.get(each.name, ""),
        )
        for each in sweep.points
    ]
    final = None
    if chosen is not None:
        last = chosen.final.stages.names[-1]  # which trains: swap_head never comes last
        final = outcome(
            sweep.folder(FINAL), chosen.final, stage=last, values=chosen.values, failed=failed.get(FINAL, "")
        )
    grid = {axis.key: axis.values for axis in sweep.axes}
    name = None if chosen is None else chosen.name
    return SweepRecord(sweep.name, sweep.stage, sweep.hold_out, grid, points, chosen=name, final=final)


def as_table(record: SweepRecord) -> str:
    """The points with their results, the chosen one marked, the rule, what the choice is worth, and the final run."""
    keys = list(record.grid)
    rows = [(*keys, "held-out score", "balanced accuracy", "loss", "seconds", "")]
    for one in record.points:
        mark = (
            "chosen"
            if one.name == record.chosen
            else {"failed": f"failed: {one.why}", "begun": "begun"}.get(one.state, "")
        )
        measured = (_number(one.score), _number(one.balanced_accuracy), _number(one.loss), f"{one.seconds:.1f}")
        rows.append((*(one.values[key] for key in keys), *measured, mark))
    images = max((one.images for one in record.points), default=0)
    commonest = next((one.commonest for one in record.points if one.commonest is not None), None)
    of_one_class = "" if commonest is None else f", {100 * commonest:.1f} % of them of the commonest class"
    lines = [
        table(rows, align="lr", heading="ruled"),
        f"Held out: {images:,} images, {100 * record.hold_out:g} % of {record.stage}'s training set{of_one_class}. "
        f"Chosen: {RULE}.",
        *_worth(record),
    ]
    if record.final is not None and record.final.state == "done":
        final = record.final
        values = ", ".join(f"{key}={value}" for key, value in final.values.items())
        beside = zip(("balanced accuracy", "commonest class"), (final.balanced_accuracy, final.commonest), strict=True)
        known = "".join(f", {name} {value:.4f}" for name, value in beside if value is not None)
        lines.append(
            f"Final run with {values}, on all training images: score {_number(final.score)}{known}, loss "
            f"{_number(final.loss)} on the {final.images:,} images of its evaluation set."
        )
    return "\n".join(lines)


def _worth(record: SweepRecord) -> list[str]:
    """Say which points tie within the standard error, and whether the best may lie outside the grid."""
    best = choose(record.points)
    if best is None or best.score is None or not best.images:
        return []
    lines, error = list[str](), standard_error(best.score, images=best.images)
    alike = [one.name for one in record.points if one.state == "done" and best.score - (one.score or 0.0) <= error]
    if len(alike) > 1:
        names = ", ".join(alike[:_MOST_NAMED]) + (" and others" if len(alike) > _MOST_NAMED else "")
        lines.append(
            f"{len(alike)} of {len(record.points)} points tie ({names}): they are within the standard error of the "
            f"best score, {error:.4f} on {best.images:,} images; a larger --hold-out may tell them apart."
        )
    for key in record.grid:
        if (further := beyond({one.values[key] for one in record.points}, best.values[key])) is not None:
            edge = f"The best {key}, {best.values[key]}, lies at the edge of the grid"
            lines.append(f"{edge}: a better one may lie beyond it; add {further}, as `shardvit sweep --widen` does.")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def tell(sweep: Sweep, record: SweepRecord, *, status: RunStatus) -> None:
    """Bring the sweep's own MLflow run, the parent of its runs, up to date; says what goes wrong, raises nothing."""
    from launch.local.output import say
    from pipeline.tracking.command_runs import SweepNews, log_sweep

    chosen = next((one for one in record.points if one.name == record.chosen), None)
    # All as tags: grid and share may change, and MLflow's params never do.
    tags = {"sweep.stage": record.stage, "sweep.recipe": record.recipe, "sweep.hold_out": f"{record.hold_out:g}"}
    tags |= {f"sweep.{key}": ",".join(values) for key, values in record.grid.items()}
    metrics: dict[str, float] = {}
    if chosen is not None:
        tags |= {"sweep.chosen": chosen.name, **{f"sweep.chosen.{key}": text for key, text in chosen.values.items()}}
        metrics |= _metrics(chosen, prefix="sweep/chosen")
    points = {sweep.folder(one.name).path: _metrics(one, prefix="sweep/held_out") for one in record.points}
    if record.final is not None:
        metrics |= _metrics(record.final, prefix="sweep/final")
        points[sweep.folder(FINAL).path] = _metrics(record.final, prefix="sweep/final")
    news = SweepNews(
        folder=sweep.root,
        tags=tags,
        metrics=metrics,
        points={folder: values for folder, values in points.items() if values},
        status=status,
    )
    experiment = experiment_name() or sweep.points[0].final.experiment
    log_sweep(news, tracking_uri=tracking_uri(), experiment=experiment, say=say)


def _metrics(one: Outcome, *, prefix: str) -> dict[str, float]:
    values = {"score": one.score, "loss": one.loss, "balanced_accuracy": one.balanced_accuracy}
    return {f"{prefix}_{name}": value for name, value in values.items() if value is not None and math.isfinite(value)}
