"""Training tasks: their interface, and classification. The others are in `pipeline/tasks/`.

A `Task` is a function of batch, seed and step, and all that the loop and the evaluation know about the training.
Nothing here makes the host wait for a GPU.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import LabelKind, Normalisation, RandomStream
from shardvit.model.loss import LossFunction, image_losses, probabilities
from shardvit.model.vocabulary import LossKind
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.stage.pixels import model_input, targets

Use = Literal["train", "eval"]
TOP = 5  # classes kept per answer


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
    def score(self) -> str: ...  # top1 or accuracy, logged as val/SCORE; loss: there is none
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
