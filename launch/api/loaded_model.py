"""A trained model as an `nn.Module`, with its preprocessing and its classes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.folder import image_files
from shardvit.pipeline.recipe.vocabulary import WeightsKind
from shardvit.pipeline.using.predict import (
    AnyImage,
    DeviceChoice,
    ImagePrediction,
    ImageTransform,
    Predictor,
    open_predictor,
    predict_images,
)


class LoadedModel(nn.Module):
    """A trained model, in eval mode and without gradients: normalised images [B, 3, S, S] -> logits [B, classes].

    Attributes:
        net: the network itself, whose parameters have timm's names.
        transform: a path, bytes, a PIL image or an array -> float32 [3, S, S], as in the stage's evaluations.
        class_names: of the logits, in order.
        image_size: S, in pixels.
        origin: the path of the weights.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        if not isinstance(predictor.logits, nn.Module):
            raise UserError(f"{predictor.origin} is an ONNX file, which is no module: give what it was exported from")
        self.net: nn.Module = predictor.logits
        self.transform = ImageTransform(predictor.meta)
        self.class_names, self.image_size = predictor.meta.class_names, predictor.meta.image_size
        self.origin, self.notes = predictor.origin, predictor.notes
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def predict(
        self, images: Iterable[AnyImage] | AnyImage, *, top: int = 5, batch_size: int = 32
    ) -> list[ImagePrediction]:
        """Classify images.

        Args:
            images: paths (folders with all images below them), PIL images, arrays [H, W, 3] of uint8, or bytes.
            top: classes of each image.
            batch_size: images that the model sees at a time.

        Returns:
            For each image its most probable `classes` (`name`, `index`, `probability`), best first, or a `fault`.

        Example:
            model.predict("photos/")
        """
        return list(predict_images(self.as_predictor(), _each(images), top=top, batch_images=batch_size))

    def as_predictor(self) -> Predictor:
        """Return the model as the commands use it, on the device where it is now."""
        device = next((each.device for each in self.parameters()), torch.device("cpu"))
        return Predictor(self.transform.meta, self.net, device=device, origin=self.origin, notes=self.notes)


def load_model(path: Path, *, weights: WeightsKind | None, device: DeviceChoice) -> LoadedModel:
    """Load what `shardvit predict` takes; UserError as there."""
    return LoadedModel(open_predictor(path, device=device, weights=weights))


def _each(images: Iterable[AnyImage] | AnyImage) -> Iterable[AnyImage]:
    is_one = isinstance(images, str | bytes | os.PathLike | Image.Image)
    for image in [images] if is_one or (isinstance(images, np.ndarray) and images.ndim < 4) else images:
        if isinstance(image, str | os.PathLike) and Path(image).is_dir():
            yield from image_files([Path(image)])
        else:
            yield image
