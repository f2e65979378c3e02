"""The images of a training step as the model sees them, and as they were before; and one image in several epochs.

Rebuilt in another process by the code that training reads its batches with: order, crop, augmentation, flip and mixing
are functions of recipe, shards and step. The first images of a step's global batch are read, and no others; they are
the same for any number of processes. Normalisation is undone: the pixels are shown as they were before it. Costs two
decodings for each image that is shown. Commands among the shards are not started for a run's pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_shards.images.crops import DRAWS_PER_SAMPLE, Pixels
from data_shards.images.decode import PixelLimit, read_image
from data_shards.loading.batch import Batch
from data_shards.loading.mixing import Mix
from data_shards.order.randomness import uniforms
from data_shards.reading.overview import DrawnImage, reduced
from data_shards.reading.shard_reader import ShardReader
from data_shards.text import counted
from data_shards.vocabulary import GOOGLES, Normalisation, RandomStream
from pipeline.pictures.grid import MOST_LABELS, Cell, image_grid, label_names, percent
from pipeline.pictures.style import keep_picture
from pipeline.ranks.place import Place
from pipeline.recipe.data import AugmentConfig
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import MaskedPatchStage, TrainStage
from pipeline.recipe.stage_plan import StagePlan, plan_stage
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.pictures import DrawRequest, Picture, kept_pictures
from pipeline.runs.run_folder import RunFolder
from pipeline.stage.batches import eval_transform, train_stream, train_transform
from pipeline.stage.stage_data import Stage, StageData, open_data
from pipeline.stage.task import model_input, targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_IMAGES = 32  # of a step's batch
SHOWN_EPOCHS = 16  # of one image
_PAIRS = 4  # in a row
_EVALUATED = 16  # held-out images that are shown
_LONGEST_SIDE = 512  # of an original image that is kept in memory
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SeenImage:
    """One image of a step's global batch."""

    key: str
    sample: int  # its number in the training set; of the substitute, if it is damaged
    seen: Pixels  # uint8 [size, size, 3], after crop, augmentation, flip and mixing
    original: Pixels  # uint8 [height, width, 3], all of it, perhaps reduced
    own: str  # its classes
    labels: tuple[tuple[str, float], ...]  # of what is seen: classes, and the share of the loss's target that each has


@dataclass(frozen=True)
class SeenBatch:
    """The first images of a step's global batch."""

    step: int  # so many steps come before it
    images: tuple[SeenImage, ...]
    inputs: torch.Tensor  # float32 [n, 3, size, size]: bit for bit what training casts to the engine's type
    mix: Mix | None


def seen_batch(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    step: int = 0,
    images: int = SHOWN_IMAGES,
    lanes: int = 0,
    normalisation: Normalisation = GOOGLES,
) -> SeenBatch:
    """First micro-batch of a step as a training stage feeds it to the model.

    `lanes`: of the run's order, where it has begun; 0: those of a run of few processes. UserError for sizes that do not
    fit together, or a damaged image where none may be.
    """
    recipe = _without_gpu(recipe)
    plan = stage_steps(recipe, stage=stage, data=data, lanes=lanes)
    count = min(images, plan.global_batch_images)
    # The first so many places of the global batch, as if they were a process's micro-batch.
    first = replace(plan, micro_batch_size=count, accumulation_steps=1)
    no_run = RunFolder(Path(), name=recipe.name)
    batch = train_stream(Stage(recipe, stage, data, first, run=no_run), place=Place())[step]
    inputs = model_input(batch, device=_CPU, dtype=torch.float32, normalisation=normalisation)
    classes = data.train.classes
    with closing(ShardReader(data.train, store=data.store)) as reader:
        originals = [_original(reader, sample, recipe=recipe) for sample in batch.samples[:count].tolist()]
    own = [label_names(row, classes=classes) for row in batch.labels.reshape(len(batch.keys), -1).tolist()]
    shares = _shares(batch, data=data)
    seen = _as_pixels(inputs, normalisation)
    samples = batch.samples.tolist()
    shown = (
        SeenImage(batch.keys[at], samples[at], seen[at], originals[at], own[at], shares[at]) for at in range(count)
    )
    return SeenBatch(step, tuple(shown), inputs, batch.mix)


def seen_in_epochs(
    recipe: Recipe, *, stage: StageName, data: StageData, sample: int, most_epochs: int = SHOWN_EPOCHS
) -> list[Pixels]:
    """One sample as the model sees it in each epoch of the stage, without mixing: uint8 [size, size, 3] each, of the
    first `most_epochs` at most.

    Raises CorruptSample or UnreadableImage if it is damaged.
    """
    recipe = _without_gpu(recipe)
    transform = train_transform(recipe.train_stage(stage))
    shard, row = place_of_sample(data.train.shard_sizes, sample)
    with closing(ShardReader(data.train, store=data.store)) as reader:
        raw = reader.read(shard, row=row)
    image = read_image(raw.image, decoder=recipe.data.decoder, limit=PixelLimit(recipe.data.max_image_pixels))
    plan = stage_steps(recipe, stage=stage, data=data)
    epochs = math.ceil(plan.total_steps * plan.global_batch_images / plan.samples_per_epoch)
    numbers = np.arange(min(epochs, most_epochs), dtype=np.int64)
    draws = uniforms(RandomStream.AUGMENT, recipe.seed, numbers, np.full_like(numbers, sample), draws=DRAWS_PER_SAMPLE)
    seen: list[Pixels] = []
    for number in range(len(numbers)):
        pixels, mirrored = transform(image, draws=draws[number])
        seen.append(np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels))
    return seen


def stage_steps(recipe: Recipe, *, stage: StageName, data: StageData, lanes: int = 0) -> StagePlan:
    """The stage's numbers for one process, with the lanes of the run's order; UserError if sizes do not fit."""
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=1)
    return replace(plan, lanes=lanes) if lanes else plan


def place_of_sample(shard_sizes: Sequence[int], sample: int) -> tuple[int, int]:
    """The shard of a sample's number, and its row there."""
    ends = np.cumsum(shard_sizes)
    shard = int(np.searchsorted(ends, sample, side="right"))
    return shard, sample - int(ends[shard]) + shard_sizes[shard]


def batch_figure(batch: SeenBatch) -> Figure:
    """Each image beside what the model sees of it."""
    cells: list[Cell] = []
    for image in batch.images:
        cells.append(Cell(image.original, (image.own,)))
        labels = [f"{percent(share)} {name}" if share < 1 else name for name, share in image.labels]
        cells.append(Cell(image.seen, tuple(labels[:MOST_LABELS])))
    columns = min(_PAIRS, len(batch.images))
    return image_grid(
        cells,
        columns=2 * columns,
        cell_inches=1.14,
        together=2,
        column_titles=("original", "as seen") * columns,
    )


def epochs_figure(seen: Sequence[Pixels]) -> Figure:
    """One image as it is seen in several epochs."""
    cells = [Cell(pixels, (f"epoch {number}",)) for number, pixels in enumerate(seen, start=1)]
    return image_grid(cells, columns=8, cell_inches=1.14)


def describe_batch(batch: SeenBatch, config: TrainStage) -> Picture:
    """The words of `batch_figure`."""
    augment = config.augment
    mixed = ""
    if batch.mix is not None:
        how = {"mixup": "mixup", "cutmix": "CutMix"}[batch.mix.kind]
        mixed = (
            f" In this step {how} gives an image's own labels {percent(batch.mix.keep)} of the target, and the next "
            f"image's the rest."
        )
    no_labels = " Labels are not used in this stage." if isinstance(config, MaskedPatchStage) else ""
    count = f"The first {len(batch.images)} of {config.global_batch_size:,} images"
    return Picture(
        name="training_batch",
        title=f"Training batch after {counted(batch.step, 'step')}, as the model sees it",
        caption=f"{count} of the step's batch: left the whole image, right what the model sees at {config.image_size} "
        f"px, with normalisation undone, and its labels. {_words(augment)}.{mixed}{no_labels}",
        alt=f"{count} of the batch after {counted(batch.step, 'step')}, each before and after augmentation; the first "
        "are " + ", ".join(image.own for image in batch.images[:8]),
        group="data",
    )


def describe_epochs(image: SeenImage, config: TrainStage, *, epochs: int) -> Picture:
    """The words of `epochs_figure`."""
    mixing = (
        " Mixing with other images is left out." if config.augment.mixup_alpha or config.augment.cutmix_alpha else ""
    )
    return Picture(
        name="augmentation",
        title=f"One image in {counted(epochs, 'epoch')}",
        caption=f"The same image ({image.own}) as the model sees it in {counted(epochs, 'epoch')}. "
        f"{_words(config.augment)}.{mixing}",
        alt=f"{epochs} random crops and augmentations of one image of class {image.own}",
        group="data",
    )


def evaluation_crops(
    recipe: Recipe, *, stage: StageName, data: StageData, images: Sequence[DrawnImage]
) -> tuple[Picture, Figure] | None:
    """Held-out images beside what an evaluation's crop leaves of them; None without images."""
    config, recipe = recipe.train_stage(stage), _without_gpu(recipe)
    transform = eval_transform(config)
    classes = data.eval.classes
    limit = PixelLimit(recipe.data.max_image_pixels)
    cells: list[Cell] = []
    with closing(ShardReader(data.eval, store=data.store)) as reader:
        for image in images[:: -(-len(images) // _EVALUATED) or 1]:
            raw = reader.read(image.shard, row=image.row)
            crop = transform(read_image(raw.image, decoder=recipe.data.decoder, limit=limit))
            cells += [Cell(image.pixels, (label_names(raw.labels, classes=classes),)), Cell(crop)]
    if not cells:
        return None
    share = f", crop share {config.eval_crop_share:g}" if config.eval_crop_share else ""
    words = Picture(
        name="evaluation_crops",
        title="Held-out images, as they are evaluated",
        caption=f"Left the whole image, right what is left of it at {config.image_size} px (protocol "
        f"{config.eval_protocol}{share}).",
        alt=f"{len(cells) // 2} held-out images before and after the resize and crop of evaluation",
        group="data",
    )
    columns = min(_PAIRS, len(cells) // 2)
    titles = ("original", "as evaluated") * columns
    return words, image_grid(cells, columns=2 * columns, cell_inches=1.14, together=2, column_titles=titles)


def draw_training_batch(request: DrawRequest) -> None:
    """The next step's batch of a run, and its first image in several epochs; once, as a run may go on many times."""
    if any(each.picture.name == "augmentation" for each in kept_pictures(request.stage_folder)):
        return
    recipe, stage = request.recipe, request.stage
    config = recipe.train_stage(stage)
    data = open_data(recipe, stage=stage, report=lambda line: None)
    lanes = request.folder.peek(stage).lanes
    total_steps = stage_steps(recipe, stage=stage, data=data).total_steps
    step = min(request.step, total_steps - 1)  # all are done: the last one
    batch = seen_batch(recipe, stage=stage, data=data, step=step, lanes=lanes)
    keep_picture(request.stage_folder, describe_batch(batch, config), figure=batch_figure(batch), step=step)
    image = batch.images[0]
    seen = seen_in_epochs(recipe, stage=stage, data=data, sample=image.sample)
    words = describe_epochs(image, config, epochs=len(seen))
    keep_picture(request.stage_folder, words, figure=epochs_figure(seen), step=step)


def _words(augment: AugmentConfig) -> str:
    """The recipe's augmentation in a few words."""
    match augment.crop:
        case "resize_and_crop":
            crop = f"Short side resized to {augment.resize_size} px, then a random crop"
        case _:
            low, high = augment.crop_area
            crop = f"Random crop of {percent(low)} to {percent(high)} of the area"
    parts = [crop]
    if augment.flip:
        parts.append(f"{percent(augment.flip)} mirrored")
    if augment.rand_augment:
        parts.append(f"RandAugment({augment.rand_augment.num_ops}, {augment.rand_augment.magnitude})")
    if augment.mixup_alpha:
        parts.append(f"mixup with alpha {augment.mixup_alpha:g}")
    if augment.cutmix_alpha:
        parts.append(f"CutMix with alpha {augment.cutmix_alpha:g}")
    return ", ".join(parts)


def _shares(batch: Batch, *, data: StageData) -> list[tuple[tuple[str, float], ...]]:
    """The classes of each row's target, the largest share first."""
    classes = data.train.classes
    kind = "multi" if data.train.is_multi_label else "single"
    found = targets(batch, device=_CPU, num_classes=len(classes), label_kind=kind)
    if not found.is_floating_point():
        return [((classes[label], 1.0),) for label in found.tolist()]
    rows: list[tuple[tuple[str, float], ...]] = []
    for row in found:
        some = sorted(torch.nonzero(row)[:, 0].tolist(), key=lambda label: (-float(row[label]), label))
        rows.append(tuple((classes[label], float(row[label])) for label in some))
    return rows


def _as_pixels(inputs: torch.Tensor, normalisation: Normalisation) -> list[Pixels]:
    """The inverse of normalisation, rounded."""
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (normalisation.mean, normalisation.std))
    pixels = (inputs * std + mean).round_().clamp_(0, 255).to(torch.uint8)
    return list(pixels.permute(0, 2, 3, 1).contiguous().numpy())


def _without_gpu(recipe: Recipe) -> Recipe:
    """Its JPEGs decoded on the CPU: pixels of a GPU's decoder differ by a step or two of brightness."""
    if recipe.data.decoder != "gpu":
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"decoder": "auto"})})


def _original(reader: ShardReader, sample: int, *, recipe: Recipe) -> Pixels:
    """A sample's whole image, which the batch has read before."""
    shard, row = place_of_sample(reader.shards.shard_sizes, sample)
    limit = PixelLimit(recipe.data.max_image_pixels)
    pixels = read_image(reader.read(shard, row=row).image, decoder=recipe.data.decoder, limit=limit).pixels()
    return reduced(pixels, longest_side=_LONGEST_SIDE)
