"""`shardvit predict`: the most probable classes of images, as lines for people or as JSON.

Answers are printed batch after batch, so a folder of any size will do. Images that cannot be read are named on
standard error, the others are still answered, and the exit code is 1. Heavy libraries are imported inside.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.text import printable
from data_shards.vocabulary import USUAL_MOST_PIXELS
from launch.commands.image_limit import MaxImagePixels, pixel_limit

if TYPE_CHECKING:
    from pipeline.predict import ImagePrediction

# Beyond this, file names are no longer made equally long, so that one long name does not push all classes aside.
_WIDEST_NAME = 48


def predict(
    model: Path,
    /,
    *images: Path,
    top: Annotated[int, Parameter(help="Classes of each image.")] = 5,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print a JSON list.")] = False,
    batch_size: Annotated[int, Parameter(help="Images that the model sees at a time.")] = 32,
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(help="Where to run; auto: a GPU if there is one.")
    ] = "auto",
) -> int:
    """Say what is on images: the most probable classes of each.

    MODEL is a run's folder (its last trained stage), a saved or imported
    model's, or a file that `shardvit export` made in any of its formats. IMAGES
    are files, and folders with all images below them. They are resized and
    cropped as in the evaluation during training. Probabilities are the softmax
    over the classes; those of a model trained with the sigmoid loss are each
    class's own and do not add up to one.

    Exit code 1 if an image could not be read; it is named, the others are
    answered. JSON is a list with one line for each image, in order:
    {"image": "a.jpg", "predictions": [{"class": "cat", "index": 3,
    "probability": 0.97}, ...]}, or {"image": "b.jpg", "error": "..."}.

    Some examples:
        shardvit predict runs/digits photo.png

        shardvit predict runs/digits/finetune/model photos/ --top 1

        shardvit predict model.onnx photos/ --json > photos.json
    """
    if top < 1:
        raise UserError(f"--top: it is {top}; give 1 or more")
    if batch_size < 1:
        raise UserError(f"--batch-size: it is {batch_size}; give 1 or more")
    if not images:
        raise UserError("predict: name at least one image or folder of images after the model")
    if not model.exists():
        raise UserError(f"{model}: there is no such model")

    limit = pixel_limit(max_image_pixels)
    from pipeline.predict import image_files, open_predictor, predict_images

    files = image_files(images)
    predictor = open_predictor(model, device=device)
    if predictor.origin != str(model):
        _tell(f"the model is {predictor.origin}")
    for note in predictor.notes:
        _tell(f"note: {note}")
    predictions = predict_images(predictor, files, top=top, batch_images=batch_size, pixel_limit=limit)
    if as_json:
        faults = _print_json(predictions)
    else:
        longest = sorted(len(_shown(name)) for name in predictor.meta.class_names)[-top:]
        faults = _print_lines(predictions, line=_layout(files, class_widths=longest))
    if faults:
        _tell(f"{faults:,} of {len(files):,} images could not be read")
    return 1 if faults else 0


def _print_json(predictions: Iterable[ImagePrediction]) -> int:
    """The list, an image a line; returns the number of those that could not be read."""
    faults = 0
    before = "["
    for prediction in predictions:
        print(f"{before}{json.dumps(_as_json(prediction))}", end="", flush=True)
        before = ",\n "
        faults += _told_fault(prediction)
    print("]")
    return faults


def _as_json(prediction: ImagePrediction) -> dict[str, object]:
    if prediction.fault is not None:
        return {"image": str(prediction.image), "error": prediction.fault}
    return {
        "image": str(prediction.image),
        "predictions": [
            {"class": each.name, "index": each.index, "probability": each.probability} for each in prediction.classes
        ],
    }


def _print_lines(predictions: Iterable[ImagePrediction], *, line: Callable[[ImagePrediction], str]) -> int:
    """Lines for people; returns the number of images that could not be read."""
    faults = 0
    for prediction in predictions:
        faults += _told_fault(prediction)
        if prediction.fault is None:
            print(line(prediction), flush=True)
    return faults


def _layout(files: Sequence[Path], *, class_widths: Sequence[int]) -> Callable[[ImagePrediction], str]:
    """One line an image, or, on a terminal where the longest would not fit, one line a class."""
    name_width = min(max(len(_shown(str(file))) for file in files), _WIDEST_NAME)
    widest = name_width + 1 + sum(width + len("  100.0 %,") for width in class_widths)
    if sys.stdout.isatty() and widest > shutil.get_terminal_size().columns:
        return lambda prediction: "\n".join(_block(prediction))
    return lambda prediction: _line(prediction, name_width=name_width)


def _line(prediction: ImagePrediction, *, name_width: int) -> str:
    classes = ", ".join(f"{_shown(each.name)} {100 * each.probability:.1f} %" for each in prediction.classes)
    return f"{_shown(str(prediction.image)) + ':':{name_width + 1}} {classes}"


def _block(prediction: ImagePrediction) -> Iterator[str]:
    yield f"{_shown(str(prediction.image))}:"
    for each in prediction.classes:
        yield f"  {100 * each.probability:5.1f} %  {_shown(each.name)}"


def _told_fault(prediction: ImagePrediction) -> bool:
    if prediction.fault is not None:
        _tell(f"{_shown(str(prediction.image))}: {prediction.fault}")
    return prediction.fault is not None


def _tell(message: str) -> None:
    print(f"shardvit: {printable(message)}", file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    """Names that would move the cursor, or that the output's encoding cannot hold, as Python writes them."""
    return text if text.isprintable() else ascii(text)
