"""`shardvit run --dry-run`: print a summary and the recipe, without torch. Leaves open what depends on missing
shards."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import counted, show_duration
from shardvit.launch.plan.plan_page import UNKNOWN, columns, engine_words, short
from shardvit.launch.plan.shards import ShardsBefore, look
from shardvit.model.formats.export import formats_of
from shardvit.model.vocabulary import SELF_SUPERVISED
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.budget.length import stage_length
from shardvit.pipeline.own_code.by_path import own_digests
from shardvit.pipeline.recipe.duration import parse_duration
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.image_growth import shown
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import stage_model

Keys = Literal["changed", "all"]

_RECENT = 20  # points of an earlier attempt's curve, whose median is its speed
_WORDS = {
    "parameters": "head included",
    "": "= processes x accumulated x micro-batch",
    "time": "at the speed of an earlier attempt, in brackets",
}


def summary(
    recipe: Recipe, *, folder: RunFolder, processes: int, stages: Sequence[StageName], state: Callable[[StageName], str]
) -> str:
    """Summarise the run as aligned text; `state` describes a stage. UserError if shards are broken or sizes do not
    fit."""
    values: list[dict[str, str]] = []
    notes: list[str] = []
    for name in stages:
        values.append({"state": state(name)})
        if name in recipe.stages.trained:
            there = look(recipe, stage=name)
            speed = _earlier_speed(folder, stage=name)
            if own_code := own_digests([recipe.model.model_dump(), recipe.train_stage(name).model_dump(mode="json")]):
                notes.append(f"! {name} runs {', '.join(own_code)}")
            values[-1] |= _column(recipe, stage=name, there=there, processes=processes, images_per_second=speed)
            if there.unopened:
                unknown = "its published size is taken" if there.role else "what follows is unknown (?)"
                notes.append(f"! {name}: {'; '.join(there.unopened)}: not checked, and {unknown}")
    given = recipe.model.model_dump(exclude_none=True, exclude_defaults=True)
    model = recipe.model.variant or ", ".join(f"{key} {value}" for key, value in given.items())
    labels = dict.fromkeys(label for each in values for label in each)
    rows = [[label, *(each.get(label, "") for each in values), _WORDS.get(label, "")] for label in labels]
    shown = columns([["", *stages, ""], *(row for row in rows if any(row[1:-1]))])
    held, refused = formats_of(stage_model(recipe, stage=recipe.stages.names[-1]))
    notes += ["", f"formats of {recipe.stages.names[-1]}/model: {', '.join(held) or 'none but its own'}"]
    notes += [f"  not {to}: {why}" for to, why in refused.items()]
    where = f"{counted(processes, 'process')}, {engine_words(recipe.engine)}; in {folder.path}"
    return "\n".join([f"{recipe.name}: {model}; {where}", "", shown, *notes])


def printed(text: str, *, recipe: Recipe, keys: Keys) -> str:
    """Print the summary as comments above the recipe."""
    what = "Every key:"
    if keys == "changed":
        what = "The keys that differ from the defaults (--all-keys shows every key, with its value):"
    comments = "\n".join(f"# {line}".rstrip() for line in [*text.splitlines(), "", what])
    return f"{comments}\n{dump_recipe(recipe, keys=keys)}"


def _column(
    recipe: Recipe, *, stage: StageName, there: ShardsBefore, processes: int, images_per_second: float | None
) -> dict[str, str]:
    config, images, classes = recipe.train_stage(stage), there.num_images, there.num_classes
    length = stage_length(recipe, stage=stage, num_images=images, processes=processes)
    if length.problem:  # sizes that do not fit together, whatever the shards
        raise UserError(length.problem)
    plan, duration = length.plan, parse_duration(config.duration)
    total = plan.total_steps * plan.global_batch_images if length.known else None
    cost = stage_cost(recipe.model, stage=config, engine=recipe.engine, num_classes=classes or 1)
    needs_classes = classes is None and config.head_kind not in SELF_SUPERVISED

    def steps(text: str, number: int) -> str:
        """A length in steps, or as written in the recipe if the training set's size is unknown."""
        given = parse_duration(text)
        is_known = images is not None or given.unit in ("steps", "images") or (given.unit == "%" and length.known)
        return "" if given.amount == 0 else counted(number, "step") if is_known else text

    def known(value: int | None) -> str:
        return UNKNOWN if value is None else f"{value:,}"

    also = {name: there.also_eval.get(name) for name in config.also_eval}
    time = ""
    if images_per_second and total is not None:
        time = f"{show_duration(total / images_per_second)} ({short(images_per_second)} images/s)"
    epochs = f"{duration.amount:g}" if duration.unit == "epochs" else UNKNOWN
    return {
        "parameters": f"{short(cost.parameters)} + classes" if needs_classes else f"{cost.parameters:,}",
        "image size": shown(config.image_size),
        "training images": known(images),
        "held-out images": known(there.held_out and there.held_out.num_samples),
        "also evaluated": ", ".join(f"{name} ({known(one and one.num_samples)})" for name, one in also.items()),
        "classes": known(classes),
        "epochs": f"{total / images:.3g}" if images and total is not None else epochs,
        "steps": f"{plan.total_steps:,}" if length.known else UNKNOWN,
        "of them warm-up": steps(config.schedule.warmup, plan.schedule.warmup_steps),
        "global batch": f"{config.global_batch_size:,}",
        "": f"{plan.world_size:,} x {plan.accumulation_steps:,} x {plan.micro_batch_size:,}",
        "moving average": f"{config.ema.decay:g}" if config.ema else "",
        "evaluated every": steps(config.eval_every, plan.eval_steps) or "end",
        "saved every": steps(config.save_every, plan.save_steps) or "end",
        "time": time,
    }


def _earlier_speed(folder: RunFolder, *, stage: StageName) -> float | None:
    try:
        rows = read_metrics(folder.stage(stage) / "metrics.jsonl")
    except OSError:
        return None
    speeds = [row.metrics["perf/images_per_s"] for row in rows if "perf/images_per_s" in row.metrics]
    return median(speeds[-_RECENT:]) if speeds else None
