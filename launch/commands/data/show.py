"""`shardvit show`: show shards or a recipe as a page of pictures. Touches no run folder and no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redacted
from shardvit.launch.flags import (
    INDEX_FILE,
    DataFile,
    Force,
    ShardsOptions,
    demand_counts,
    demand_target,
    page_mark,
    pixel_limit,
    switch,
)
from shardvit.launch.local.env import paths_file
from shardvit.launch.local.output import tell

if TYPE_CHECKING:
    from shardvit.pipeline.recipe.schema import Recipe
    from shardvit.pipeline.recipe.vocabulary import StageName

_IMAGES, _MOST_IMAGES = 40, 400
_LABELS = 200_000
_RECIPE_ENDINGS = (".yaml", ".yml")
_GIVE_UP_SECONDS = 60.0  # the user is waiting


def show(
    what: str,
    /,
    *overrides: str,
    stage: Annotated[str | None, Parameter(help="Stage of a recipe; default: the first that trains.")] = None,
    step: Annotated[int | None, Parameter(help="Show the recipe's batch after this many steps; default: 0.")] = None,
    output: Annotated[Path | None, Parameter(help="Folder for the page and its pictures; default: show/NAME.")] = None,
    images: Annotated[int, Parameter(help="Images on each contact sheet.")] = _IMAGES,
    labels: Annotated[int, Parameter(help="Most labels to count; larger sets are sampled by shard.")] = _LABELS,
    seed: Annotated[int, Parameter(help="Draws which images and shards are shown.")] = 0,
    channels: Annotated[str | None, Parameter(help="Three to show as red, green and blue, such as 4,3,2.")] = None,
    statistics: Annotated[bool, switch("Show the table of all images: sizes, classes, colours, copies.")] = False,
    data: DataFile = None,
    options: ShardsOptions = ShardsOptions(),  # noqa: B008 - frozen
    force: Force = False,
) -> int:
    """Show shards, or what a recipe will show the model, as a page of pictures.

    WHAT is a recipe (a YAML file or a shipped name, with OVERRIDES as for
    `shardvit run`), or shards: a packed folder, the folder with its train/ and
    val/, a folder of tars made by other tools, a pattern such as
    "data/x-{000..127}.tar", or a URL. The page, and each picture as PNG and
    SVG, show images of each class, the sizes of classes and images; for a recipe
    also a training batch as the model sees it (crop, augmentation, mixing,
    labels), one image in several epochs, and the crops of evaluation.

    Reads the labels and a few images of local shards, and fetches at most four
    remote shards; --statistics reads statistics.parquet alone, which `shardvit
    pack` and `shardvit check --statistics` write. Uses no GPU, touches no run.

    Some examples:
        shardvit show shards/photos
        shardvit show s3://bucket/photos --statistics
        shardvit show my.yaml --step 1000
        shardvit show digits pretrain.augment.mixup_alpha=0.2 --output look
        shardvit show "laion/{00000..00099}.tar" --label json:label
    """
    demand_counts(images=images, labels=labels)
    if images > _MOST_IMAGES:
        raise UserError(f"--images: it is {images:,}; give {_MOST_IMAGES} at the most, or the page cannot be read")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed: it is {seed}; give 0 or more")
    recipe = _recipe(what, overrides, data=data)
    output = output or Path("show") / (_folder_name(redacted(what)) if recipe is None else recipe.name)
    demand_target(output, flag="--output", force=force, mark=page_mark("show"), file=INDEX_FILE)
    of_shards = {
        f"--{each.name.replace('_', '-')}": getattr(options, each.name) != each.default for each in fields(options)
    }
    if recipe is None:
        given = {"OVERRIDES": overrides, "--stage": stage, "--step": step is not None, "--data": data is not None}
        _refuse(given, to=f"{what}, which are shards")
    else:
        _refuse(of_shards | {"--statistics": statistics}, to=f"{what}, which is a recipe: it has keys for that")
    if statistics:
        sampled = {"--images": images != _IMAGES, "--labels": labels != _LABELS, "--seed": seed != 0}
        sampled |= {"--channels": channels is not None}
        _refuse(of_shards | sampled, to="--statistics, which shows the table of all images")

    from shardvit.data_shards.reading.overview import inspect_shards
    from shardvit.data_shards.store.store import RetryPolicy, Store
    from shardvit.launch.pages.shards_page import show_recipe, show_shards, show_statistics

    inspect = partial(inspect_shards, images=images, most_labels=labels, seed=seed, shown=_triple(channels))
    if recipe is not None:
        made = show_recipe(recipe, stage=_stage(recipe, stage), step=step or 0, inspect=inspect, report=tell)
    else:
        store = Store(options.cache_of(what), retry=RetryPolicy(give_up_seconds=_GIVE_UP_SECONDS))
        limit = pixel_limit(options.max_image_pixels)
        if statistics:
            made = show_statistics(what, store=store)
        else:
            made = show_shards(options.spec(what), store=store, limit=limit, inspect=inspect, report=tell)
    page = made.write(output, command="show")
    for line in made.notes:
        tell(f"note: {line}")
    print(page)
    return 0


def _recipe(what: str, overrides: tuple[str, ...], *, data: Path | None) -> Recipe | None:
    """Return None if `what` names shards."""
    from shardvit.pipeline.recipe.io import load_recipe
    from shardvit.pipeline.recipe.sources import shipped_recipes

    is_named = what in shipped_recipes()
    if not is_named and not what.endswith(_RECIPE_ENDINGS):
        return None
    if is_named and _has_shards(what):
        tell(f"note: {what} is taken for the recipe that ships; for the shards in the folder, write ./{what}")
    return load_recipe(what, overrides=overrides, paths=paths_file(data))


def _triple(text: str | None) -> tuple[int, ...]:
    """Parse three numbers of channels, from 1."""
    if text is None:
        return ()
    if not re.fullmatch(r"[1-9]\d?,[1-9]\d?,[1-9]\d?", text):
        raise UserError(f"--channels: it is {text[:40]}; give the numbers of three, such as 4,3,2")
    return tuple(map(int, text.split(",")))


def _has_shards(name: str) -> bool:
    """True if a local folder of that name holds shards, or splits of them."""
    folder = Path(name)
    return any(any(folder.glob(pattern)) for pattern in ("manifest.json", "*.tar", "*/manifest.json", "*/*.tar"))


def _stage(recipe: Recipe, name: str | None) -> StageName:
    training = recipe.stages.trained
    for each in training:
        if name in (None, each):
            return each
    why = "swap_head trains nothing" if name == "swap_head" else f"the recipe trains {' and '.join(training)}"
    raise UserError(f"--stage {name}: {why}; give --stage {training[0]}, or leave it out")


def _refuse(given: Mapping[str, object], *, to: str) -> None:
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise UserError(f"{', '.join(named)}: meaningless to {to}; leave {'it' if len(named) == 1 else 'them'} out")


def _folder_name(shown: str) -> str:
    last, before, *_ = [*reversed(shown.rstrip("/").split("/")), "", ""]
    stem = f"{before}_{last}" if last in ("train", "val", "test") else last.removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("._")[:80] or "shards"
