"""Learn from a teacher beside, or instead of, labels (`distill`): the losses, and what the loop needs of them.

- hard: cross-entropy with the teacher's top-1 (DeiT, arXiv 2012.12877, eq. 3).
- soft: temperature^2 times KL(teacher || student) of the softmaxes at `temperature`, mean over images (DeiT, eq. 2, and
  big_vision's `distance: kl`). DeiT's released code divides by the number of classes, too, which the paper does not.
- feature: smooth L1 with beta 2, mean over all values, between the teacher's normed tokens and a linear layer on the
  student's (feature distillation, arXiv 2205.14141, eq. 2).
A student with a distillation token learns hard and soft with that token's head, and labels with the other's.

Teacher and student see the same pixels: crop, flip, erasing and mixing happen before both. The teacher's answer is a
function of the image alone, so neither processes nor micro-batches change it (up to rounding). Costs its forward pass
per training image; evaluations are the student's alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from shardvit.data_shards.loading.batch import Batch
from shardvit.model.vit import DistilledVit
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.stage.pixels import targets as labels_of
from shardvit.pipeline.stage.task import Classification, Example, Use
from shardvit.pipeline.tasks.feature_student import make_feature_student
from shardvit.pipeline.using.teacher import Teacher

_BETA = 2.0  # of smooth L1: feature distillation's default


@dataclass(frozen=True)
class Taught:
    """Targets of a micro-batch of n training images."""

    labels: Tensor  # as `Classification` has them
    teacher: Tensor  # float32: logits [n, classes]; kind feature: tokens [n, T, D]


@dataclass(kw_only=True)
class Distillation(Classification):
    """Classification with a teacher in training; evaluations are as without."""

    teacher: Teacher

    @property
    def more_train_metrics(self) -> tuple[str, ...]:
        return () if self.teacher.config.kind == "feature" else ("train/teacher_agreement",)

    def example(self, batch: Batch, *, use: Use) -> Example:
        if use == "eval":
            return super().example(batch, use=use)
        device = self.engine.device
        images = model_input(batch, device=device, dtype=torch.float32, normalisation=self.normalisation)
        labels = labels_of(batch, device=device, num_classes=len(self.classes), label_kind=self.label_kind)
        return Example((images.to(self.engine.input_dtype),), Taught(labels, self.teacher(images)))

    def loss(self, outputs: Any, targets: Taught) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Mean over images of (1 - share) * loss on labels + share * loss on the teacher, in float32. `outputs`: logits
        [n, classes], or these and what learns from the teacher."""
        logits, student = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        config = self.teacher.config
        match config.kind:
            case "hard":
                of_teacher = F.cross_entropy(student.float(), targets.teacher.argmax(dim=1))
            case "soft":
                of_teacher = divergence(student, targets.teacher, temperature=config.temperature)
            case "feature":
                of_teacher = F.smooth_l1_loss(student.float(), targets.teacher, beta=_BETA)
        # Also with share 1: every weight needs a gradient, if of zeros.
        return (1 - config.share) * self.train_loss(logits, targets.labels) + config.share * of_teacher

    def train_score(self, outputs: Any, targets: Taught) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Training top-1, and agreement with the teacher: [2]; kind feature: top-1 alone."""
        logits = self._predicted(outputs)
        top1 = super().train_score(logits, targets.labels)
        if not self.more_train_metrics:
            return top1
        return torch.stack([top1, (logits.argmax(dim=1) == targets.teacher.argmax(dim=1)).float().mean()])

    def _predicted(self, outputs: Any) -> Tensor:
        """The student's answer: with a distillation token the mean of both heads' logits, as in evaluations."""
        if not isinstance(outputs, tuple):
            return outputs.detach()
        logits, student = (each.detach() for each in outputs)
        return logits if self.teacher.config.kind == "feature" else (logits + student) / 2


def divergence(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """temperature^2 * KL(softmax(teacher / temperature) || softmax(student / temperature)), mean over images."""
    ours, theirs = ((each.float() / temperature).log_softmax(dim=1) for each in (student, teacher))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def prepare_student(model: nn.Module, teacher: Teacher, *, seed: int) -> None:
    """Make the student return what learns from the teacher, too, if that is not its logits."""
    if isinstance(model, DistilledVit):
        model.teaches_both = True
    elif teacher.config.kind == "feature":
        assert isinstance(model, VisionTransformer)
        make_feature_student(model, teacher, seed=seed)
