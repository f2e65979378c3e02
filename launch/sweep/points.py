"""Plan a sweep's recipes and run folders from a recipe and a grid. Only `open_point` writes.

    RUNS/NAME-sweep/sweep.json          the grid, each point's state and result, the choice
    RUNS/NAME-sweep/STAGE-DIGEST/       the stage before the swept one, trained once for all points that share it
    RUNS/NAME-sweep/POINT/              an ordinary run, trained without the held-out part of the training set
    RUNS/NAME-sweep/final/              an ordinary run with the chosen values, on the whole training set

The shared stage comes from RUNS/NAME if trained there. Points and the final run link to it, so each is a complete run.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.launch.sweep.grid import Axis, grid_points, point_names, read_grid
from shardvit.pipeline.recipe.io import flatten, load_recipe, parse_recipe
from shardvit.pipeline.recipe.mistakes import mistakes
from shardvit.pipeline.recipe.roles import missing_paths
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE, StageName
from shardvit.pipeline.runs.run_folder import RunFolder, recipe_digest

FINAL = "final"  # the final run's folder

# Held-out shares of the ViT paper (arXiv 2010.11929), appendix B.1.1, by the role of the swept stage's data.
PAPERS_SHARES = {"imagenet": 0.01, "cifar10": 0.02, "cifar100": 0.02, "pets": 0.1, "flowers": 0.1}

# Learning rates for fine-tuning with SGD, by role; the same paper's Table 4.
_SMALL_SETS = ("0.001", "0.003", "0.01", "0.03")
PAPERS_RATES = {
    "imagenet": ("0.003", "0.01", "0.03", "0.06"),
    **dict.fromkeys(("cifar10", "cifar100", "pets", "flowers"), _SMALL_SETS),
}


@dataclass(frozen=True)
class SharedStage:
    """The trained stage before the swept one."""

    stage: StageName
    recipe: Recipe  # with only this stage
    folder: RunFolder  # of the run that trains it


@dataclass(frozen=True)
class Point:
    """A grid point."""

    name: str  # of its folder
    values: dict[str, str]  # key -> value
    recipe: Recipe  # of its run
    final: Recipe  # of the final run if this point is chosen
    shared: SharedStage | None  # None: the swept stage comes first


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    name: str  # the recipe's
    root: Path  # RUNS/NAME-sweep
    stage: StageName  # the swept one
    hold_out: float  # share of its training images
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]

    @property
    def shared_stages(self) -> list[SharedStage]:
        return list({point.shared.folder.path: point.shared for point in self.points if point.shared}.values())

    def folder(self, name: str) -> RunFolder:
        return RunFolder(runs_root=self.root, name=name)

    def runs(self) -> Iterator[tuple[RunFolder, Recipe, StageName | None]]:
        """Yield every run's folder, recipe and restart stage; the final run once per point, with its values."""
        for shared in self.shared_stages:
            if shared.folder.runs_root == self.root:
                yield shared.folder, shared.recipe, None
        for point in self.points:
            yield self.folder(point.name), point.recipe, None
            yield self.folder(FINAL), point.final, point.final.stages.names[0]


def plan_sweep(
    recipe: str,
    arguments: Sequence[str],
    *,
    runs_root: Path,
    paths: Path | None = None,
    stage: StageName | None = None,
    hold_out: float | None = None,
    grid: tuple[Axis, ...] = (),
) -> Sweep:
    """Load the recipe for each point. `stage` defaults to the last that trains, `hold_out` to the paper's share; `grid`
    replaces that of the arguments. UserError for a mistake in recipe or grid, points that are the same run or train on
    different data, or a stage that cannot be swept."""
    overrides, axes = read_grid(arguments)
    axes = grid or axes
    if not axes:
        alone = load_recipe(recipe, overrides=overrides, paths=paths)
        axes = (papers_grid(alone, stage=_swept_stage(alone, stage)),)
    points = grid_points(axes)
    wholes = [
        load_recipe(recipe, overrides=[*overrides, *(f"{key}={text}" for key, text in each.items())], paths=paths)
        for each in points
    ]
    first = wholes[0]
    if len({whole.name for whole in wholes}) > 1:
        raise UserError(
            f"the points are different runs, {wholes[0].name} and {wholes[-1].name}: give all of them one name"
        )
    swept = _swept_stage(first, stage)
    share = _share(first, stage=swept, given=hold_out)
    if any(each.train_stage(swept).train != first.train_stage(swept).train for each in wholes):
        raise UserError(
            f"the points train {swept} on different data, and their scores cannot be compared: sweep other keys"
        )
    root = runs_root / f"{first.name}-sweep"
    if (root / RECIPE_FILE).exists():
        raise UserError(f"{root} is a run's folder, and the sweep's would have its name: give name=OTHER")
    shown = [_resolved(whole, values=values) for whole, values in zip(wholes, points, strict=True)]
    names = point_names(shown)
    made = [
        _point(whole, name=name, values=values, stage=swept, share=share, root=root)
        for whole, name, values in zip(wholes, names, shown, strict=True)
    ]
    known: dict[str, Point] = {}
    for one in made:
        if (same := known.setdefault(recipe_digest(one.recipe, stage=swept), one)) is not one:
            raise UserError(
                f"{same.name} and {one.name} are the same run: no difference changes what {swept} learns; sweep other "
                "keys, or another --stage"
            )
    return Sweep(first.name, root, stage=swept, hold_out=share, axes=axes, points=tuple(made))


def papers_grid(recipe: Recipe, *, stage: StageName) -> Axis:
    """Return the ViT paper's learning rates for fine-tuning with SGD (Table 4); UserError for any other stage."""
    config = recipe.train_stage(stage)
    rates = PAPERS_RATES.get(config.data or "") if stage == "finetune" and config.optimizer.name == "sgd" else None
    if rates is None:
        raise UserError(
            f"there is nothing to choose from: give a key with several values, such as {stage}.optimizer.lr=A,B,C (the "
            "paper's rates are known for fine-tuning with sgd on imagenet, cifar10, cifar100, pets and flowers)"
        )
    return Axis(f"stages.{stage}.optimizer.lr", rates)


def changed_recipe(recipe: Recipe, *, name: str, stages: Mapping[str, Any]) -> Recipe:
    """Rename a recipe and replace its stages, each a mapping of keys; UserError if they are invalid."""
    tree = recipe.model_dump(mode="json", exclude_defaults=True) | {"name": name, "stages": stages}
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        texts = [mistake.text for mistake in mistakes(error, tree=tree, root=Recipe)]
        raise UserError(f"{recipe.name}, as it would be swept: {'; '.join(texts)}") from None


def open_point(folder: RunFolder, recipe: Recipe, *, shared: SharedStage | None) -> None:
    """Create a point's or the final run's folder, with a relative link to the shared stage unless it has its own."""
    folder.open(recipe)
    if shared is None:
        return
    link = folder.stage(shared.stage)
    to = os.path.relpath(shared.folder.stage(shared.stage).resolve(), folder.path.resolve())
    if link.is_symlink() and os.readlink(link) != to:
        link.unlink()
    if not link.is_symlink() and not link.exists():
        link.symlink_to(to, target_is_directory=True)


def _resolved(recipe: Recipe, *, values: Mapping[str, str]) -> dict[str, str]:
    """Normalize the values through the recipe, so that 1e-2 and 0.01 are one point."""
    known = flatten(recipe)
    return {key: known.get(key, known.get(f"stages.{key}", text)) for key, text in values.items()}


def read_share(text: str | None) -> float | None:
    """Parse --hold-out, such as 2% or 0.02; UserError unless between 0 and 1."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(
            f"--hold-out: {text} is no share of the images: give one between 0 and 100%, such as 2% or 0.02"
        )
    return round(share, 12)  # "7%" is 0.07 exactly


def _point(whole: Recipe, *, name: str, values: dict[str, str], stage: StageName, share: float, root: Path) -> Point:
    tree = whole.model_dump(mode="json", exclude_defaults=True)["stages"]
    up_to = {each: tree[each] for each in whole.stages.names[: whole.stages.names.index(stage) + 1]}
    train = up_to[stage].get("train")
    if train is None:
        raise UserError(str(missing_paths(whole, stage=stage)))
    if isinstance(train, list):
        raise UserError(
            f"stages.{stage}.train mixes {len(train)} sets, and a sweep holds out a part of one: pack them together"
        )
    one = {"shards": train} if isinstance(train, str) else train
    if "part" in one and (one["part"], one["hold_out"]) != ("rest", share):
        raise UserError(
            f"stages.{stage}.train names a part already, and the sweep holds out {100 * share:g} %: leave out part, or "
            "hold out as much, and give eval a set of its own for the final run"
        )
    parts = {use: {**one, "part": part, "hold_out": share} for use, part in (("train", "rest"), ("eval", "held_out"))}
    recipe = changed_recipe(whole, name=name, stages={**up_to, stage: {**up_to[stage], **parts}})
    final = changed_recipe(whole, name=FINAL, stages=tree)
    return Point(name, values, recipe=recipe, final=final, shared=_shared(whole, stage=stage, root=root))


def _shared(whole: Recipe, *, stage: StageName, root: Path) -> SharedStage | None:
    trained = whole.stages.trained
    before = trained[: trained.index(stage)]
    if not before:
        return None
    name = before[-1]  # of those that begin a pipeline a recipe has one
    digest = recipe_digest(whole, stage=name)
    tree = whole.model_dump(mode="json", exclude_defaults=True)["stages"]
    recipe = changed_recipe(whole, name=f"{name}-{digest[:8]}", stages={name: tree[name]})
    usual = RunFolder(runs_root=root.parent, name=whole.name)
    if (usual.path / RECIPE_FILE).exists() and usual.peek(name).state == "done":
        there = parse_recipe(usual.path / RECIPE_FILE)
        if name in there.stages.names and recipe_digest(there, stage=name) == digest:
            return SharedStage(name, recipe, usual)
    return SharedStage(name, recipe, RunFolder(runs_root=root, name=recipe.name))


def _swept_stage(recipe: Recipe, stage: StageName | None) -> StageName:
    trained = recipe.stages.trained
    if stage is None:
        return trained[-1]
    if stage not in trained:
        raise UserError(f"--stage {stage}: the recipe trains {' and '.join(trained)}; give one of them")
    return stage


def _share(recipe: Recipe, *, stage: StageName, given: float | None) -> float:
    if given is not None:
        return given
    share = PAPERS_SHARES.get(recipe.train_stage(stage).data or "")
    if share is None:
        raise UserError(
            f"which share of the training images of {stage} is held out? Give --hold-out, such as --hold-out 2% (the "
            "paper's: 1% of ImageNet, 2% of CIFAR, 10% of Pets and Flowers)"
        )
    return share
