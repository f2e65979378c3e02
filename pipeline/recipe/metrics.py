"""Which metrics an evaluation computes beside loss and top-1: as asked for, or what the labels allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from data_shards.errors import UserError
from data_shards.vocabulary import LabelKind
from pipeline.recipe.vocabulary import OF_ONE_LABEL, OF_SEVERAL_LABELS, EvalMetric

_TOP = 5
_MOST_SCORE_BYTES = 5 * 10**9  # over all processes: 50,000 images of 21,843 classes just fit


def chosen_metrics(
    asked: Sequence[EvalMetric] | Literal["auto"],
    *,
    label_kind: LabelKind,
    num_classes: int,
    num_images: int,
    flag: str,
) -> tuple[EvalMetric, ...]:
    """The metrics of one set; `flag` names the key in messages. UserError: one means nothing for these labels, or mean
    average precision would have to keep more scores than there may be room for."""
    if asked == "auto":
        if label_kind == "multi":
            return ("precision_at_1",)
        return ("top5", "calibration_error") if num_classes > _TOP else ("calibration_error",)
    refused = OF_ONE_LABEL if label_kind == "multi" else OF_SEVERAL_LABELS
    for each in asked:
        if each in refused:
            these = "images have several labels each" if label_kind == "multi" else "each image has one label"
            raise UserError(f"{flag} names {each}, which means nothing where {these}: leave it out")
    needed = 4 * num_images * num_classes
    if "mean_average_precision" in asked and needed > _MOST_SCORE_BYTES:
        raise UserError(
            f"{flag}: mean_average_precision sorts the scores of all images: {num_images:,} x {num_classes:,} x 4 "
            f"bytes = {needed / 1e9:.1f} GB, more than {_MOST_SCORE_BYTES / 1e9:g} GB: leave it out, or "
            "evaluate fewer images"
        )
    return tuple(asked)
