"""Training tasks (classification, masked patch prediction, own): batch -> model inputs, targets, loss, metrics.

A `Task` is a function of batch, seed and step, and all that the loop and the evaluation know about the training.
It flips, normalises and mixes on the device. A GPU reads and writes 24 bytes per value (44 with mixup): 0.3 ms for 256
images of 224 px at 3 TB/s [computed, not measured]. On a CPU the permutation to NCHW is the expensive pass, so it comes
first, on one-byte values. Nothing here makes the host wait for a GPU.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import GOOGLES, LabelKind, Normalisation, RandomStream
from shardvit.model.loss import LossFunction, image_losses, loss_function, probabilities, softmax_cross_entropy
from shardvit.model.masked_patch import colour_classes
from shardvit.model.vocabulary import COLOURS, LossKind
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.own_code.by_path import OwnCode, load_own, shown
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage import MaskedPatchStage, TrainStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.stage_data import StageData

Use = Literal["train", "eval"]
TOP = 5  # classes kept per answer
_MASK_SHARE, _OTHER_SHARE = 0.8, 0.1  # of the corrupted patches; the rest keep their embeddings


@dataclass(frozen=True)
class Example:
    """A micro-batch of n images for model and loss."""

    inputs: tuple[torch.Tensor, ...]  # each has n rows
    targets: Any  # a tensor of n rows, or what else the task's own `loss`, `train_score` and `tally` take


@dataclass(frozen=True)
class Answers:
    """A classifier's answers for n images, on the device."""

    rank: torch.Tensor  # int64 [n]: number of classes above the best true one, 0 if right; C without a true class
    true: torch.Tensor  # int64 [n]: that class
    probability_of_true: torch.Tensor  # float32 [n]
    top: torch.Tensor  # int64 [n, 5 or all]: classes from the best on; ties in class order
    probabilities: torch.Tensor  # float32 [n, 5 or all], of these


@dataclass(frozen=True)
class Tally:
    """Scores of n held-out images, on the device; float64 [n] each."""

    loss: torch.Tensor  # summed over the image's predictions
    right: torch.Tensor  # right predictions
    predictions: torch.Tensor
    answers: Answers | None = None  # None: there are no classes


class Task(Protocol):
    """Interface for loop and evaluation. `task: FILE:CLASS` names one: a subclass of `Classification`, or anything
    with these members (docs/own-code.md). One forward pass a micro-batch, by the loop: `inputs` go to the model."""

    step: int  # set by the loop before each step, from 0

    @property
    def engine(self) -> Engine: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...  # names; as a class attribute they size the model's head
    @property
    def kind_of_output(self) -> str: ...
    @property
    def score(self) -> str: ...  # top1 or accuracy, logged as val/SCORE
    @property
    def train_metric(self) -> str: ...  # train/SCORE: `train_score`
    def example(self, batch: Batch, *, use: Use) -> Example: ...
    def loss(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor: ...
    def train_score(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor: ...
    def tally(self, outputs: torch.Tensor, targets: Any) -> Tally: ...


@dataclass
class Classification:
    """Predict an image's labels. Own tasks subclass it; `loss`, `train_score` and `tally` take what `example` makes."""

    engine: Engine
    classes: tuple[str, ...]
    label_kind: LabelKind
    normalisation: Normalisation
    train_loss: LossFunction
    loss_kind: LossKind  # without smoothing on held-out images, to compare recipes
    seed: int = 0
    step: int = 0

    kind_of_output = "classes"  # the kind of `outputs`
    score = "top1"  # held-out accuracy, logged as val/SCORE
    train_metric = "train/top1"  # `train_score`

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.classes

    def example(self, batch: Batch, *, use: Use) -> Example:
        """Make images, and classes or their shares; mixed if the batch says so."""
        engine = self.engine
        return Example(
            (model_input(batch, device=engine.device, dtype=engine.input_dtype, normalisation=self.normalisation),),
            targets(batch, device=engine.device, num_classes=len(self.classes), label_kind=self.label_kind),
        )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean training loss over images for logits [n, classes], in float32."""
        return self.train_loss(outputs, targets)

    def train_score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Training top-1 as in `tally`, 0-dimensional; a mixed image counts with the predicted class's share."""
        best = outputs.detach().argmax(dim=1)
        hit = targets.gather(1, best[:, None]) if targets.is_floating_point() else best == targets
        return hit.float().mean()

    def tally(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tally:
        """Top-1 of each held-out image; with several labels, precision at 1 (big_vision's prec@1)."""
        found = answers(outputs, targets, kind=self.loss_kind)
        loss = image_losses(outputs, targets, kind=self.loss_kind).double()
        return Tally(loss, (found.rank == 0).double(), torch.ones_like(loss), found)

    def random(self, batch: Batch, *, use: Use, draws: int) -> NDArray[np.float64]:
        """Draw uniform numbers in [0, 1), [rows, draws], by (seed, epoch, sample): the same for any number of processes
        and after a restart; in evaluations the same each time."""
        words = (int(use == "eval"), batch.epochs.numpy(), batch.samples.numpy())
        return uniforms(RandomStream.OWN_TASK, self.seed, *words, draws=draws)


@dataclass
class MaskedPatches:
    """Predict the mean colour of each corrupted patch from the others: see `model.masked_patch`."""

    engine: Engine
    seed: int
    patch_size: int
    step: int = 0

    outputs = COLOURS
    kind_of_output = "colours"
    score = "accuracy"
    train_metric = "train/accuracy"

    def example(self, batch: Batch, *, use: Use) -> Example:
        """Make images, their corruption, and colours [n, K] of the corrupted patches."""
        engine = self.engine
        pixels = _flipped(batch, device=engine.device)
        colours = colour_classes(pixels.permute(0, 2, 3, 1), patch_size=self.patch_size)

        corruption_of = {"train": corruption_in_training, "eval": corruption_held_out}[use]
        corruption = corruption_of(batch, seed=self.seed, num_patches=colours.shape[1])
        source = to_device(corruption.source, engine.device)
        corrupted = to_device(corruption.corrupted, engine.device)
        images = _normalised(pixels, GOOGLES).to(engine.input_dtype)
        return Example((images, source, corrupted), colours.gather(1, corrupted))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over all corrupted patches for logits [n, K, 512]; K is the same for every image."""
        return softmax_cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def train_score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.detach().argmax(dim=-1) == targets).float().mean()

    def tally(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tally:
        """Count patches, not images."""
        losses = image_losses(outputs.flatten(0, 1), targets.flatten(), kind="softmax")
        loss = losses.double().view(targets.shape).sum(dim=1)
        right = (outputs.argmax(dim=-1) == targets).sum(dim=1).double()
        return Tally(loss, right, torch.full_like(loss, targets.shape[1]))


@dataclass(frozen=True)
class Corruption:
    """Corruption of the N patches of n images."""

    source: torch.Tensor  # int64 [n, N]: the patch whose embedding each patch gets; N for the mask's
    corrupted: torch.Tensor  # int64 [n, N // 2]: the patches to predict


def corruption_in_training(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """Corrupt by (seed, epoch, sample), independent of world size, workers and resumes."""
    return draw_corruption(
        RandomStream.CORRUPTION_TRAIN, seed, batch.epochs.numpy(), batch.samples.numpy(), num_patches=num_patches
    )


def corruption_held_out(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """Corrupt by (seed, sample), the same in every evaluation."""
    return draw_corruption(RandomStream.CORRUPTION_HELD_OUT, seed, batch.samples.numpy(), num_patches=num_patches)


def draw_corruption(*key: ArrayLike, num_patches: int) -> Corruption:
    """Corrupt a random half (rounded down) of each image's patches: 80 % get the mask's embedding, 10 % that of another
    patch of the image, 10 % keep theirs. `key`: words of `randomness.uniforms`; arrays have an entry per image."""
    count = num_patches // 2
    draws = uniforms(*key, draws=num_patches + count)
    corrupted = np.argsort(draws[:, :num_patches], axis=1, kind="stable")[:, :count]
    kind = draws[:, num_patches:]
    # The draw's position within the share selects a patch of the same image, so its loss ignores the rest of the batch.
    steps = np.floor((kind - _MASK_SHARE) / _OTHER_SHARE * (num_patches - 1)).astype(np.int64).clip(0, num_patches - 2)
    other = (corrupted + 1 + steps) % num_patches
    given = np.where(kind < _MASK_SHARE, num_patches, np.where(kind < _MASK_SHARE + _OTHER_SHARE, other, corrupted))
    source = np.tile(np.arange(num_patches), (len(draws), 1))
    np.put_along_axis(source, corrupted, given, axis=1)
    return Corruption(source=torch.from_numpy(source), corrupted=torch.from_numpy(corrupted))


def answers(logits: torch.Tensor, targets: torch.Tensor, *, kind: LossKind) -> Answers:
    """Rank the classes by logits [n, C]. The first of equal scores wins; an image with a NaN score is wrong."""
    count, classes = logits.shape
    if targets.is_floating_point():
        of_true = logits.masked_fill(targets <= 0, -torch.inf)
        true, unlabelled = of_true.argmax(dim=1), (targets > 0).sum(dim=1) == 0
    else:
        true, unlabelled = targets, torch.zeros(count, dtype=torch.bool, device=logits.device)
    score = logits.gather(1, true[:, None])
    numbers = torch.arange(classes, device=logits.device)
    above = (logits > score) | ((logits == score) & (numbers < true[:, None]))
    never = unlabelled | logits.isnan().any(dim=1)
    rank = above.sum(dim=1).masked_fill(never, classes)

    shares = probabilities(logits, kind)
    top: list[torch.Tensor] = []
    left = logits.clone()
    for _ in range(min(TOP, classes)):  # topk orders ties arbitrarily
        top.append(left.argmax(dim=1))
        left.scatter_(1, top[-1][:, None], -torch.inf)
    best = torch.stack(top, dim=1)
    return Answers(rank, true, shares.gather(1, true[:, None])[:, 0], best, shares.gather(1, best))


def make_task(
    recipe: Recipe, *, stage: StageName, data: StageData, normalisation: Normalisation, engine: Engine
) -> Task:
    """Make a stage's task; UserError if an own one lacks what the loop calls."""
    config = recipe.train_stage(stage)
    if isinstance(config, MaskedPatchStage):
        return MaskedPatches(engine=engine, seed=recipe.seed, patch_size=recipe.model.sizes.patch_size)
    made = (load_own(config.task) if config.task else Classification)(
        engine=engine,
        classes=task_outputs(config, classes=data.train.classes),
        label_kind="multi" if data.train.is_multi_label else "single",
        normalisation=normalisation,
        train_loss=loss_function(config.loss, label_smoothing=config.label_smoothing)
        if isinstance(config.loss, str)
        else _own_loss(config.loss.custom),
        loss_kind=config.loss_kind,
        seed=recipe.seed,
    )
    if lacking := [name for name in _TASKS if not hasattr(made, name)]:
        raise UserError(
            f"stages.{stage}.task {shown(config.task)}: it has no {lacking[0]}: take Classification as its base"
        )
    if (made.score, made.train_metric) not in _SCORES:
        raise UserError(
            f"stages.{stage}.task {shown(config.task)}: score is top1 or accuracy, train_metric is train/SCORE"
        )
    return made


def task_outputs(config: TrainStage, *, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Name the outputs of a stage's model: the classes, unless its own task has others."""
    own = None if config.task is None else getattr(load_own(config.task), "outputs", None)
    return own if isinstance(own, tuple) else classes  # a property depends on the classes


def _own_loss(code: OwnCode) -> LossFunction:
    """The user's loss, in float32 as the others."""
    function = load_own(code)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = function(logits.float(), targets)
        if not isinstance(found, torch.Tensor) or found.shape not in ((), (len(logits),)) or not found.requires_grad:
            got = type(found).__name__
            if isinstance(found, torch.Tensor):
                got = f"a tensor {[*found.shape]}" + ("" if found.requires_grad else ", without a gradient")
            raise UserError(
                f"loss.custom {shown(code)}: it returned {got}: return the mean, or a loss per image, [{len(logits)}]"
            )
        return found.mean() if found.ndim else found

    return loss


_TASKS = ("step", "engine", "outputs", "kind_of_output", "example", "loss", "train_score", "tally")
_SCORES = (("top1", "train/top1"), ("accuracy", "train/accuracy"))


def model_input(
    batch: Batch, *, device: torch.device, dtype: torch.dtype, normalisation: Normalisation = GOOGLES
) -> torch.Tensor:
    """Flip, normalise and mix on the device -> [n, 3, size, size] of `dtype`; in float32, rounded once."""
    values = _normalised(_flipped(batch, device=device), normalisation)
    if batch.mix is not None:
        values = _mixed_images(values, batch.mix)
    return values.to(dtype)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting. For small tensors: torch keeps the page-locked memory of all pending ones."""
    source = values if device.type == "cpu" else values.pin_memory()
    return source.to(device, non_blocking=True)


def _flipped(batch: Batch, *, device: torch.device) -> torch.Tensor:
    """uint8 [n, 3, size, size], contiguous."""
    pixels = batch.images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    mirrored = batch.mirrored.to(device, non_blocking=True)
    flipped = torch.empty(pixels.shape, dtype=torch.uint8, device=device)
    return torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels, out=flipped)


def _normalised(pixels: torch.Tensor, normalisation: Normalisation) -> torch.Tensor:
    mean, std = _mean_and_std(normalisation, device=pixels.device)
    return torch.sub(pixels, mean).div_(std)


@lru_cache(maxsize=8)
def _mean_and_std(normalisation: Normalisation, *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [3, 1, 1] each; cached, as copying makes the host wait."""
    mean, std = (
        torch.tensor(each, dtype=torch.float64).mul(255).float().to(device)[:, None, None]
        for each in (normalisation.mean, normalisation.std)
    )
    return mean, std


def targets(batch: Batch, *, device: torch.device, num_classes: int, label_kind: LabelKind) -> torch.Tensor:
    """Classes, int64 [n]; with several labels or mixing float32 [n, num_classes], 1 per label or its share."""
    labels = batch.labels.to(device, non_blocking=True)
    if label_kind == "single" and batch.mix is None:
        return labels
    if label_kind == "single":
        labels = labels[:, None]
    # An extra class absorbs the padding of rows.
    table = torch.zeros(len(labels), num_classes + 1, device=device)
    table.scatter_(1, torch.where(labels < 0, num_classes, labels), 1.0)
    shares = table[:, :num_classes]
    return shares.contiguous() if batch.mix is None else _weighted(shares, keep=batch.mix.keep)


def _mixed_images(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Mix each row with the next, and drop the last; overwrites `images`."""
    if mix.kind == "mixup":
        return _weighted(images, keep=mix.keep)
    if mix.box is not None:
        rows, columns = slice(mix.box.top, mix.box.bottom), slice(mix.box.left, mix.box.right)
        images[:-1, :, rows, columns] = images[1:, :, rows, columns].clone()  # before it is overwritten
    return images[:-1]


def _weighted(rows: torch.Tensor, *, keep: float) -> torch.Tensor:
    """Blend each row with the next: two products and a sum, each rounded, so that bits do not depend on the shape."""
    return (rows[:-1] * keep).add_(rows[1:] * (1 - keep))
