"""Write and read evaluations: STAGE/evaluations/SET/step-00000400/evaluation.json and arrays.npz.

Keeps the newest two per set. A confusion matrix of 1,000 classes is 8 MB, a few hundred kB compressed. Floats
round-trip exactly. Run folders are untrusted: loads no pickles, checks sizes and shapes.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.durable import make_folders
from shardvit.data_shards.safe_paths import is_inside, open_inside, read_inside
from shardvit.data_shards.text import printable
from shardvit.data_shards.vocabulary import LabelKind
from shardvit.pipeline.recipe.vocabulary import OWN_SET as OWN_SET  # re-exported for readers of evaluations
from shardvit.pipeline.recipe.vocabulary import WeightsKind

EVALUATIONS_FOLDER = "evaluations"
CALIBRATION_BINS = 15
KEPT_SAMPLES = 64  # of mistakes and of examples
MOST_CONFUSED_CLASSES = 1000  # no confusion matrix above this

_RECORD, _ARRAYS = "evaluation.json", "arrays.npz"
_STEP = re.compile(r"step-(\d{8,18})")
_KEPT = 2
_FORMAT = 1

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class PerClass:
    """Counts and scores per class; arrays [C]."""

    images: Counts  # with this label
    right: Counts  # correct among these (multi-label: the top class is any of the labels)
    accuracy: Floats  # right / images; NaN without images
    average_precision: Floats | None = None  # multi-label only; NaN without images
    answers: Counts | None = None  # images predicted as the class; None: an older evaluation


@dataclass(frozen=True)
class Calibration:
    """Predictions binned by top-class probability, (lower, upper]."""

    edges: Floats  # [16], from 0 to 1
    confidence: Floats  # [15], mean top-class probability; NaN in an empty bin
    accuracy: Floats  # [15]; NaN in an empty bin
    images: Counts  # [15]


@dataclass(frozen=True)
class Judged:
    """A sample and its prediction; classes are indices."""

    sample: int  # index in the shard set
    key: str  # sample name in the shard set
    true: tuple[int, ...]
    predicted: int
    probability: float  # of the predicted class
    probability_of_true: float  # the highest among `true`; NaN without labels
    top: tuple[tuple[int, float], ...]  # top five (class, probability), best first


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a classifier with C classes."""

    set_name: str  # "val", or a key of the recipe's also_eval
    classes: tuple[str, ...]
    label_kind: LabelKind
    images: int  # readable ones
    metrics: Mapping[str, float]  # named as in metrics.jsonl
    per_class: PerClass
    confusion: Counts | None  # [C, C], row: true, column: predicted; None: multi-label, or more than 1,000 classes
    calibration: Calibration | None  # None: multi-label, or not requested
    mistakes: tuple[Judged, ...]  # at most 64, most confident first
    examples: tuple[Judged, ...]  # first 64 of the set
    weights: WeightsKind = "weights"


def save_evaluation(stage_folder: Path, evaluation: Evaluation, *, step: int) -> Path:
    """Save the evaluation of `step`; keep only the newest earlier one, drop later ones, which a rollback undid. OSError
    if the disk is full or fails, or the stage folder is gone."""
    of_set = stage_folder / EVALUATIONS_FOLDER / evaluation.set_name
    make_folders(of_set, below=stage_folder)
    folder = of_set / f"step-{step:08d}"
    beside = of_set / f".{folder.name}.writing"
    shutil.rmtree(beside, ignore_errors=True)
    write_evaluation(beside, evaluation)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(beside, folder)
    steps = {int(match[1]): each for each in of_set.iterdir() if (match := _STEP.fullmatch(each.name))}
    kept = sorted(each for each in steps if each <= step)[-_KEPT:]
    for number, each in steps.items():
        if number not in kept:
            shutil.rmtree(each, ignore_errors=True)
    return folder


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write both files; creates `folder` but not its parent."""
    folder.mkdir(exist_ok=True)
    plain = {name: value for name, value in vars(evaluation).items() if name not in _PARTS}
    samples = {name: [asdict(each) for each in getattr(evaluation, name)] for name in ("mistakes", "examples")}
    np.savez_compressed(folder / _ARRAYS, allow_pickle=False, **_arrays(evaluation))
    # ASCII: non-UTF-8 names in tars become surrogates, which UTF-8 cannot encode.
    text = json.dumps({"format": _FORMAT, **plain, "metrics": dict(evaluation.metrics), **samples})
    (folder / _RECORD).write_text(text, encoding="ascii")


def load_evaluation(folder: Path) -> Evaluation:
    """Load an evaluation; ValueError if missing or damaged."""
    try:
        record = json.loads(read_inside(folder / _RECORD, folder=folder))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']!r} is not known here")
        classes = tuple(map(str, record["classes"]))
        arrays = _read_arrays(folder / _ARRAYS, num_classes=len(classes))
        return _evaluation(record, classes=classes, arrays=arrays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, zipfile.BadZipFile) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} holds no evaluation that can be read ({printable(why)})") from None


def evaluations(stage_folder: Path) -> dict[str, list[Path]]:
    """List the folders of complete evaluations by set, oldest first."""
    found: dict[str, list[Path]] = {}
    root = stage_folder / EVALUATIONS_FOLDER
    for of_set in sorted(root.iterdir()) if root.is_dir() else ():
        if not of_set.name.startswith(".") and of_set.is_dir() and is_inside(of_set, folder=stage_folder):
            steps = [each for each in of_set.iterdir() if _STEP.fullmatch(each.name) and not each.is_symlink()]
            whole = [each for each in steps if (each / _RECORD).is_file()]
            if whole:
                found[of_set.name] = sorted(whole, key=evaluated_step)
    return found


def evaluated_step(folder: Path) -> int:
    """Parse the step from an evaluation folder's name; ValueError for any other name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is no folder step-... of an evaluation")
    return int(match[1])


_PARTS = ("metrics", "per_class", "confusion", "calibration", "mistakes", "examples")


def _arrays(evaluation: Evaluation) -> dict[str, NDArray[Any]]:
    parts: dict[str, Any] = {f"per_class.{name}": value for name, value in vars(evaluation.per_class).items()}
    parts["confusion"] = evaluation.confusion
    if evaluation.calibration is not None:
        parts |= {f"calibration.{name}": value for name, value in vars(evaluation.calibration).items()}
    return {name: value for name, value in parts.items() if value is not None}


def _read_arrays(file: Path, *, num_classes: int) -> dict[str, NDArray[Any]]:
    shapes: dict[str, tuple[int, ...]] = {
        **{f"per_class.{name}": (num_classes,) for name in PerClass.__dataclass_fields__},
        "confusion": (num_classes, num_classes),
        "calibration.edges": (CALIBRATION_BINS + 1,),
        **{f"calibration.{name}": (CALIBRATION_BINS,) for name in ("confidence", "accuracy", "images")},
    }
    with open_inside(file, folder=file.parent) as opened, zipfile.ZipFile(opened) as archive:
        for member in archive.infolist():  # before numpy unpacks anything
            shape = shapes.get(member.filename.removesuffix(".npy"))
            if shape is None or member.file_size > 8 * int(np.prod(shape)) + 4096:
                raise ValueError(f"{member.filename} is not expected, or too large")
    with np.load(file, allow_pickle=False) as content:
        arrays = {name: content[name] for name in content.files}
    for name, array in arrays.items():
        counts = name.endswith(("images", "right", "answers")) or name == "confusion"
        if array.shape != shapes[name] or array.dtype != (np.int64 if counts else np.float64):
            raise ValueError(f"{name} is {array.dtype} {array.shape}")
    return arrays


def _evaluation(record: dict[str, Any], *, classes: tuple[str, ...], arrays: dict[str, NDArray[Any]]) -> Evaluation:
    def judged(row: dict[str, Any]) -> Judged:
        top = tuple((int(number), float(probability)) for number, probability in row["top"])
        true, best, right = tuple(map(int, row["true"])), float(row["probability"]), float(row["probability_of_true"])
        one = Judged(int(row["sample"]), str(row["key"]), true, int(row["predicted"]), best, right, top)
        if not all(0 <= each < len(classes) for each in (*one.true, one.predicted, *(number for number, _ in one.top))):
            raise ValueError(f"sample {one.sample} names a class that there is not")
        return one

    if record["label_kind"] not in get_args(LabelKind) or record["weights"] not in get_args(WeightsKind):
        raise ValueError("label_kind or weights is not known here")
    parts: dict[str, dict[str, Any]] = {"per_class": {}, "calibration": {}}
    for name, array in arrays.items():
        part, _, of_part = name.partition(".")
        if of_part:
            parts[part][of_part] = array
    return Evaluation(
        set_name=str(record["set_name"]),
        classes=classes,
        label_kind=cast(LabelKind, record["label_kind"]),
        images=int(record["images"]),
        metrics={str(name): float(value) for name, value in record["metrics"].items()},
        per_class=PerClass(**parts["per_class"]),
        confusion=arrays.get("confusion"),
        calibration=Calibration(**parts["calibration"]) if "edges" in parts["calibration"] else None,
        mistakes=tuple(judged(row) for row in record["mistakes"]),
        examples=tuple(judged(row) for row in record["examples"]),
        weights=cast(WeightsKind, record["weights"]),
    )
