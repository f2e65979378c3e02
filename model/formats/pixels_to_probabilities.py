"""A classifier with what lies before and after it: pixels as images have them -> the classes' probabilities.

What MLflow serves, so that nobody who loads it has to know how pixels were normalised. Resizing is not in it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.loss import probabilities
from model.saved.model_folder import SavedModelMeta
from model.vocabulary import LossKind


class PixelsToProbabilities(nn.Module):
    """uint8 [B, S, S, 3], RGB -> float32 [B, classes]; the softmax of the logits, or each one's sigmoid where the model
    was trained with that."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, *, meta: SavedModelMeta) -> None:
        super().__init__()
        self.model = model
        self._loss: LossKind = meta.loss
        self.register_buffer("mean", torch.tensor(meta.mean))
        self.register_buffer("std", torch.tensor(meta.std))

    def forward(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() / 255 - self.mean) / self.std
        return probabilities(self.model(images.permute(0, 3, 1, 2)), self._loss)
