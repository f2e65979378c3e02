"""Gather and write the page of `shardvit show`: index.html, and each picture as PNG and SVG beside it.

Shards are opened as a recipe's are, damage is named and passed over, and a batch is read by training's own code (see
`pipeline.pictures.training_batch`). Takes some seconds, most of them for drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data_shards.errors import UserError
from data_shards.images.decode import PixelLimit
from data_shards.reading.opening import open_shards, splits_below
from data_shards.reading.overview import Overview, inspect_shards
from data_shards.shards.location import redacted
from data_shards.shards.shard_set import ShardSet, ShardsSpec
from data_shards.store.store import Store
from data_shards.text import counted, one_line, show_bytes
from launch.pages.blocks import PageBlock, PageImage, PagePicture, PageSection, PageTable, PageText
from launch.pages.page import render_page
from launch.target import INDEX_FILE
from pipeline.pictures.set_figures import contact_sheet, image_sizes, label_histogram
from pipeline.pictures.style import rendered
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.pictures import Picture
from pipeline.stage.stage_data import StageData, open_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_DAMAGED = 50  # that are named on the page
_MOST_CLASSES = 2_000  # rows of the table of classes


@dataclass(frozen=True)
class Looking:
    """How much to look at."""

    images: int
    most_labels: int
    seed: int
    report: Callable[[str], None]  # lines on the progress

    def inspect(self, shards: ShardSet, *, store: Store, limit: PixelLimit) -> Overview:
        """Look at a set."""
        much = {"images": self.images, "seed": self.seed, "most_labels": self.most_labels}
        return inspect_shards(shards, store=store, limit=limit, **much)


@dataclass
class Shown:
    """A page in the making; `files`: by name, pictures among them."""

    title: str = ""
    lead: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    sections: list[PageSection] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what is damaged

    def picture(self, made: tuple[Picture, Figure] | None, *, prefix: str = "") -> list[PageBlock]:
        """Draw a picture for the page; none if there is none."""
        if made is None:
            return []
        words, figure = made
        png, svg = rendered(figure)
        self.files |= {f"{prefix}{words.name}.png": png, f"{prefix}{words.name}.svg": svg}
        return [PagePicture(words.title, words.caption, words.alt, [PageImage(png, svg)])]

    def write(self, folder: Path, *, command: Literal["show", "figures"]) -> Path:
        """Write index.html and the files into `folder`, which is made. UserError: they cannot be."""
        page = render_page(self.title, sections=self.sections, lead=self.lead, facts=self.facts, notes=self.notes)
        return page.write(folder / INDEX_FILE, command=command, beside=self.files)


def show_shards(spec: ShardsSpec, *, store: Store, limit: PixelLimit, looking: Looking) -> Shown:
    """A set of shards, or the splits in a folder; UserError if there are none, or they cannot be opened."""
    splits = splits_below(spec.location, store=store) or {"": spec.location}
    seen: dict[str, Overview] = {}
    for split, location in splits.items():
        opened = open_shards(replace(spec, location=location), damaged="report", store=store, report=looking.report)
        seen[split] = looking.inspect(opened, store=store, limit=limit)
    made = Shown(
        title=f"{' and '.join(dict.fromkeys(each.shards.name for each in seen.values()))}: what is in the shards",
        lead=f"{redacted(spec.location)}, looked at before training.",
        facts=_facts([(split, each.shards) for split, each in seen.items()]),
    )
    for split, each in seen.items():
        prefix = f"{_file(split)}_" if split else ""
        made.sections.append(_set_section(made, each, title=split or "The set", prefix=prefix))
    return made


def show_recipe(recipe: Recipe, *, stage: StageName, step: int, looking: Looking) -> Shown:
    """A recipe's stage: a training batch as the model sees it, and both sets; UserError if shards are missing or
    damaged beyond what the recipe allows, or the stage has no such step."""
    data = open_data(recipe, stage=stage, report=looking.report)
    # Only now, with a recipe and shards that are good: torch takes seconds.
    from pipeline.pictures.training_batch import stage_steps

    plan = stage_steps(recipe, stage=stage, data=data)
    if not 0 <= step < plan.total_steps:
        raise UserError(f"--step {step}: {stage} takes {plan.total_steps:,} steps; give 0 to {plan.total_steps - 1:,}")
    limit, size = PixelLimit(recipe.data.max_image_pixels), recipe.train_stage(stage).image_size
    train, held_out = (looking.inspect(shards, store=data.store, limit=limit) for shards in (data.train, data.eval))
    made = Shown(
        title=f"{recipe.name}, {stage}: what the model will see",
        lead=_lead(plan, data, image_size=size),
        facts=_facts([("train", data.train), ("held out", data.eval)]),
    )
    made.sections += [
        _model_section(made, recipe, stage=stage, data=data, step=step, held_out=held_out),
        _set_section(made, train, title="Training set", prefix="train_", image_size=size),
        _set_section(made, held_out, title="Held-out set", prefix="eval_", image_size=size),
    ]
    return made


def _model_section(
    making: Shown, recipe: Recipe, *, stage: StageName, data: StageData, step: int, held_out: Overview
) -> PageSection:
    from pipeline.pictures.training_batch import (
        batch_figure,
        describe_batch,
        describe_epochs,
        epochs_figure,
        evaluation_crops,
        seen_batch,
        seen_in_epochs,
    )

    config = recipe.train_stage(stage)
    batch = seen_batch(recipe, stage=stage, data=data, step=step)
    first = batch.images[0]
    seen = seen_in_epochs(recipe, stage=stage, data=data, sample=first.sample)
    blocks = making.picture((describe_batch(batch, config), batch_figure(batch)))
    blocks += making.picture((describe_epochs(first, config, epochs=len(seen)), epochs_figure(seen)))
    blocks += making.picture(evaluation_crops(recipe, stage=stage, data=data, images=held_out.images))
    return PageSection(
        "What the model will see",
        blocks,
        intro="Read by the code that training reads with, so that these are the very pixels.",
    )


def _set_section(
    making: Shown, seen: Overview, *, title: str, prefix: str, image_size: int | None = None
) -> PageSection:
    shards = seen.shards
    damaged = list(shards.damage)
    damaged += [f"{each.shard}{': ' + one_line(each.key) if each.key else ''}: {each.reason}" for each in seen.damaged]
    blocks: list[PageBlock] = []
    for made in (contact_sheet(seen), label_histogram(seen), image_sizes(seen, image_size=image_size)):
        blocks += making.picture(made, prefix=prefix)
    if not blocks:
        blocks.append(PageText("Nothing in it can be read.", "note"))
    if damaged:
        making.notes += damaged[:3]
        if len(damaged) > 3:
            making.notes.append(f"{len(damaged) - 3:,} more of {one_line(shards.source)}, listed below it")
        rows = [(text,) for text in damaged[:_MOST_DAMAGED]]
        more = f"; the first {_MOST_DAMAGED} of {len(damaged):,}" if len(damaged) > _MOST_DAMAGED else ""
        blocks.append(PageTable(("Damaged",), rows, title=f"Damage that was met{more}"))
    order = sorted(range(shards.num_classes), key=lambda number: (-seen.images_of_class[number], number))
    rows = [(shards.classes[number], int(seen.images_of_class[number])) for number in order[:_MOST_CLASSES]]
    first = f"The largest {_MOST_CLASSES:,} of {shards.num_classes:,} classes" if len(order) > len(rows) else "Classes"
    blocks.append(PageTable(("Class", "Images"), rows, title=f"{first}, with their images", folded=True))
    size = "" if shards.num_bytes is None else f", {show_bytes(shards.num_bytes)}"
    of = "" if seen.is_whole else f" of {seen.opened:,} shards"
    effort = f"{show_bytes(seen.bytes_read)} were read{of}"
    if not shards.is_local:
        effort = f"{counted(seen.opened, 'shard')} {'was' if seen.opened == 1 else 'were'} fetched"
    intro = (
        f"{shards.source}: {counted(shards.num_samples, 'image')} of {shards.num_classes:,} classes in "
        f"{counted(len(shards.shards), 'shard')}{size}. To look at it, {effort}."
    )
    return PageSection(title, blocks, intro=intro)


def _lead(plan: StagePlan, data: StageData, *, image_size: int) -> str:
    epochs = plan.total_steps * plan.global_batch_images / plan.samples_per_epoch
    mixed = f" from {len(data.train_sizes)} sets" if len(data.train_sizes) > 1 else ""
    return (
        f"{plan.total_steps:,} steps of {plan.global_batch_images:,} images at {image_size} px{mixed}, {epochs:.3g} "
        "epochs; looked at before training."
    )


def _facts(sets: Sequence[tuple[str, ShardSet]]) -> tuple[tuple[str, str], ...]:
    def facts() -> Iterator[tuple[str, str]]:
        for name, shards in sets:
            yield f"{shards.num_samples:,}", f"images{', ' if name else ''}{name}"
        yield f"{sets[0][1].num_classes:,}", "classes"
        yield f"{sum(len(shards.shards) for _, shards in sets):,}", "shards"
        sizes = [shards.num_bytes for _, shards in sets]
        if None not in sizes:
            yield show_bytes(sum(size or 0 for size in sizes)), "in all"

    return tuple(facts())


def _file(split: str) -> str:
    return "".join(each if each.isalnum() or each in "-_" else "_" for each in split)[:60]
