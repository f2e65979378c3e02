"""Losses of ViT pre-training and fine-tuning on hard or soft targets, and their probabilities.

The paper pre-trains with the sigmoid loss (vision_transformer issue 34) and fine-tunes with softmax. Computed in
float32, so large logits neither overflow nor lose precision in sums over thousands of classes. To add a loss: its name
and row of `LOSSES` in `model/vocabulary.py`, a function and its cases here.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardvit.model.vocabulary import LOSSES, LossKind

LossFunction = Callable[[Tensor, Tensor], Tensor]


def loss_function(
    kind: LossKind, *, label_smoothing: float = 0.0, target_threshold: float | None = None
) -> LossFunction:
    """Return a loss: (logits [B, C], targets) -> float32 scalar, the mean over the batch.

    Targets are class indices, int64 [B], or class weights, floating [B, C]: 1 per label, or shares after mixing.
    Sigmoid takes any in [0, 1]; softmax expects a sum of 1 and otherwise weights each row by its sum, as optax does.
    `target_threshold` is bce's alone. ValueError for `label_smoothing` out of range.
    """
    bound = LOSSES[kind].smoothing_below
    if not 0.0 <= label_smoothing < bound:
        raise ValueError(f"label_smoothing must be at least 0 and below {bound:g} for {kind}, not {label_smoothing}")
    match kind:
        case "softmax":
            return partial(softmax_cross_entropy, label_smoothing=label_smoothing)
        case "sigmoid":
            return partial(sigmoid_cross_entropy, label_smoothing=label_smoothing)
        case "bce":
            return partial(binary_cross_entropy, label_smoothing=label_smoothing, target_threshold=target_threshold)


def image_losses(logits: Tensor, targets: Tensor, *, kind: LossKind) -> Tensor:
    """Loss of each image without smoothing, float32 [B]; arguments as for a `loss_function`."""
    logits, targets = logits.float(), _float32_unless_indices(targets)
    match kind:
        case "softmax":
            return F.cross_entropy(logits, targets, reduction="none")
        case "sigmoid":
            return _class_losses(logits, targets).sum(dim=-1)
        case "bce":
            return _class_losses(logits, targets).mean(dim=-1)


def probabilities(logits: Tensor, kind: LossKind) -> Tensor:
    """Class probabilities from logits [B, C]; sigmoid's do not sum to one."""
    match kind:
        case "softmax":
            return logits.softmax(dim=1)
        case "sigmoid" | "bce":
            return logits.sigmoid()


def softmax_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-sum_c t_c log softmax(logits)_c, mean over the batch, with t = (1 - s) * target + s / C."""
    return F.cross_entropy(logits.float(), _float32_unless_indices(targets), label_smoothing=label_smoothing)


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy, summed over classes (as Google's `sigmoid_xent`), mean over the batch. Smoothing maps yes
    to 1 - s and no to s (big_vision: `onehot(1000, on=0.9999, off=0.0001)`), not s / C as for softmax."""
    return _class_losses(logits.float(), targets, label_smoothing=label_smoothing).sum(dim=-1).mean()


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, target_threshold: float | None = None
) -> Tensor:
    """Binary cross-entropy, mean over classes and batch, as timm's `BinaryCrossEntropy`. Smoothing is softmax's; then
    targets above a threshold count as 1, others as 0 (ResNet strikes back: 0.2; DeiT III: 0, each class of a mix)."""
    targets = _rows(logits, targets) * (1.0 - label_smoothing) + label_smoothing / logits.shape[-1]
    if target_threshold is not None:
        targets = (targets > target_threshold).float()
    return F.binary_cross_entropy_with_logits(logits.float(), targets)


def _class_losses(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    targets = _rows(logits, targets) * (1.0 - 2.0 * label_smoothing) + label_smoothing
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def _rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Class weights, float32 [B, C]."""
    return (targets if targets.is_floating_point() else F.one_hot(targets, logits.shape[-1])).float()


def _float32_unless_indices(targets: Tensor) -> Tensor:
    return targets.float() if targets.is_floating_point() else targets


class PixelsToProbabilities(nn.Module):
    """uint8 [B, S, S, 3] RGB (or float32 [B, S, S, channels] with `top` 1) -> probabilities, float32 [B, classes], for
    MLflow: normalises, does not resize."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, *, mean: Sequence[float], std: Sequence[float], kind: LossKind, top: int = 255
    ) -> None:
        super().__init__()
        self.model = model
        self.kind: LossKind = kind
        self.top = top
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() / self.top - self.mean) / self.std
        return probabilities(self.model(images.permute(0, 3, 1, 2)), self.kind)
