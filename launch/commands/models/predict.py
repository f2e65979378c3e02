"""`shardvit predict`: the most probable classes of images, as text or JSON.

Prints answers batch by batch, so a folder may have any size. Names unreadable images on standard error, answers the
others, and exits with code 1.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS
from shardvit.launch.flags import Device, MaxImagePixels, Trust, WhichWeights, demand_counts, pixel_limit, switch
from shardvit.launch.local.output import say, say_model

if TYPE_CHECKING:
    from shardvit.pipeline.using.predict import ImagePrediction

_WIDEST_NAME = 48  # longer names are not aligned: a single one would push all classes aside


def predict(
    model: Path,
    /,
    *images: Path,
    top: Annotated[int, Parameter(help="Classes of each image.")] = 5,
    as_json: Annotated[bool, switch("Print a JSON list.", "--json")] = False,
    batch_size: Annotated[int, Parameter(help="Images that the model sees at a time.")] = 32,
    weights: WhichWeights = None,
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS,
    device: Device = "auto",
    trust: Trust = None,
) -> int:
    """Classify images: the most probable classes of each.

    MODEL is a run's folder (its last trained stage), a saved or imported model's
    folder, a file from `shardvit export` in any of its formats, or elsewhere
    hf-hub:OWNER/NAME or a URL of a file. IMAGES are files, and folders with all
    images below them. They are resized and cropped as in evaluations. Probabilities are the softmax over the
    classes; with the sigmoid loss each class has its own, and they do not add up
    to one.

    Exit code 1 if an image could not be read; it is named, the others are
    answered. JSON is a list with one line for each image, in order:
    {"image": "a.jpg", "predictions": [{"class": "cat", "index": 3,
    "probability": 0.97}, ...]}, or {"image": "b.jpg", "error": "..."}.

    Some examples:
        shardvit predict runs/digits photo.png
        shardvit predict runs/digits/finetune/model photos/ --top 1
        shardvit predict model.onnx photos/ --json > photos.json
    """
    demand_counts(top=top, batch_size=batch_size)
    if not images:
        raise UserError("predict: name at least one image or folder of images after the model")
    from shardvit.data_shards.packing.sources.folder import image_files
    from shardvit.pipeline.own_code.by_path import trust_file
    from shardvit.pipeline.using.find_model import find_record
    from shardvit.pipeline.using.hub import local_weights

    trust_file(trust)
    find_record(place := local_weights(model))
    files, limit = image_files(images), pixel_limit(max_image_pixels)
    from shardvit.pipeline.using.predict import open_predictor, predict_images

    predictor = open_predictor(place, device=device, weights=weights)
    say_model(model, origin=predictor.origin, notes=predictor.notes)
    predictions = predict_images(predictor, files, top=top, batch_images=batch_size, pixel_limit=limit)
    longest = sorted(len(one_line(name)) for name in predictor.meta.class_names)[-top:]
    faults = _show(predictions, as_json=as_json, line=_layout(files, class_widths=longest))
    if faults:
        say(f"{faults:,} of {len(files):,} images could not be read")
    return 1 if faults else 0


def _show(predictions: Iterable[ImagePrediction], *, as_json: bool, line: Callable[[ImagePrediction], str]) -> int:
    """Print each answer as soon as it is ready; returns the number of unreadable images."""
    faults, before = 0, "["
    for prediction in predictions:
        if as_json:
            print(f"{before}{json.dumps(_as_json(prediction))}", end="", flush=True)
            before = ",\n "
        if prediction.fault is not None:
            faults += 1
            say(f"{one_line(str(prediction.image))}: {prediction.fault}")
        elif not as_json:
            print(line(prediction), flush=True)
    if as_json:
        print("]")
    return faults


def _as_json(prediction: ImagePrediction) -> dict[str, object]:
    if prediction.fault is not None:
        return {"image": str(prediction.image), "error": prediction.fault}
    classes = [
        {"class": each.name, "index": each.index, "probability": each.probability} for each in prediction.classes
    ]
    return {"image": str(prediction.image), "predictions": classes}


def _layout(files: Sequence[Path], *, class_widths: Sequence[int]) -> Callable[[ImagePrediction], str]:
    """One line per image or, on a terminal too narrow for that, one line per class."""
    name_width = min(max(len(one_line(str(file))) for file in files), _WIDEST_NAME)
    widest = name_width + 1 + sum(width + len("  100.0 %,") for width in class_widths)

    def line(prediction: ImagePrediction) -> str:
        classes = ", ".join(f"{one_line(each.name)} {100 * each.probability:.1f} %" for each in prediction.classes)
        return f"{one_line(str(prediction.image)) + ':':{name_width + 1}} {classes}"

    def block(prediction: ImagePrediction) -> str:
        classes = (f"\n  {100 * each.probability:5.1f} %  {one_line(each.name)}" for each in prediction.classes)
        return f"{one_line(str(prediction.image))}:{''.join(classes)}"

    return block if sys.stdout.isatty() and widest > shutil.get_terminal_size().columns else line
