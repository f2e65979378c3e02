"""Held-out images with what the model says of them: the set's first ones, and those it was most surely wrong about.

The first ones are the same at every step, so that steps can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_shards.text import counted, one_line
from pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from pipeline.pictures.grid import Cell, image_grid, shortened
from pipeline.pictures.held_out_images import held_out_images
from pipeline.pictures.style import keep_picture
from pipeline.runs.evaluations import Evaluation, Judged
from pipeline.runs.pictures import DrawRequest, Picture

_MOST_EXAMPLES = 36
_MOST_MISTAKES = 24
_COLUMNS = 6  # which fill their rows
_CELL_INCHES = 1.2
_NAME_POINTS = 72 * _CELL_INCHES - 34  # of a cell's width, beside a tick and a probability

Images = dict[int, NDArray[np.uint8]]


@of_each_set
def draw_evaluation_grid(request: DrawRequest, one: EvaluatedSet) -> None:
    """The first images of each held-out set."""
    examples = one.evaluation.examples[:_MOST_EXAMPLES]
    images = _images(request, one, examples)
    if not images:
        return
    cells = [_cell(one.evaluation, each, images) for each in examples]
    right = [is_right(each) for each in examples]
    picture = Picture(
        name=one.name("evaluation_grid"),
        title=one.title("Predictions"),
        caption=f"The first {counted(len(examples), 'image')} of the set, the same at every step, as the model "
        "sees them. First line: a tick where the prediction is right, a cross and a thicker frame where it is "
        "wrong, the predicted class and its probability. Second line: "
        + (
            "all true classes."
            if one.evaluation.label_kind == "multi"
            else "where it is wrong, the true class and the probability that it was given."
        ),
        alt=f"{sum(right)} of the first {counted(len(examples), 'image')} are predicted rightly. Predicted: "
        + "; ".join(_says(one.evaluation, each) for each in examples[:8])
        + ("; and so on." if len(examples) > 8 else "."),
        group="evaluation",
    )
    figure = image_grid(cells, columns=_COLUMNS, cell_inches=_CELL_INCHES)
    keep_picture(request.stage_folder, picture, figure=figure, step=request.step)


@of_each_set
def draw_worst_mistakes(request: DrawRequest, one: EvaluatedSet) -> None:
    """The most confident mistakes of each held-out set in which there are any."""
    mistakes = one.evaluation.mistakes
    images = _images(request, one, mistakes)
    shown = [each for each in mistakes if each.sample in images][:_MOST_MISTAKES]
    if not shown:
        return
    worst = shown[0]
    passed_over = len([each for each in mistakes[: mistakes.index(shown[-1])] if each.sample not in images])
    picture = Picture(
        name=one.name("worst_mistakes"),
        title=one.title("Worst mistakes"),
        caption=f"The {counted(len(shown), 'mistake')} that the model was surest of, first the worst. First line: "
        "the predicted class and its probability; second line: the true one and the probability that it was given."
        + (f" {counted(passed_over, 'image')} among them could not be read here." if passed_over else ""),
        alt=f"{counted(len(shown), 'image')} that were predicted wrongly with the highest confidence, "
        f"{percent(worst.probability)} to {percent(shown[-1].probability)}. "
        + "; ".join(_says(one.evaluation, each) for each in shown[:8])
        + ("; and so on." if len(shown) > 8 else "."),
        group="evaluation",
    )
    cells = [_cell(one.evaluation, each, images) for each in shown]
    figure = image_grid(cells, columns=_COLUMNS, cell_inches=_CELL_INCHES)
    keep_picture(request.stage_folder, picture, figure=figure, step=request.step)


def _images(request: DrawRequest, one: EvaluatedSet, judged: Sequence[Judged]) -> Images:
    """Those that can be had, [S, S, 3], by their samples' numbers."""
    if not judged:
        return {}
    samples = [each.sample for each in judged]
    batch = held_out_images(request, set_name=one.set_name, samples=samples)
    keys = {each.sample: each.key for each in judged}
    found = zip(batch.samples.tolist(), batch.keys, batch.images.numpy(), strict=True)
    # Another key: the shards are not those that were evaluated.
    return {sample: image for sample, key, image in found if key == keys[sample]}


def _cell(evaluation: Evaluation, judged: Judged, images: Images) -> Cell:
    lines = [f"{_name(evaluation, judged.predicted)} ({judged.probability:.0%})"]
    if evaluation.label_kind == "multi":
        lines.append(", ".join(one_line(evaluation.classes[each]) for each in judged.true) or "no label")
    elif not is_right(judged):
        lines.append(f"is {_name(evaluation, judged.true[0])} ({judged.probability_of_true:.0%})")
    image = images.get(judged.sample)
    if image is None:
        size = next(iter(images.values())).shape
        return Cell(np.full(size, 0xDF, dtype=np.uint8), ("not readable here", *lines))
    return Cell(image, tuple(lines), mark="right" if is_right(judged) else "wrong")


def _name(evaluation: Evaluation, number: int) -> str:
    return shortened(evaluation.classes[number], points=_NAME_POINTS)


def is_right(judged: Judged) -> bool:
    """True if the predicted class is the true one, or one of them."""
    return judged.predicted in judged.true


def _says(evaluation: Evaluation, judged: Judged) -> str:
    predicted = f"{brief(evaluation.classes[judged.predicted])} ({percent(judged.probability)})"
    if is_right(judged):
        return f"{predicted}, right"
    true = " and ".join(brief(evaluation.classes[each]) for each in judged.true) or "no label"
    return f"{predicted}, wrong: {true}"
