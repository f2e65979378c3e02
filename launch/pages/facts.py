"""Put a run's results into numbers and words, for `report` and `compare`. Trusts no record; needs no torch."""

import math
import re
from dataclasses import dataclass

from shardvit.data_shards.text import show_duration
from shardvit.launch.pages.blocks import PageCell, PageTable, ShownNumber
from shardvit.launch.pages.curves import metric_words, short, unit_of
from shardvit.pipeline.pictures.paper.measured_runs import held_out_name
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import METRICS, OWN_SET, StageName
from shardvit.pipeline.report.best import SCORES
from shardvit.pipeline.runs.read import Run, RunStage

_HEADS = ("mlp", "linear")
BESIDE_SCORE = ("balanced accuracy", "commonest class")  # table columns
_BALANCED, _COMMONEST = "balanced_accuracy", "commonest_class_share"
_FIRST_METRICS = ("images", "top1", "ema_top1", "accuracy", "ema_accuracy", _BALANCED, _COMMONEST, "top5", "loss")
_FEW_SHOT = re.compile(r"fewshot_(.+)_(\d+)shot")
_MOST_OTHER_SETS = 2  # in the headline
_SAID_SHARE = re.compile(r"(\btop-1|\baccuracy|\d-shot)((?: was)? )([01]\.\d{2,})")


@dataclass(frozen=True)
class StageResult:
    """Score and progress of a stage; None: unknown, or not started."""

    images_seen: int
    image_size: int | None
    score: float | None  # top-1 or accuracy of the final model's weights
    best: float | None  # best score during training
    best_step: int | None
    loss: float | None
    beside: tuple[float | None, ...]  # baselines for a top-1, as in `BESIDE_SCORE`


def stage_result(history: Run, stage: RunStage) -> StageResult:
    """The stage's recorded evaluation; for an unfinished stage, the curve's last one."""
    record, config = stage.record, train_config(history.recipe, stage.name)
    by, known = score_name(history.recipe, stage), reached(stage)
    points = [(value, -step) for step, value in stage.points(by) if math.isfinite(value)]
    best, best_step = max(points, default=(None, None))
    return StageResult(
        record.images_seen if record.state == "done" or not stage.rows else stage.rows[-1].images_seen,
        None if config is None else config.image_size,
        known.get(by),
        best,
        None if best_step is None else -best_step,
        known.get(f"{by.partition('/')[0]}/{'ema_' if '/ema_' in by else ''}loss"),
        (known.get(f"{by.removesuffix('top1')}{_BALANCED}"), known.get(f"{OWN_SET}/{_COMMONEST}")),
    )


def reached(stage: RunStage) -> dict[str, float]:
    """Last value of each metric; the record overrides the curve."""
    return {**stage.latest, **stage.record.results}


def score_name(recipe: Recipe | None, stage: RunStage) -> str:
    """Metric that judges the stage: val/top1, val/accuracy, or their moving-average versions."""
    config, present = train_config(recipe, stage.name), reached(stage)
    for key in SCORES:
        name = key if config is None else config.judged_by(key.partition("/")[2])
        if name in present or key in present:
            return name if name in present else key
    return "val/top1"


def train_config(recipe: Recipe | None, stage: StageName) -> TrainStage | None:
    """The stage's recipe section, if it trains."""
    return recipe.train_stage(stage) if recipe is not None and stage in recipe.stages.trained else None


def last_trained(history: Run) -> RunStage | None:
    """Last stage with a held-out score, or else with a curve."""
    trained = [stage for stage in history.stages if stage.name != "swap_head" and (stage.rows or stage.record.results)]
    judged = [stage for stage in trained if stage_result(history, stage).score is not None]
    return next(reversed(judged or trained), None)


def held_out_fact(history: Run) -> tuple[str, str] | None:
    """Last held-out score and its label; None if there is none yet."""
    stage = last_trained(history)
    if stage is None or (result := stage_result(history, stage)).score is None:
        return None
    images = reached(stage).get("val/images")
    of = f" ({images:,.0f} images)" if images and math.isfinite(images) else ""
    beside = zip(BESIDE_SCORE, result.beside, strict=True)
    known = "".join(f"; {what} {show_share(value)}" for what, value in beside if value is not None)
    return show_share(result.score), f"held-out {_score_word(history, stage)} after {stage.name}{of}{known}"


def _score_word(history: Run, stage: RunStage) -> str:
    return SCORES.get(score_name(history.recipe, stage).replace("/ema_", "/"), "score")


def held_out(stage: RunStage) -> dict[str, dict[str, float]]:
    """Last metrics of each held-out set (the stage's own, "val", first), by set and metric."""
    found: dict[str, dict[str, float]] = {OWN_SET: {}}
    for name, value in reached(stage).items():
        group, _, metric = name.partition("/")
        if few := _FEW_SHOT.fullmatch(metric):
            group, metric = f"{OWN_SET}_{few[1]}, {few[2]}-shot", "top1"
        if group.partition("_")[0] == OWN_SET:
            found.setdefault(group.removeprefix(f"{OWN_SET}_"), {})[metric] = value
    return {name: metrics for name, metrics in found.items() if metrics}


def set_label(history: Run, stage: StageName, name: str = OWN_SET) -> str:
    """Name a held-out set on the page; the stage's own by the last two folders of its location."""
    return held_out_name(history, stage=stage) if name == OWN_SET else name


def describe_model(recipe: Recipe) -> str:
    """Describe briefly: "ViT-B/16", "ViT 64 wide, 6 deep, patches of 4 px"."""
    model = recipe.model
    if model.variant is not None:
        return model.variant if model.variant.startswith("R") else f"ViT-{model.variant}"
    if model.custom is not None:
        return f"own model {model.custom.rpartition(':')[2]}"
    if model.kind == "resnet":
        return f"ResNet {'-'.join(map(str, model.resnet.layers))}"
    sizes = model.sizes
    stem = "" if model.resnet_layers is None else ", convolutional stem"
    return f"ViT {sizes.width} wide, {sizes.depth} deep, patches of {sizes.patch_size} px{stem}"


def parameters(history: Run, stage: RunStage) -> int | None:
    """Count the parameters of the stage's model, including its head; None if the record is incomplete."""
    from shardvit.model.counting.flops import account

    saved = stage.record.model
    head, classes, size = saved.get("head"), saved.get("num_classes"), saved.get("image_size")
    if history.recipe is None or not isinstance(classes, int) or not isinstance(size, int) or head not in _HEADS:
        return None
    try:
        return account(history.recipe.model, image_size=size, num_classes=classes, head=head).parameters
    except (ValueError, OverflowError):
        return None


def headline(history: Run) -> tuple[str, list[tuple[str, str]]]:
    """Return a lead sentence and the headline facts as (value, label)."""
    recipe, stage = history.recipe, last_trained(history)
    done = sum(each.record.state == "done" for each in history.stages)
    state = "finished" if done == len(history.stages) and done else f"{done} of {len(history.stages)} stages done"
    parts = "" if recipe is None else "; ".join(filter(None, (describe_model(recipe), " → ".join(_set_names(recipe)))))
    lead = f"{parts}. {state.capitalize()}."
    if stage is None:
        return lead, []
    score = held_out_fact(history)
    facts = [] if score is None else [score]
    by = score_name(recipe, stage).partition("/")[2]
    others = {name: metrics[by] for name, metrics in held_out(stage).items() if name != OWN_SET and by in metrics}
    for name in sorted(others, key=lambda each: "test" not in each)[:_MOST_OTHER_SETS]:
        facts.append((show_share(others[name]), f"{_score_word(history, stage)} on {name}"))
    seen = sum(stage_result(history, each).images_seen for each in history.stages)
    facts.append((show_count(seen), "images seen, all stages"))
    if seconds := sum(each.record.seconds for each in history.stages):
        facts.append((show_duration(seconds), "training, evaluation and saving"))
    if speeds := sorted(value for _, value in stage.points("perf/images_per_s") if math.isfinite(value)):
        facts.append((show_count(speeds[len(speeds) // 2]), f"images/s in {stage.name}, the median"))
    if (count := parameters(history, stage)) is not None:
        facts.append((show_count(count), "parameters"))
    return lead, facts


def stage_brief(history: Run, stage: RunStage) -> str:
    """Summarise a stage's result, images seen and time."""
    result = stage_result(history, stage)
    parts = [f"{show_share(result.score)} {_score_word(history, stage)}"] if result.score is not None else []
    state = [] if stage.record.state == "done" else [stage.record.state]
    return ", ".join([*parts, *state, f"{result.images_seen:,} images seen", show_duration(stage.record.seconds)])


def held_out_table(history: Run) -> PageTable | None:
    """Tabulate held-out results with all available metrics, last stage first; None if there are none."""
    found = [(stage, *each) for stage in reversed(history.stages) for each in held_out(stage).items()]
    names = {metric for *_, metrics in found for metric in metrics}
    shown = dict.fromkeys([*_FIRST_METRICS, *(name.removeprefix(f"{OWN_SET}/") for name in METRICS), *sorted(names)])
    columns = [name for name in shown if name in names]
    rows: list[list[PageCell]] = []
    for stage, name, metrics in found:
        cells = [metric_cell(metrics.get(each), name=f"{OWN_SET}/{each}") for each in columns]
        rows.append([stage.name, set_label(history, stage.name, name), *cells])
    heads = ("stage", "held-out set", *map(metric_words, columns))
    return PageTable(heads, rows, title="Held-out sets") if rows else None


def stage_table(history: Run) -> PageTable:
    """Tabulate the stages, last one first."""
    columns = ("stage", "state", "images seen", "time", "resolution", "best score", "after step")
    rows: list[list[PageCell]] = []
    for stage in reversed(history.stages):
        result, record = stage_result(history, stage), stage.record
        seen, size = (None, None) if result.image_size is None else (result.images_seen, result.image_size)
        resolution = None if size is None else ShownNumber(f"{size} px", size)
        took, best = duration_cell(record.seconds), metric_cell(result.best)
        rows.append([stage.name, record.state, seen, took, resolution, best, result.best_step])
    return PageTable(columns, rows, title="Stages")


def duration_cell(seconds: float) -> PageCell:
    """Make a table cell for a duration, sorted by seconds."""
    return ShownNumber(show_duration(seconds), seconds)


def metric_cell(value: float | None, *, name: str = "val/top1") -> PageCell:
    """Make a table cell for a metric, by default a score; shares in per cent."""
    return value if value is None or unit_of(name) != "share" else ShownNumber(show_share(value), value)


def show_share(value: float) -> str:
    """Format a share in per cent, as everywhere on the page."""
    return f"{100 * value:.2f} %" if math.isfinite(value) else "not a number"


def in_per_cent(said: str) -> str:
    """Rewrite scores in a log line in the page's format."""
    return _SAID_SHARE.sub(lambda found: f"{found[1]}{found[2]}{show_share(float(found[3]))}", said)


def show_count(value: float) -> str:
    """Format with three digits: 512, 51.2 k, 1.28 M."""
    return f"{value:,.0f}" if abs(value) < 1e4 else short(value, digits=3)


def _set_names(recipe: Recipe) -> list[str]:
    names: list[str] = []
    for stage in recipe.stages.trained:
        sets = recipe.train_stage(stage).train or ()
        names.append(" + ".join(_short_name(each.shards) for each in sets) or "no shards")
    return list(dict.fromkeys(names))


def _short_name(shards: str) -> str:
    parts = [part for part in shards.split("/") if part] or [shards]
    return parts[-2] if len(parts) > 1 and parts[-1] in ("train", "val", "test") else parts[-1]
