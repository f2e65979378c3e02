"""Judge a sweep's points from their run folders, choose one, write and read sweep.json, format its tables.

The best point has the highest held-out score in the swept stage's last evaluation (top-1; for masked patches accuracy),
then the lower held-out loss, then comes first; masked autoencoders have the loss alone. Points that failed or have a
non-finite score or loss are never chosen.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import read_inside
from shardvit.data_shards.text import printable, table
from shardvit.launch.local.env import experiment_name, tracking_uri
from shardvit.launch.local.output import say
from shardvit.launch.sweep.grid import standard_error, value_beyond
from shardvit.launch.sweep.points import FINAL, Point, Sweep
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.recipe.vocabulary import SWEEP_FILE, StageName
from shardvit.pipeline.runs.read import read_run
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.facts import RunStatus

RULE = "the best held-out score; at equal scores, or without any, the lower loss, then the first"
_SCORES = ("top1", "accuracy")
_MOST_NAMED = 4


@dataclass(frozen=True)
class Outcome:
    """State and result of a run at its swept stage (the final run: at its last stage)."""

    name: str
    values: Mapping[str, str]
    state: Literal["new", "begun", "done", "failed"]
    why: str = ""  # the reason if failed
    score: float | None = None
    loss: float | None = None
    images: int = 0  # evaluated for score and loss
    seconds: float = 0.0  # of training, over all attempts
    balanced_accuracy: float | None = None
    commonest: float | None = None  # the most common class's share of the images


def outcome(
    folder: RunFolder, recipe: Recipe, *, stage: StageName, values: Mapping[str, str], failed: str = ""
) -> Outcome:
    """Read a run's state and the results of the weights that become its model; `failed` is why it ended early."""
    config, record = recipe.train_stage(stage), folder.peek(stage)
    if record.state != "done":
        state = "failed" if failed else "new" if record.state == "new" else "begun"
        return Outcome(folder.name, values, state, why=failed, seconds=record.seconds)
    judged = {name: record.results.get(config.judged_by(name)) for name in (*_SCORES, "loss", "balanced_accuracy")}
    score = next((judged[name] for name in _SCORES if judged[name] is not None), None)
    needed = (judged["loss"],) if isinstance(config, MaskedAutoencoderStage) else (score, judged["loss"])
    is_finite = all(value is not None and math.isfinite(value) for value in needed)
    return Outcome(
        folder.name,
        values,
        "done" if is_finite else "failed",
        why="" if is_finite else "its held-out score or loss is not finite",
        score=score,
        loss=judged["loss"],
        images=int(record.results.get("val/images", 0)),
        seconds=record.seconds,
        balanced_accuracy=judged["balanced_accuracy"],
        commonest=record.results.get("val/commonest_class_share"),
    )


def choose(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the best done point, if any."""
    done = [one for one in outcomes if one.state == "done"]  # has a loss, and a score unless the stage has none
    return max(done, key=lambda one: (one.score or 0.0, -(one.loss or 0.0)), default=None)


@dataclass(frozen=True)
class SweepRecord:
    """sweep.json."""

    recipe: str  # the recipe's name
    stage: StageName
    hold_out: float
    grid: Mapping[str, Sequence[str]]
    points: Sequence[Outcome]
    chosen: str | None = None  # a point's name
    final: Outcome | None = None

    def write(self, root: Path) -> None:
        """Replace sweep.json atomically; OSError if the disk is full or fails."""
        tree = {"version": 1, "rule": RULE, **asdict(self)}
        for one in (*tree["points"], tree["final"] or {}):  # JSON has no NaN
            numbers = {key: value for key, value in one.items() if isinstance(value, float)}
            one.update({key: str(value) for key, value in numbers.items() if not math.isfinite(value)})
        replace_text(root / SWEEP_FILE, json.dumps(tree, indent=1) + "\n")


_RECORD = TypeAdapter(SweepRecord)


def read_record(root: Path) -> SweepRecord:
    """Read sweep.json; UserError if missing or damaged."""
    path = root / SWEEP_FILE
    try:
        record = _RECORD.validate_json(read_inside(path, folder=root))
        if any(Path(one.name).name != one.name for one in record.points):
            raise ValueError("a point's name is no folder's")
        return record
    except (OSError, ValueError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise UserError(f"{path} is missing or damaged ({why}): give the command of the sweep again") from None


def failures(root: Path) -> dict[str, str]:
    """Return why points failed, by name; {} if sweep.json is missing or damaged."""
    try:
        return {one.name: one.why for one in read_record(root).points if one.state == "failed"}
    except UserError:
        return {}


def make_record(sweep: Sweep, *, failed: Mapping[str, str], chosen: Point | None = None) -> SweepRecord:
    """Judge the current run folders; `failed` is why points ended early, by name."""

    def judged(name: str, recipe: Recipe, stage: StageName, values: Mapping[str, str]) -> Outcome:
        return outcome(sweep.folder(name), recipe, stage=stage, values=values, failed=failed.get(name, ""))

    points = [judged(one.name, one.recipe, sweep.stage, one.values) for one in sweep.points]
    final = None
    if chosen is not None:  # its last stage trains: swap_head never comes last
        final = judged(FINAL, chosen.final, chosen.final.stages.names[-1], chosen.values)
    grid = {axis.key: axis.values for axis in sweep.axes}
    return SweepRecord(sweep.name, sweep.stage, sweep.hold_out, grid, points, chosen and chosen.name, final)


def as_table(record: SweepRecord) -> str:
    """Format the points' results, the rule, caveats and the final run."""
    rows = [(*record.grid, "held-out score", "balanced accuracy", "loss", "seconds", "")]
    for one in record.points:
        mark = {"failed": f"failed: {one.why}", "begun": "begun"}.get(one.state, "")
        measured = (_number(one.score), _number(one.balanced_accuracy), _number(one.loss), f"{one.seconds:.1f}")
        values = (one.values[key] for key in record.grid)
        rows.append((*values, *measured, "chosen" if one.name == record.chosen else mark))
    images = max((one.images for one in record.points), default=0)
    commonest = next((one.commonest for one in record.points if one.commonest is not None), None)
    of_one_class = "" if commonest is None else f", {100 * commonest:.1f} % of them of the commonest class"
    lines = [
        table(rows, align="lr", heading="ruled"),
        f"Held out: {images:,} images, {100 * record.hold_out:g} % of {record.stage}'s training set{of_one_class}. "
        f"Chosen: {RULE}.",
        *_caveats(record),
    ]
    if (final := record.final) is not None and final.state == "done":
        values = ", ".join(f"{key}={value}" for key, value in final.values.items())
        measured = {
            "score": final.score,
            "balanced accuracy": final.balanced_accuracy,
            "commonest class": final.commonest,
            "loss": final.loss,
        }
        known = ", ".join(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
        lines.append(
            f"Final run with {values}, on all training images: {known} on the {final.images:,} images of its "
            "evaluation set."
        )
    return "\n".join(lines)


def _caveats(record: SweepRecord) -> list[str]:
    best = choose(record.points)
    if best is None or not best.images:
        return []
    lines = [] if best.score is None else _ties(record, best.score, images=best.images)
    for key in record.grid:
        further = value_beyond({one.values[key] for one in record.points}, best.values[key])
        if further is not None:
            edge = f"The best {key}, {best.values[key]}, lies at the edge of the grid"
            lines.append(f"{edge}: a better one may lie beyond it; add {further}, as `shardvit sweep --widen` does.")
    return lines


def _ties(record: SweepRecord, best: float, *, images: int) -> list[str]:
    error = standard_error(best, images=images)
    alike = [one.name for one in record.points if one.state == "done" and best - (one.score or 0.0) <= error]
    if len(alike) < 2:
        return []
    names = ", ".join(alike[:_MOST_NAMED]) + (" and others" if len(alike) > _MOST_NAMED else "")
    return [
        f"{len(alike)} of {len(record.points)} points tie ({names}): they are within the standard error of the best "
        f"score, {error:.4f} on {images:,} images; a larger --hold-out may tell them apart."
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def show_progress(root: Path, *, form: Literal["text", "json"]) -> str:
    """Format each run's progress, and the choice; UserError if sweep.json is missing or damaged."""
    record = read_record(root)
    runs = {name: _progress(RunFolder(runs_root=root, name=name)) for name in [*(p.name for p in record.points), FINAL]}
    if form == "json":
        states = [{"run": name, **state} for name, state in runs.items()]
        return json.dumps({"sweep": str(root), "runs": states, "chosen": record.chosen}, indent=1)
    values = {one.name: [*one.values.values()] for one in record.points} | {FINAL: [""] * len(record.grid)}
    rows: list[tuple[str, ...]] = [("run", *record.grid, "stage", "state", "saved step", "")]
    for name, state in runs.items():
        rows.append((name, *values[name], *map(str, state.values()), "chosen" if name == record.chosen else ""))
    lines = [f"sweep {root}", table(rows, align="l" * (len(record.grid) + 3) + "rl", heading="ruled")]
    lines += [f"Chosen: {RULE}.", f"More of one run: shardvit watch {root / next(iter(runs))}"]
    return printable("\n".join(lines))


def _progress(folder: RunFolder) -> dict[str, str | int]:
    stages = read_run(folder, parts="records").stages if folder.is_begun() else ()
    stage = next((each for each in stages if each.record.state != "done"), stages[-1] if stages else None)
    if stage is None:
        return {"stage": "", "state": "new", "step": 0}
    return {"stage": stage.name, "state": stage.record.state, "step": stage.record.last_saved_step}


def log_to_mlflow(sweep: Sweep, record: SweepRecord, *, status: RunStatus) -> None:
    """Update the sweep's own MLflow run, the parent of its runs, if `tracking.to` has MLflow; prints a failure."""
    from shardvit.pipeline.tracking.command_runs import log_sweep

    if "mlflow" not in sweep.points[0].final.tracking.to:
        return
    chosen = next((one for one in record.points if one.name == record.chosen), None)
    # Tags, not params, which are immutable in MLflow: grid and share may change.
    tags = {"sweep.stage": record.stage, "sweep.recipe": record.recipe, "sweep.hold_out": f"{record.hold_out:g}"}
    tags |= {f"sweep.{key}": ",".join(values) for key, values in record.grid.items()}
    metrics: dict[str, float] = {}
    if chosen is not None:
        tags |= {"sweep.chosen": chosen.name, **{f"sweep.chosen.{key}": text for key, text in chosen.values.items()}}
        metrics |= _metrics(chosen, prefix="sweep/chosen")
    points = {sweep.folder(one.name).path: _metrics(one, prefix="sweep/held_out") for one in record.points}
    if record.final is not None:
        points[sweep.folder(FINAL).path] = final = _metrics(record.final, prefix="sweep/final")
        metrics |= final
    log_sweep(
        sweep.root,
        tags=tags,
        metrics=metrics,
        points=points,
        status=status,
        tracking_uri=tracking_uri(),
        experiment=experiment_name() or sweep.points[0].final.experiment,
        say=say,
    )


def _metrics(one: Outcome, *, prefix: str) -> dict[str, float]:
    values = {"score": one.score, "loss": one.loss, "balanced_accuracy": one.balanced_accuracy}
    return {f"{prefix}_{name}": value for name, value in values.items() if value is not None and math.isfinite(value)}
