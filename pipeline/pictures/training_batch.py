"""Draw a training batch beside its originals, one image over epochs, and evaluation's crops.

Uses training's own reading code: order, crop, augmentation, flip and mixing depend only on recipe, shards and step.
Reads only the first images of the global batch, the same for any number of processes; undoes normalisation. Costs two
decodes an image. Never starts shard commands (`pipe:`) for a run's pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardvit.data_shards.images.channels import open_image
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, Pixels
from shardvit.data_shards.images.decode import EncodedImage, PixelLimit
from shardvit.data_shards.images.size_phases import size_at
from shardvit.data_shards.loading.batch import Batch, batch_of
from shardvit.data_shards.loading.erasing import draw_erasures
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.order.sample_order import refs_in_set_order
from shardvit.data_shards.reading.overview import DrawnImage, reduced
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.text import counted
from shardvit.data_shards.vocabulary import Normalisation, RandomStream
from shardvit.pipeline.pictures.grid import MOST_LABELS, Cell, image_grid, label_names, whole_percent
from shardvit.pipeline.pictures.style import Drawn, keep_drawn
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, plan_stage
from shardvit.pipeline.recipe.stages.augment import AugmentConfig
from shardvit.pipeline.recipe.stages.pretraining import SelfSupervisedStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.pictures import DrawRequest, Picture, kept_pictures
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.batches import erasing, eval_transform, train_stream, train_transform
from shardvit.pipeline.stage.pixels import model_input, targets
from shardvit.pipeline.stage.stage_data import Stage, StageData, open_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_IMAGES = 32  # of a step's batch
SHOWN_EPOCHS = 16  # of one image
_PAIRS = 4  # in a row
_EVALUATED = 16  # held-out images
_LONGEST_SIDE = 512  # to which originals in memory are reduced
_CPU = torch.device("cpu")
_FILLS = {"const": "the mean colour", "rand": "a random colour", "pixel": "noise"}
_MIXES = {"mixup": "mixup", "cutmix": "CutMix"}


@dataclass(frozen=True)
class SeenImage:
    """One image of a step's global batch."""

    key: str
    sample: int  # index in the training set; the substitute's, if damaged
    seen: Pixels  # uint8 [size, size, 3] or float32 [size, size, channels], after crop, augmentation, flip and mixing
    original: Pixels  # [height, width, channels], the whole image, reduced if large
    own: str  # its classes
    labels: tuple[tuple[str, float], ...]  # of `seen`: classes and their shares of the target


@dataclass(frozen=True)
class SeenBatch:
    """First images of a step's global batch."""

    step: int  # steps done before it
    images: tuple[SeenImage, ...]
    inputs: torch.Tensor  # float32 [n, 3, size, size]: bit-identical to training's, before its cast
    mix: Mix | None


def seen_batch(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    step: int = 0,
    images: int = SHOWN_IMAGES,
    lanes: int = 0,
    normalisation: Normalisation | None = None,
) -> SeenBatch:
    """Read the first images of a step as training feeds them to the model. `lanes`: of an existing run's order; 0: of a
    run with few processes. UserError if sizes do not fit together, or an image is damaged where none may be."""
    recipe = _without_gpu(recipe)
    plan = stage_steps(recipe, stage=stage, data=data, lanes=lanes)
    count = min(images, plan.global_batch_images)
    # Treat the head of the global batch as one process's micro-batch.
    first = replace(plan, micro_batch_size=count, accumulation_steps=1)
    no_run = RunFolder(Path(), name=recipe.name)
    normalisation = normalisation or _usual(recipe)
    stream = train_stream(Stage(recipe, stage, data, first, run=no_run), place=Place(), normalisation=normalisation)
    batch = stream[step]
    inputs = model_input(batch, device=_CPU, dtype=torch.float32, normalisation=normalisation)
    samples = batch.samples[:count].tolist()
    with closing(ShardReader(data.train, store=data.store)) as reader:
        originals = [
            reduced(_image(reader, sample, recipe=recipe, data=data).pixels(), longest_side=_LONGEST_SIDE)
            for sample in samples
        ]
    labels = batch.labels.reshape(len(batch.keys), -1)[:count].tolist()
    own = [label_names(row, classes=data.train.classes) for row in labels]
    seen, shares = _as_pixels(inputs, normalisation, channels=data.channels)[:count], _shares(batch, data=data)[:count]
    shown = map(SeenImage, batch.keys, samples, seen, originals, own, shares)
    return SeenBatch(step, tuple(shown), inputs, batch.mix)


def seen_in_epochs(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    sample: int,
    most_epochs: int = SHOWN_EPOCHS,
    normalisation: Normalisation | None = None,
) -> list[Pixels]:
    """Show one sample as the model sees it in each of the first epochs, without mixing: uint8 [size, size, 3] each.
    CorruptSample or UnreadableImage if it is damaged."""
    recipe, config = _without_gpu(recipe), recipe.train_stage(stage)
    normalisation = normalisation or _usual(recipe)
    transform = train_transform(config, normalisation=normalisation)
    with closing(ShardReader(data.train, store=data.store)) as reader:
        image = _image(reader, sample, recipe=recipe, data=data)
    plan = stage_steps(recipe, stage=stage, data=data)
    epochs = math.ceil(plan.total_steps * plan.global_batch_images / plan.samples_per_epoch)
    numbers = np.arange(min(epochs, most_epochs), dtype=np.int64)
    draws = uniforms(RandomStream.AUGMENT, recipe.seed, numbers, np.full_like(numbers, sample), draws=DRAWS_PER_SAMPLE)
    begins = (numbers * plan.samples_per_epoch // plan.global_batch_images).tolist()  # steps before each epoch
    seen: list[Pixels] = []
    for number, step in enumerate(begins):
        own, draw = transform.at(size_at(plan.size_phases, step=step) or transform.image_size), draws[[number]]
        batch = replace(
            batch_of(torch.from_numpy(np.stack([own(image, draws=draw[0])[0]])), keys=[""]),
            mirrored=torch.from_numpy(own.mirrors(draw)),
            erasures=draw_erasures(erasing(config), draw, image_size=own.image_size),
        )
        inputs = model_input(batch, device=_CPU, dtype=torch.float32, normalisation=normalisation)
        seen += _as_pixels(inputs, normalisation, channels=data.channels)
    return seen


def stage_steps(recipe: Recipe, *, stage: StageName, data: StageData, lanes: int = 0) -> StagePlan:
    """Plan the stage for one process with the run's lanes. UserError if sizes do not fit."""
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=1)
    return replace(plan, lanes=lanes) if lanes else plan


def draw_training_batch(request: DrawRequest) -> Sequence[Drawn]:
    """Draw the run's next batch, and its first image over epochs; only once, however often the run resumes."""
    if any(each.picture.name == "augmentation" for each in kept_pictures(request.stage_folder)):
        return ()
    recipe, stage = request.recipe, request.stage
    data = open_data(recipe, stage=stage, report=lambda line: None)
    step = min(request.step, stage_steps(recipe, stage=stage, data=data).total_steps - 1)  # at the end: the last step
    record = request.folder.peek(stage)
    usual = _usual(recipe)
    mean, std = (tuple(record.model.get(name, getattr(usual, name))) for name in ("mean", "std"))
    drawn = batch_pictures(
        recipe, stage=stage, data=data, step=step, lanes=record.lanes, normalisation=Normalisation(mean, std)
    )
    keep_drawn(replace(request, step=step), drawn)
    return ()  # already written, at the batch's own step


def batch_pictures(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    step: int,
    lanes: int = 0,
    normalisation: Normalisation | None = None,
    shown: tuple[int, ...] = (),
) -> Iterator[Drawn]:
    """Draw a step's batch, and its first image over epochs; raises as `seen_batch`."""
    config = recipe.train_stage(stage)
    augment = config.augment
    batch = seen_batch(recipe, stage=stage, data=data, step=step, lanes=lanes, normalisation=normalisation)
    mixed = ""
    if batch.mix is not None and batch.mix.kind == "none":
        mixed = " This step's batch is not mixed."
    elif batch.mix is not None:
        mixed = (
            f" In this step {_MIXES[batch.mix.kind]} gives an image's own labels {whole_percent(batch.mix.keep)} of "
            "the target, and the next image's the rest."
        )
    if config.target_threshold is not None:
        mixed += f" The loss counts in full each class with more than {whole_percent(config.target_threshold)}."
    no_labels = " Labels are not used in this stage." if isinstance(config, SelfSupervisedStage) else ""
    count = f"The first {len(batch.images)} of {config.global_batch_size:,} images of the"
    after = f"after {counted(step, 'step')}"
    picture = Picture(
        name="training_batch",
        title=f"Training batch {after}, as the model sees it",
        caption=f"{count} step's batch: left the whole image, right what the model sees at {batch.inputs.shape[-1]} "
        f"px, with normalisation undone, and its labels. {_words(augment)}.{mixed}{no_labels}",
        alt=f"{count} batch {after}, each before and after augmentation; the first are "
        + ", ".join(image.own for image in batch.images[:8]),
        group="data",
    )
    cells: list[Cell] = []
    for image in batch.images:
        labels = [f"{whole_percent(share)} {name}" if share < 1 else name for name, share in image.labels]
        cells += [Cell(image.original, (image.own,)), Cell(image.seen, tuple(labels[:MOST_LABELS]))]
    yield picture, _pairs(cells, after="as seen", shown=shown)

    first = batch.images[0]
    seen = seen_in_epochs(recipe, stage=stage, data=data, sample=first.sample, normalisation=normalisation)
    epochs = counted(len(seen), "epoch")
    no_mixing = " Mixing with other images is left out." if augment.mixup_alpha or augment.cutmix_alpha else ""
    picture = Picture(
        name="augmentation",
        title=f"One image in {epochs}",
        caption=f"The same image ({first.own}) as the model sees it in {epochs}. {_words(augment)}.{no_mixing}",
        alt=f"{len(seen)} random crops and augmentations of one image of class {first.own}",
        group="data",
    )
    cells = [Cell(pixels, (f"epoch {number}",)) for number, pixels in enumerate(seen, start=1)]
    yield picture, image_grid(cells, columns=8, cell_inches=1.14, shown=shown)


def evaluation_crops(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    images: Sequence[DrawnImage],
    shown: tuple[int, ...] = (),
) -> Iterator[Drawn]:
    """Draw held-out images beside their evaluation crops; nothing without images."""
    config, recipe = recipe.train_stage(stage), _without_gpu(recipe)
    transform = eval_transform(config)
    cells: list[Cell] = []
    with closing(ShardReader(data.eval, store=data.store)) as reader:
        for image in images[:: -(-len(images) // _EVALUATED) or 1]:
            raw = reader.read(image.shard, row=image.row)
            crop = transform(_decoded(raw.image, recipe=recipe, data=data))
            cells += [Cell(image.pixels, (label_names(raw.labels, classes=data.eval.classes),)), Cell(crop)]
    if not cells:
        return
    share = f", crop share {config.eval_crop_share:g}" if config.eval_crop_share else ""
    picture = Picture(
        name="evaluation_crops",
        title="Held-out images, as they are evaluated",
        caption=f"Left the whole image, right what is left of it at {config.image_size} px (protocol "
        f"{config.eval_protocol}{share}).",
        alt=f"{len(cells) // 2} held-out images before and after the resize and crop of evaluation",
        group="data",
    )
    yield picture, _pairs(cells, after="as evaluated", shown=shown)


def _usual(recipe: Recipe) -> Normalisation:
    values = (0.5,) * recipe.model.channels
    return Normalisation(values, values)


def _pairs(cells: Sequence[Cell], *, after: str, shown: tuple[int, ...]) -> Figure:
    columns = min(_PAIRS, len(cells) // 2)
    titles = ("original", after) * columns
    return image_grid(cells, columns=2 * columns, cell_inches=1.14, together=2, column_titles=titles, shown=shown)


def _words(augment: AugmentConfig) -> str:
    if augment.crop == "resize_and_crop":
        parts = [f"Short side resized to {augment.resize_size} px, then a random crop"]
    elif augment.crop == "simple_random":
        parts = ["Short side resized to the crop's, then a random crop with a mirrored border of 4 px"]
    else:
        parts = ["Random crop of {} to {} of the area".format(*map(whole_percent, augment.crop_area))]
    if augment.flip:
        parts.append(f"{whole_percent(augment.flip)} mirrored")
    if augment.rand_augment:
        parts.append(f"RandAugment({augment.rand_augment.num_ops}, {augment.rand_augment.magnitude})")
    if augment.auto_augment:
        parts.append(f"timm's {augment.auto_augment}")
    if augment.color_jitter:
        parts.append("colour jitter of {:g}, {:g}, {:g} and {:g}".format(*augment.color_jitter))
    if augment.random_erasing:
        share, fill = whole_percent(augment.random_erasing.probability), _FILLS[augment.random_erasing.mode]
        parts.append(f"{share} with a part replaced by {fill}")
    for kind, alpha in (("mixup", augment.mixup_alpha), ("CutMix", augment.cutmix_alpha)):
        if alpha:
            parts.append(f"{kind} with alpha {alpha:g}")
    if augment.mixed_share < 1:
        parts.append(f"which mix {whole_percent(augment.mixed_share)} of the batches")
    if augment.custom:
        parts.append("without the user's own augmentation, as drawing runs no code of a recipe")
    return ", ".join(parts)


def _shares(batch: Batch, *, data: StageData) -> list[tuple[tuple[str, float], ...]]:
    classes = data.train.classes
    kind = "multi" if data.train.is_multi_label else "single"
    found = targets(batch, device=_CPU, num_classes=len(classes), label_kind=kind)
    if not found.is_floating_point():
        return [((classes[label], 1.0),) for label in found.tolist()]
    rows: list[tuple[tuple[str, float], ...]] = []
    for row in found.tolist():
        present = sorted((label for label, share in enumerate(row) if share), key=lambda label: -row[label])
        rows.append(tuple((classes[label], row[label]) for label in present))
    return rows


def _as_pixels(inputs: torch.Tensor, normalisation: Normalisation, *, channels: int) -> list[Pixels]:
    """Undo normalisation, and round colours."""
    top = 1 if channels else 255
    mean, std = (torch.tensor(each).view(-1, 1, 1) * top for each in (normalisation.mean, normalisation.std))
    pixels = inputs * std + mean
    if not channels:
        pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
    return list(pixels.permute(0, 2, 3, 1).contiguous().numpy())


def _without_gpu(recipe: Recipe) -> Recipe:
    """Decode JPEGs on the CPU: the GPU decoder's pixels differ by a level or two."""
    if recipe.data.decoder != "gpu":
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"decoder": "auto"})})


def _image(reader: ShardReader, sample: int, *, recipe: Recipe, data: StageData) -> EncodedImage:
    starts = np.cumsum([0, *reader.shards.shard_sizes[:-1]])
    ref = refs_in_set_order(np.array([sample]), shard_starts=starts)
    return _decoded(reader.read(int(ref.shard[0]), row=int(ref.row[0])).image, recipe=recipe, data=data)


def _decoded(content: bytes, *, recipe: Recipe, data: StageData) -> EncodedImage:
    limit = PixelLimit(recipe.data.max_image_pixels)
    return open_image(content, channels=data.channels, decoder=recipe.data.decoder, limit=limit)
