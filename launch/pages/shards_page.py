"""Gather and write the page of `shardvit show`: index.html, and each picture as a PNG and an SVG file.

Skips and lists damage. Reads batches with training's own code, and statistics from their table alone. Takes seconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.reading.opening import open_shards, splits_below
from shardvit.data_shards.reading.overview import Overview
from shardvit.data_shards.sets.statistics_summary import SetStatistics, summarise
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.shards.shard_set import Report, ShardSet, ShardsSpec
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import counted, one_line, show_bytes
from shardvit.launch.flags import INDEX_FILE
from shardvit.launch.pages.blocks import PageBlock, PageImage, PagePicture, PageSection, PageTable, PageText
from shardvit.launch.pages.page import render_page
from shardvit.pipeline.pictures.set_figures import contact_sheet, image_sizes, label_histogram, statistics_figures
from shardvit.pipeline.pictures.style import Drawn, rendered
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.stage_data import open_data

_MOST_DAMAGED = 50  # named on the page
_MOST_CLASSES = 2_000  # rows of the table of classes

Inspect = Callable[..., Overview]  # `inspect_shards` with the amount to read bound; takes a set, its store and limit
Facts = tuple[tuple[str, str], ...]


@dataclass
class Shown:
    """A page under construction, with its files by name."""

    title: str = ""
    lead: str = ""
    facts: Facts = ()
    sections: list[PageSection] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # damage

    def pictures(self, drawn: Iterable[Drawn | None], *, prefix: str = "") -> list[PageBlock]:
        blocks: list[PageBlock] = []
        for words, figure in filter(None, drawn):
            assert not isinstance(figure, Mapping)
            png, svg = rendered(figure)
            self.files |= {f"{prefix}{words.name}.png": png, f"{prefix}{words.name}.svg": svg}
            blocks.append(PagePicture(words.title, words.caption, words.alt, [PageImage(png, svg)]))
        return blocks

    def write(self, folder: Path, *, command: Literal["show", "figures"]) -> Path:
        """Write index.html and the files into `folder`, creating it. UserError if that fails."""
        page = render_page(self.title, sections=self.sections, lead=self.lead, facts=self.facts, notes=self.notes)
        return page.write(folder / INDEX_FILE, command=command, beside=self.files)


def show_shards(spec: ShardsSpec, *, store: Store, limit: PixelLimit, inspect: Inspect, report: Report) -> Shown:
    """Show a shard set, or the splits in a folder. UserError if there are none, or they cannot be opened."""
    splits = splits_below(spec.location, store=store) or {"": spec.location}
    seen: dict[str, Overview] = {}
    for split, location in splits.items():
        opened = open_shards(replace(spec, location=location), damaged="report", store=store, report=report)
        seen[split] = inspect(opened, store=store, limit=limit)
    made = Shown(
        title=f"{' and '.join(dict.fromkeys(each.shards.name for each in seen.values()))}: what is in the shards",
        lead=f"{redacted(spec.location)}, looked at before training.",
        facts=_facts({split: each.shards for split, each in seen.items()}),
    )
    for split, each in seen.items():
        _add_set(made, each, title=split or "The set", prefix=_prefix(split))
    return made


def show_recipe(recipe: Recipe, *, stage: StageName, step: int, inspect: Inspect, report: Report) -> Shown:
    """Show a training batch as the model sees it, and both sets of a stage. UserError if shards are missing or too
    damaged for the recipe, or the stage has no such step."""
    data = open_data(recipe, stage=stage, report=report)
    # Imported only once recipe and shards are known good: torch takes seconds.
    from shardvit.pipeline.pictures.training_batch import batch_pictures, evaluation_crops, stage_steps

    plan = stage_steps(recipe, stage=stage, data=data)
    if not 0 <= step < plan.total_steps:
        raise UserError(f"--step {step}: {stage} takes {plan.total_steps:,} steps; give 0 to {plan.total_steps - 1:,}")
    limit, size = PixelLimit(recipe.data.max_image_pixels), recipe.train_stage(stage).image_size
    train, held_out = (inspect(shards, store=data.store, limit=limit) for shards in (data.train, data.eval))
    epochs = plan.total_steps * plan.global_batch_images / plan.samples_per_epoch
    mixed = f" from {len(data.train_sizes)} sets" if len(data.train_sizes) > 1 else ""
    made = Shown(
        title=f"{recipe.name}, {stage}: what the model will see",
        lead=f"{plan.total_steps:,} steps of {plan.global_batch_images:,} images at {size} px{mixed}, {epochs:.3g} "
        "epochs; looked at before training.",
        facts=_facts({"train": data.train, "held out": data.eval}),
    )
    blocks = made.pictures(batch_pictures(recipe, stage=stage, data=data, step=step, shown=held_out.shown))
    crops = evaluation_crops(recipe, stage=stage, data=data, images=held_out.images, shown=held_out.shown)
    blocks += made.pictures(crops)
    intro = "Read by the code that training reads with, so that these are the very pixels."
    made.sections.append(PageSection("What the model will see", blocks, intro=intro))
    _add_set(made, train, title="Training set", prefix="train_", image_size=size)
    _add_set(made, held_out, title="Held-out set", prefix="eval_", image_size=size)
    return made


def show_statistics(location: str, *, store: Store) -> Shown:
    """Show the statistics of a split, or of the splits in a folder. UserError if a table is missing or damaged."""
    splits = {} if location.endswith(".parquet") else splits_below(location, store=store)
    seen = {split: summarise(each) for split, each in (splits or {"": location}).items()}
    first = next(iter(seen.values()))
    facts = [(f"{each.images:,}", f"images{', ' if split else ''}{split}") for split, each in seen.items()]
    facts += [(f"{len(first.classes):,}", "classes"), (show_bytes(sum(each.bytes for each in seen.values())), "in all")]
    made = Shown(title=f"{first.name}: statistics of all images", lead=first.location, facts=tuple(facts))
    for split, each in seen.items():
        _add_statistics(made, each, title=split or each.split, prefix=_prefix(split))
    return made


def _prefix(split: str) -> str:
    """Begin the names of a split's files."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in split)[:60]
    return name and f"{name}_"


def _add_set(made: Shown, seen: Overview, *, title: str, prefix: str, image_size: int | None = None) -> None:
    shards = seen.shards
    drawn = (contact_sheet(seen), label_histogram(seen), image_sizes(seen, image_size=image_size))
    blocks = made.pictures(drawn, prefix=prefix) or [PageText("Nothing in it can be read.", "note")]
    damaged = list(shards.damage)
    damaged += [f"{each.shard}{': ' + one_line(each.key) if each.key else ''}: {each.reason}" for each in seen.damaged]
    made.notes += damaged[:3]
    if len(damaged) > 3:
        made.notes.append(f"{len(damaged) - 3:,} more of {one_line(shards.source)}, listed below it")
    if damaged:
        rows = [(text,) for text in damaged[:_MOST_DAMAGED]]
        more = f"; the first {_MOST_DAMAGED} of {len(damaged):,}" if len(damaged) > _MOST_DAMAGED else ""
        blocks.append(PageTable(("Damaged",), rows, title=f"Damage that was met{more}"))
    blocks.append(_class_table(shards.classes, seen.images_of_class))
    size = "" if shards.num_bytes is None else f", {show_bytes(shards.num_bytes)}"
    effort = f"{show_bytes(seen.bytes_read)} were read{'' if seen.is_whole else f' of {seen.opened:,} shards'}"
    if not shards.is_local:
        effort = f"{counted(seen.opened, 'shard')} {'was' if seen.opened == 1 else 'were'} fetched"
    intro = (
        f"{shards.source}: {counted(shards.num_samples, 'image')} of {shards.num_classes:,} classes in "
        f"{counted(len(shards.shards), 'shard')}{size}. To look at it, {effort}."
    )
    made.sections.append(PageSection(title, blocks, intro=intro))


def _add_statistics(made: Shown, seen: SetStatistics, *, title: str, prefix: str) -> None:
    blocks = made.pictures(statistics_figures(seen), prefix=prefix)
    filled = seen.images_of_class[seen.images_of_class > 0]
    ratio = f", the largest {filled.max() / filled.min():,.3g} times the smallest with any" if len(filled) else ""
    columns = ("", "Image", "Shard", "Width", "Height", "Bytes")
    blocks.append(PageTable(columns, seen.extremes, title="The most extreme images", folded=True))
    blocks.append(_class_table(seen.classes, seen.images_of_class))
    intro = (
        f"{seen.images:,} images of {len(seen.classes):,} classes{ratio}. {seen.duplicates:,} are copies, byte for "
        f"byte, of earlier ones; {seen.unreadable:,} could not be read."
    )
    made.sections.append(PageSection(title, blocks, intro=intro))


def _class_table(names: Sequence[str], counts: NDArray[np.int64]) -> PageTable:
    order: list[int] = np.argsort(-counts, kind="stable")[:_MOST_CLASSES].tolist()
    rows = [(names[number], int(counts[number])) for number in order]
    first = f"The largest {_MOST_CLASSES:,} of {len(names):,} classes" if len(names) > len(rows) else "Classes"
    return PageTable(("Class", "Images"), rows, title=f"{first}, with their images", folded=True)


def _facts(sets: Mapping[str, ShardSet]) -> Facts:
    shards = list(sets.values())
    facts = [(f"{each.num_samples:,}", f"images{', ' if name else ''}{name}") for name, each in sets.items()]
    facts += [(f"{shards[0].num_classes:,}", "classes"), (f"{sum(len(each.shards) for each in shards):,}", "shards")]
    sizes = [each.num_bytes for each in shards if each.num_bytes is not None]
    return (*facts, *([(show_bytes(sum(sizes)), "in all")] if len(sizes) == len(shards) else ()))
