"""`shardvit run --dry-run`: what would be run, in a summary, and the keys that differ from the defaults.

Everything is checked that can be, and nothing is started. The shards need not be there yet: what is not, is said in a
line, and what would follow from it is left open. A `pipe:` is never opened, for it is a command. All that is printed
is a recipe, with the summary in comments. Needs no torch; parameters are counted by formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from data_shards.errors import UserError
from data_shards.manifest import MANIFEST_FILE
from data_shards.opening import open_shards
from data_shards.shard_set import ShardSet, ShardsSpec, merge_shard_sets
from data_shards.store.download import MissingObject, RetryPolicy
from data_shards.store.location import expand_braces, is_local, join, local_path, shown, why_command
from data_shards.store.store import Store
from data_shards.text import show_duration
from launch.planning.page import columns, short
from pipeline.budget.cost import stage_cost
from pipeline.budget.length import Length, stage_length
from pipeline.recipe.data import ShardsConfig
from pipeline.recipe.duration import parse_duration
from pipeline.recipe.io import dump_recipe
from pipeline.recipe.schema import MaskedPatchStage, Recipe, StageName, TrainStage
from pipeline.report.metrics_log import read_metrics
from pipeline.run_folder import RunFolder

Keys = Literal["changed", "all"]

_UNKNOWN = "?"
_MOST_MANIFEST_BYTES = 1 << 30
_GIVE_UP_SECONDS = 30.0  # somebody waits for the answer
_RECENT = 20  # points of an earlier attempt's curve, of whose speeds the median counts


@dataclass(frozen=True)
class Seen:
    """What there is of a stage's shards before a run.

    Attributes:
        unopened: a sentence for each set that was not opened.
        train: the training sets, laid end to end; None: one of them was not opened.
    """

    unopened: tuple[str, ...]
    train: ShardSet | None


def look(config: TrainStage) -> Seen:
    """Open what is there of a stage's training sets, and say what is not.

    Raises:
        UserError: shards that are there and broken.
    """
    store = Store(None, retry=RetryPolicy(give_up_seconds=_GIVE_UP_SECONDS))
    sets = [("train", each) for each in config.train] + [("eval", config.eval)]
    said = {
        key: [text for name, each in sets if name == key and (text := _unopened(each, store=store))] for key, _ in sets
    }
    train = None
    if not said["train"]:
        train = merge_shard_sets([_open(each, store=store) for each in config.train])
    return Seen(tuple(text for texts in said.values() for text in texts), train)


def _unopened(shards: ShardsConfig, *, store: Store) -> str | None:
    """Why a set is not opened; None: it is there."""
    location = shards.shards
    if why := why_command(location):
        return f"{shown(location)} {why}, and none is started"
    if is_local(location):
        there = any(_has_something(local_path(each)) for each in expand_braces(location))
    elif location.partition("?")[0].endswith(".tar") or expand_braces(location) != [location]:
        return None
    else:
        try:
            there = bool(store.read_small(join(location, MANIFEST_FILE), most_bytes=_MOST_MANIFEST_BYTES))
        except MissingObject:
            there = False
    return None if there else f"{shown(location)} is not there yet"


def _has_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _open(shards: ShardsConfig, *, store: Store) -> ShardSet:
    spec = ShardsSpec(shards.shards, shards.label, shards.kind, Path(shards.classes) if shards.classes else None)
    return open_shards(spec, damaged="report", report=lambda line: None, store=store)


def check_sizes_of(recipe: Recipe, *, stage: StageName, seen: Seen, processes: int) -> Length:
    """The stage's batches and steps, as far as what is there says them.

    Raises:
        UserError: sizes that do not fit together, whatever the shards will be.
    """
    images = None if seen.train is None else seen.train.num_samples
    length = stage_length(recipe, stage=stage, num_images=images, processes=processes)
    if length.problem:
        raise UserError(length.problem)
    return length


@dataclass(frozen=True)
class _Column:
    """One training stage of the summary."""

    config: TrainStage
    state: str
    seen: Seen
    length: Length
    parameters: str
    images_per_second: float | None  # of an earlier attempt

    @property
    def images(self) -> int | None:
        return None if self.seen.train is None else self.seen.train.num_samples

    @property
    def total_images(self) -> int | None:
        plan = self.length.plan
        return plan.total_steps * plan.global_batch_images if self.length.known else None

    def steps(self, text: str, number: int) -> str:
        """A length in steps, or, where its data set is not known, as the recipe has it."""
        if parse_duration(text).amount == 0:
            return ""
        unit = parse_duration(text).unit
        counted = self.images is not None or unit in ("steps", "images") or (unit == "%" and self.length.known)
        return f"{number:,} steps" if counted else text


def summary(
    recipe: Recipe, *, folder: RunFolder, processes: int, stages: Sequence[StageName], state: Callable[[StageName], str]
) -> str:
    """The summary as aligned text; `state` says how far a stage is.

    Raises:
        UserError: shards that are there and broken, sizes that do not fit together.
    """
    made: dict[StageName, _Column | None] = {
        name: _column(recipe, stage=name, folder=folder, processes=processes, state=state(name)) for name in stages
    }
    engine, model = recipe.engine, recipe.model
    how = f"DeepSpeed ZeRO {engine.zero_stage}" if engine.backend == "deepspeed" else "accelerate (DDP)"
    what = model.variant or ", ".join(
        f"{key} {value}" for key, value in model.model_dump(exclude_none=True, exclude_defaults=True).items()
    )
    count = f"{processes:,} process{'es' if processes > 1 else ''}"
    lines = [f"{recipe.name}: {what}; {count}, {how}, {engine.precision}; in {folder.path}", ""]

    def row(label: str, show: Callable[[_Column], str], words: str = "") -> tuple[str, list[str], str]:
        return label, [show(column) if column else "" for column in made.values()], words

    rows: list[tuple[str, list[str], str]] = [
        ("", list(made), ""),
        ("state", [column.state if column else state(name) for name, column in made.items()], ""),
        row("parameters", lambda c: c.parameters, "head included"),
        row("image size", lambda c: f"{c.config.image_size} px"),
        row("training images", lambda c: _UNKNOWN if c.images is None else f"{c.images:,}"),
        row("classes", lambda c: _UNKNOWN if c.seen.train is None else f"{c.seen.train.num_classes:,}"),
        row("epochs", _epochs),
        row("steps", lambda c: f"{c.length.plan.total_steps:,}" if c.length.known else _UNKNOWN),
        row("of them warm-up", lambda c: c.steps(c.config.schedule.warmup, c.length.plan.warmup_steps)),
        row("global batch", lambda c: f"{c.config.global_batch_size:,}"),
        row("", _batch, "= processes x accumulated x micro-batch"),
        row("evaluated every", lambda c: c.steps(c.config.eval_every, c.length.plan.eval_steps) or "end"),
        row("saved every", lambda c: c.steps(c.config.save_every, c.length.plan.save_steps) or "end"),
        row("time", _time, "at the speed of an earlier attempt, in brackets"),
    ]
    lines += columns([each for each in rows if any(each[1])])
    for name, column in made.items():
        if column and column.seen.unopened:
            lines.append(f"! {name}: {'; '.join(column.seen.unopened)}: not checked, and what follows is unknown (?)")
    return "\n".join(lines)


def printed(text: str, *, recipe: Recipe, keys: Keys) -> str:
    """The summary in comments, then the recipe."""
    what = (
        "Every key:"
        if keys == "all"
        else "The keys that differ from the defaults (--all-keys shows every key, with its value):"
    )
    comments = "\n".join(f"# {line}".rstrip() for line in [*text.splitlines(), "", what])
    return f"{comments}\n{dump_recipe(recipe, keys=keys)}"


def _column(recipe: Recipe, *, stage: StageName, folder: RunFolder, processes: int, state: str) -> _Column | None:
    config = getattr(recipe.stages, stage)
    if not isinstance(config, TrainStage):
        return None
    seen = look(config)
    length = check_sizes_of(recipe, stage=stage, seen=seen, processes=processes)
    needs_classes = not isinstance(config, MaskedPatchStage)
    cost = stage_cost(
        recipe.model,
        stage=config,
        engine=recipe.engine,
        num_classes=seen.train.num_classes if seen.train else 1,
    )
    parameters = (
        f"{short(cost.parameters)} + classes" if seen.train is None and needs_classes else f"{cost.parameters:,}"
    )
    return _Column(config, state, seen, length, parameters, _speed(folder, stage=stage))


def _epochs(column: _Column) -> str:
    duration = parse_duration(column.config.duration)
    if column.images and column.total_images is not None:
        return f"{column.total_images / column.images:.3g}"
    return f"{duration.amount:g}" if duration.unit == "epochs" else _UNKNOWN


def _batch(column: _Column) -> str:
    plan = column.length.plan
    return f"{plan.world_size:,} x {plan.accumulation_steps:,} x {plan.micro_batch_size:,}"


def _time(column: _Column) -> str:
    speed, images = column.images_per_second, column.total_images
    if not speed or images is None:
        return ""
    return f"{show_duration(images / speed)} ({short(speed)} images/s)"


def _speed(folder: RunFolder, *, stage: StageName) -> float | None:
    """Images a second of the attempt before, all processes together."""
    try:
        rows = read_metrics(folder.stage(stage) / "metrics.jsonl")
    except OSError:
        return None
    speeds = [row.metrics["perf/images_per_s"] for row in rows if "perf/images_per_s" in row.metrics]
    return median(speeds[-_RECENT:]) if speeds else None
