"""Classify images, in files or in memory, with a trained model of any format.

Images are prepared as in evaluation, per the model's record, in float32. With the sigmoid loss each logit has its own
probability; they do not sum to one. Holds the model, two batches of images and all file names. Decodes with a thread
per core, one batch ahead.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images.channels import of_array, open_image
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, EncodedImage, PixelLimit, of_pillow
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.batch import batch_of
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.formats.programs import ONNX_ENDING, open_onnx
from shardvit.model.loss import probabilities
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from shardvit.pipeline.kernels.settle import fp32_products
from shardvit.pipeline.ranks.process import settle_threads
from shardvit.pipeline.recipe.vocabulary import WeightsKind
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.using.find_model import find_model
from shardvit.pipeline.using.hub import local_weights

DeviceChoice = Literal["auto", "cpu", "cuda"]
AnyImage = (
    str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]
)  # file, its content, opened, pixels [H, W, 3]


@dataclass(frozen=True)
class Predictor:
    """A model: `logits` maps normalised images, float32 [B, C, S, S] on `device`, to logits [B, classes]."""

    meta: SavedModelMeta
    logits: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    origin: str  # source of the weights
    notes: tuple[str, ...] = ()  # assumptions made on reading, a sentence each

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images on any device -> logits, float32 [B, classes] on the CPU."""
        with fp32_products("ieee"):  # torch has cuDNN convolve in TF32
            return self.logits(images.to(self.device)).float().cpu()


@dataclass(frozen=True)
class ClassShare:
    """A class and its probability."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True)
class ImagePrediction:
    """The most probable classes of one image, best first, or why it could not be read."""

    image: AnyImage = field(repr=False, compare=False)  # as given
    classes: tuple[ClassShare, ...] = ()
    fault: str | None = None

    @property
    def best(self) -> ClassShare:
        """The most probable class; UserError if the image could not be read."""
        if self.fault is not None:
            raise UserError(f"{self.image}: {self.fault}")
        return self.classes[0]


@dataclass(frozen=True)
class ImageTransform:
    """A model's preprocessing, as in its stage's evaluations: an image -> float32 [C, S, S], normalised. Picklable."""

    meta: SavedModelMeta

    def __call__(self, image: AnyImage) -> torch.Tensor:
        """UnreadableImage (a ValueError) if it is damaged, OSError if its file cannot be read."""
        return self.stacked([self.square(image)], device=torch.device("cpu"))[0]

    def square(self, image: AnyImage, *, limit: PixelLimit = USUAL_LIMIT) -> Pixels:
        """Return a square not normalised, as in `Batch.images`; raises as a call does."""
        meta = self.meta
        transform = EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)
        return transform(read_any(image, limit=limit, channels=meta.raw_channels))

    def stacked(self, squares: Sequence[Pixels], *, device: torch.device) -> torch.Tensor:
        """Normalise squares: float32 [B, C, S, S] on `device`."""
        batch = batch_of(torch.from_numpy(np.stack(squares)), keys=("",) * len(squares))
        normalisation = Normalisation(mean=self.meta.mean, std=self.meta.std)
        return model_input(batch, device=device, dtype=torch.float32, normalisation=normalisation)


def channels_of(shards: ShardSet, meta: SavedModelMeta) -> int:
    """Number of channels to read a set as for a model; 0: colours. UserError if they do not fit."""
    if getattr(meta, "model", None) is None:  # the user's own module
        return shards.channels
    if shards.channels not in (0, meta.model.channels):
        raise UserError(
            f"{shards.source}: its images have {shards.channels} channels, and the model takes {meta.model.channels}"
        )
    return shards.channels or meta.raw_channels


def read_any(image: AnyImage, *, limit: PixelLimit = USUAL_LIMIT, channels: int = 0) -> EncodedImage:
    """Read an image wherever it is, as colours or as so many channels; UnreadableImage if it is damaged, UserError for
    what is no image."""
    match image:
        case str() | os.PathLike():
            return open_image(Path(image).read_bytes(), channels=channels, limit=limit)
        case bytes():
            return open_image(image, channels=channels, limit=limit)
        case np.ndarray() if channels:
            return of_array(image, channels=channels)
        case Image.Image() if not channels:
            return of_pillow(image, limit=limit)
        case np.ndarray() if image.dtype == np.uint8 and (image.ndim == 2 or image.shape[2:] in ((3,), (4,))):
            return of_pillow(Image.fromarray(image), limit=limit)
        case _:
            pass
    kinds = "a PIL image, or an array of uint8 [height, width, 3]"
    if channels:
        kinds = f"or an array [height, width, {channels}] of uint8, uint16 or float32"
    what = f"array of {image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
    raise UserError(f"{what} is no image: give a path, bytes, {kinds}")


def open_predictor(path: Path, *, device: DeviceChoice = "auto", weights: WeightsKind | None = None) -> Predictor:
    """Load an ONNX file of ours, to run on the CPU, or anything that `find_model` finds. UserError if there is no
    model, it is broken or no classifier, or the device is missing."""
    chosen, path = chosen_device(device), local_weights(path)
    settle_threads(cores=num_cores(), asked=None)
    if path.suffix == ONNX_ENDING and path.is_file():
        if weights is not None:
            raise UserError(f"--weights {weights}: {path} is an ONNX file, which holds one model only: leave it out")
        if device == "cuda":
            raise UserError(f"--device cuda: {path} is ONNX, which runs on the CPU here; leave it out")
        try:
            program = open_onnx(path)
        except ValueError as error:  # model/ does not know UserError
            raise UserError(str(error)) from None
        return Predictor(program.meta, program, device=torch.device("cpu"), origin=str(path))
    found = find_model(path, weights=weights)
    if not found.meta.has_classes:
        raise UserError(
            f"{found.origin} was trained to fill in masked patches and knows no classes: fine-tune it first"
        )
    model = build_described(found.meta)
    model.load_state_dict(found.state)
    logits = model.requires_grad_(False).eval().to(chosen)
    return Predictor(found.meta, logits, device=chosen, origin=found.origin, notes=found.notes)


def chosen_device(device: DeviceChoice) -> torch.device:
    """Choose the device; UserError if it is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; leave it out")
    return torch.device("cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda")


def predict_images(
    predictor: Predictor,
    images: Iterable[AnyImage],
    *,
    top: int,
    batch_images: int,
    pixel_limit: PixelLimit = USUAL_LIMIT,
) -> Iterator[ImagePrediction]:
    """Predict the `top` classes of images in order, or why one cannot be read; UserError if logits are not finite."""
    squares = _squares(images, transform=ImageTransform(predictor.meta), limit=pixel_limit, ahead=batch_images)
    while chunk := list(islice(squares, batch_images)):
        rows = [square for _, square in chunk if not isinstance(square, str)]
        answers = iter(_most_probable(predictor, rows, top=top) if rows else ())
        for image, square in chunk:
            if isinstance(square, str):
                yield ImagePrediction(image, fault=square)
            else:
                yield ImagePrediction(image, classes=next(answers))


def _squares(
    images: Iterable[AnyImage], *, transform: ImageTransform, limit: PixelLimit, ahead: int
) -> Iterator[tuple[AnyImage, Pixels | str]]:
    waiting: deque[tuple[AnyImage, Future[Pixels | str]]] = deque()
    pool = ThreadPoolExecutor(num_cores())
    try:
        for image in images:
            waiting.append((image, pool.submit(_square, image, transform, limit)))
            if len(waiting) > ahead:
                first, square = waiting.popleft()
                yield first, square.result()
        for image, square in waiting:
            yield image, square.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _square(image: AnyImage, transform: ImageTransform, limit: PixelLimit) -> Pixels | str:
    """Return uint8 [S, S, 3], or why the image cannot be read."""
    try:
        return transform.square(image, limit=limit)
    except UnreadableImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _most_probable(predictor: Predictor, rows: Sequence[Pixels], *, top: int) -> Iterator[tuple[ClassShare, ...]]:
    """Yield the `top` classes of each image; ties go to the first class."""
    meta = predictor.meta
    logits = predictor(ImageTransform(meta).stacked(rows, device=predictor.device))
    if not logits.isfinite().all():
        raise UserError(f"{predictor.origin}: the model gives logits that are not finite: its weights are damaged")
    shares, order = probabilities(logits, meta.loss).sort(dim=1, descending=True, stable=True)
    for share_row, order_row in zip(shares[:, :top].tolist(), order[:, :top].tolist(), strict=True):
        yield tuple(
            ClassShare(name=meta.class_names[index], index=index, probability=share)
            for share, index in zip(share_row, order_row, strict=True)
        )
