"""Classify image files with a trained model of any format.

Images are prepared as in evaluation, per the model's record, in float32. With the sigmoid loss each logit has its own
probability; they do not sum to one. Holds the model, two batches of images and all file names. Decodes with a thread
per core, one batch ahead.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit, read_image
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.batch import batch_of
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.formats.programs import ONNX_ENDING, open_onnx
from shardvit.model.loss import probabilities
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from shardvit.pipeline.ranks.process import settle_threads
from shardvit.pipeline.recipe.vocabulary import WeightsKind
from shardvit.pipeline.stage.task import model_input
from shardvit.pipeline.using.find_model import find_model

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Predictor:
    """A model: `logits` maps normalised images, float32 [B, 3, S, S] on `device`, to logits [B, classes]."""

    meta: SavedModelMeta
    logits: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    origin: str  # source of the weights
    notes: tuple[str, ...] = ()  # assumptions made on reading, a sentence each

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images on any device -> logits, float32 [B, classes] on the CPU."""
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

    image: Path
    classes: tuple[ClassShare, ...] = ()
    fault: str | None = None


def open_predictor(path: Path, *, device: DeviceChoice = "auto", weights: WeightsKind | None = None) -> Predictor:
    """Load an ONNX file of ours, to run on the CPU, or anything that `find_model` finds. UserError if there is no
    model, it is broken or no classifier, or the device is missing."""
    chosen = chosen_device(device)
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
    if found.meta.head == "masked_patch":
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
    predictor: Predictor, images: Iterable[Path], *, top: int, batch_images: int, pixel_limit: PixelLimit = USUAL_LIMIT
) -> Iterator[ImagePrediction]:
    """Predict the `top` classes of images in order, or why one cannot be read; UserError if logits are not finite."""
    meta = predictor.meta
    transform = EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)
    squares = _squares(images, transform=transform, limit=pixel_limit, ahead=batch_images)
    while chunk := list(islice(squares, batch_images)):
        rows = [square for _, square in chunk if not isinstance(square, str)]
        answers = iter(_most_probable(predictor, rows, top=top) if rows else ())
        for image, square in chunk:
            if isinstance(square, str):
                yield ImagePrediction(image, fault=square)
            else:
                yield ImagePrediction(image, classes=next(answers))


def _squares(
    images: Iterable[Path], *, transform: EvalTransform, limit: PixelLimit, ahead: int
) -> Iterator[tuple[Path, Pixels | str]]:
    waiting: deque[tuple[Path, Future[Pixels | str]]] = deque()
    pool = ThreadPoolExecutor(num_cores())
    try:
        for image in images:
            waiting.append((image, pool.submit(_square, image, transform, limit)))
            if len(waiting) > ahead:
                path, square = waiting.popleft()
                yield path, square.result()
        for path, square in waiting:
            yield path, square.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _square(image: Path, transform: EvalTransform, limit: PixelLimit) -> Pixels | str:
    """Return the evaluation transform, uint8 [S, S, 3], or why the image cannot be read."""
    try:
        return transform(read_image(image.read_bytes(), limit=limit))
    except UnreadableImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _most_probable(predictor: Predictor, rows: Sequence[Pixels], *, top: int) -> Iterator[tuple[ClassShare, ...]]:
    """Yield the `top` classes of each image; ties go to the first class."""
    meta = predictor.meta
    images = model_input(
        batch_of(torch.from_numpy(np.stack(rows)), keys=("",) * len(rows)),
        device=predictor.device,
        dtype=torch.float32,
        normalisation=Normalisation(mean=meta.mean, std=meta.std),
    )
    logits = predictor(images)
    if not logits.isfinite().all():
        raise UserError(f"{predictor.origin}: the model gives logits that are not finite: its weights are damaged")
    shares, order = probabilities(logits, meta.loss).sort(dim=1, descending=True, stable=True)
    for share_row, order_row in zip(shares[:, :top].tolist(), order[:, :top].tolist(), strict=True):
        yield tuple(
            ClassShare(name=meta.class_names[index], index=index, probability=share)
            for share, index in zip(share_row, order_row, strict=True)
        )
