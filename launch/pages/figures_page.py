"""Make the page of `shardvit figures`: find the model and images, draw, and write a folder."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from timm.models.vision_transformer import VisionTransformer

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.packing.sources.folder import image_files
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.safe_paths import require_inside
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import one_line
from shardvit.launch.local.output import say
from shardvit.launch.pages.blocks import PageSection, PageText
from shardvit.launch.pages.shards_page import Shown
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.pictures.held_out_images import held_out_access
from shardvit.pipeline.pictures.paper.attention_inputs import images_of_files, images_of_shards, images_to_look_at, look
from shardvit.pipeline.pictures.paper.model_figures import (
    built,
    figures_of_attention,
    figures_of_weights,
    left_out,
    numbers_of,
)
from shardvit.pipeline.pictures.paper.weight_figures import evenly
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE, WeightsKind
from shardvit.pipeline.runs.evaluations import OWN_SET
from shardvit.pipeline.runs.pictures import DrawRequest
from shardvit.pipeline.transfer.results import model_origin
from shardvit.pipeline.using.find_model import FoundModel, find_model
from shardvit.pipeline.using.predict import DeviceChoice, channels_of, chosen_device

NUMBERS_FILE = "numbers.npz"
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class Wanted:
    """Arguments of the command."""

    model: Path
    images: tuple[str, ...]
    weights: WeightsKind | None
    device: DeviceChoice
    count: int | None
    label: str | None
    classes: Path | None


def make_page(wanted: Wanted, *, limit: PixelLimit, folder: Path) -> Path:
    """Draw and write everything; return the page. UserError if the model, images or folder are unusable."""
    device = chosen_device(wanted.device)
    found = find_model(wanted.model, weights=wanted.weights)
    meta = found.meta
    if (run := model_origin(found.origin).run) is not None:
        require_inside(Path(found.origin), folder=run.boundary)
    if found.origin != str(wanted.model):
        say(f"the model is {found.origin}")
    notes = [*found.notes, *left_out(meta)]
    model = built(found, device=device)
    seen = _images(wanted, found, limit=limit, notes=notes) if isinstance(model, VisionTransformer) else None
    for note in notes:
        say(f"note: {note}")
    made, attention = Shown(title=f"Figures of {one_line(str(wanted.model))}", notes=notes), None
    if seen is not None and isinstance(model, VisionTransformer):
        batch, classes = seen
        attention = look(model, batch, meta=meta)
        figures = figures_of_attention(attention, batch, meta=meta, classes=classes)
        made.sections.append(PageSection("Where it looks", made.pictures(figures)))
    weights = made.pictures(figures_of_weights(model, meta=meta))
    made.sections.append(PageSection("What its weights have learnt", weights))
    numbers = numbers_of(model, attention)
    shapes = "\n".join(f"{name:20} {'x'.join(map(str, array.shape))}" for name, array in numbers.items())
    text = PageText(shapes, kind="code", title=f"The arrays in {NUMBERS_FILE}")
    made.sections.append(PageSection("Numbers", [text]))
    made.facts = _facts(meta, images=0 if attention is None else attention.images)
    content = io.BytesIO()
    np.savez(content, **numbers)  # pyright: ignore[reportArgumentType] -- its stub takes the names for flags
    made.files[NUMBERS_FILE] = content.getvalue()
    return made.write(folder, command="figures")


def _facts(meta: SavedModelMeta, *, images: int) -> tuple[tuple[str, str], ...]:
    facts = [(f"{meta.image_size} px", "images of the model")]
    if meta.model.kind == "vit":
        grid, sizes = meta.model.grid_size(meta.image_size), meta.model.sizes
        facts += [(f"{sizes.depth} x {sizes.heads}", "blocks x heads"), (f"{grid} x {grid}", "patches")]
    return (*facts, *([(f"{images:,}", "images looked at")] if images else ()))


def _images(
    wanted: Wanted, found: FoundModel, *, limit: PixelLimit, notes: list[str]
) -> tuple[Batch, tuple[str, ...]] | None:
    """Read the images and their label names; None if none are given and the model belongs to no run."""
    meta = found.meta
    count = wanted.count or images_to_look_at(meta)
    if not wanted.images:
        _refuse_of_tars(wanted, why="no shards are named")
        origin = model_origin(found.origin)
        if origin.run is None or origin.stage is None:
            notes.append("the model is no run's: name images or shards after it for the figures of its attention")
            return None
        recipe = parse_recipe(origin.run.path / RECIPE_FILE)
        if origin.stage == "swap_head":
            raise UserError(f"{found.origin}: swap_head has no images of its own: name images or shards after it")
        request = DrawRequest(origin.run, recipe, origin.stage, step=0)
        access = held_out_access(request, set_name=OWN_SET)
        return images_of_shards(access, meta=meta, count=count, fetch="missing"), access.shards.classes
    if all(_is_image(place) for place in wanted.images):
        _refuse_of_tars(wanted, why="the images are files")
        files = image_files([Path(place) for place in wanted.images])
        chosen = [files[number] for number in evenly(len(files), most=count)]
        batch, faults = images_of_files(chosen, meta=meta, limit=limit)
        notes += faults[:_FAULTS_SHOWN]
        if len(faults) > _FAULTS_SHOWN:
            notes.append(f"{len(faults) - _FAULTS_SHOWN:,} more images cannot be read")
        return batch, ()
    if len(wanted.images) != 1:
        raise UserError("figures: name image files and folders of images, or one set of shards, after the model")
    place = wanted.images[0]
    store = Store(None if is_local(place) else CacheConfig())
    spec = ShardsSpec(place, label=wanted.label, classes=wanted.classes)
    shards = open_shards(spec, damaged="report", report=say, store=store)
    notes += shards.damage[:_FAULTS_SHOWN]
    channels = channels_of(shards, meta)
    access = Access(shards, store=store, pixel_limit=limit, on_corrupt="substitute", channels=channels)
    return images_of_shards(access, meta=meta, count=count, fetch="missing"), shards.classes


def _refuse_of_tars(wanted: Wanted, *, why: str) -> None:
    for flag, value in (("--label", wanted.label), ("--classes", wanted.classes)):
        if value is not None:
            raise UserError(f"{flag} is for tars without a manifest, and {why}: leave it out")


def _is_image(place: str) -> bool:
    """True for a file or folder of images, rather than shards."""
    path = Path(place)
    if is_local(place) and path.is_dir():
        return not (path / "manifest.json").exists() and not any(path.glob("*.tar"))
    return is_local(place) and path.suffix != ".tar" and path.exists()
