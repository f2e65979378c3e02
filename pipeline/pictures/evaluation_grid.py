"""Draw held-out images with predictions: the set's first images (the same at every step), and the worst mistakes."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.text import counted, one_line
from shardvit.pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from shardvit.pipeline.pictures.grid import Cell, image_grid, shortened
from shardvit.pipeline.pictures.held_out_images import held_out_images
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.runs.evaluations import Evaluation, Judged
from shardvit.pipeline.runs.pictures import DrawRequest

_MOST_EXAMPLES, _MOST_MISTAKES, _MOST_IN_ALT = 36, 24, 8
_grid = partial(image_grid, columns=6, cell_inches=1.2)  # divides both limits above
_NAME_POINTS = 72 * 1.2 - 34  # cell width less the tick and the probability

Images = dict[int, NDArray[np.uint8]]


@of_each_set
def draw_evaluation_grid(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the first images of each held-out set."""
    examples = one.evaluation.examples[:_MOST_EXAMPLES]
    images = _images(request, one, examples)
    if not images:
        return None
    second = "where it is wrong, the true class and the probability that it was given."
    if one.evaluation.label_kind == "multi":
        second = "all true classes."
    picture = one.picture(
        "evaluation_grid",
        "Predictions",
        caption=f"The first {counted(len(examples), 'image')} of the set, the same at every step, as the model "
        "sees them. First line: a tick where the prediction is right, a cross and a thicker frame where it is "
        f"wrong, the predicted class and its probability. Second line: {second}",
        alt=f"{sum(map(is_right, examples))} of the first {counted(len(examples), 'image')} are predicted rightly. "
        f"Predicted: {_listed(one.evaluation, examples)}",
    )
    return picture, _grid([_cell(one.evaluation, each, images) for each in examples])


@of_each_set
def draw_worst_mistakes(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the most confident mistakes of each held-out set that has any."""
    mistakes = one.evaluation.mistakes
    images = _images(request, one, mistakes)
    shown = [each for each in mistakes if each.sample in images][:_MOST_MISTAKES]
    if not shown:
        return None
    unreadable = sum(each.sample not in images for each in mistakes[: mistakes.index(shown[-1])])
    left_out = f" {counted(unreadable, 'image')} among them could not be read here." if unreadable else ""
    picture = one.picture(
        "worst_mistakes",
        "Worst mistakes",
        caption=f"The {counted(len(shown), 'mistake')} that the model was surest of, first the worst. First line: "
        "the predicted class and its probability; second line: the true one and the probability that it was given."
        + left_out,
        alt=f"{counted(len(shown), 'image')} that were predicted wrongly with the highest confidence, "
        f"{percent(shown[0].probability)} to {percent(shown[-1].probability)}. {_listed(one.evaluation, shown)}",
    )
    return picture, _grid([_cell(one.evaluation, each, images) for each in shown])


def is_right(judged: Judged) -> bool:
    """True if the predicted class is among the true ones."""
    return judged.predicted in judged.true


def _images(request: DrawRequest, one: EvaluatedSet, judged: Sequence[Judged]) -> Images:
    """Images on this machine, [S, S, 3], by sample number."""
    if not judged:
        return {}
    keys = {each.sample: each.key for each in judged}
    batch = held_out_images(request, set_name=one.set_name, samples=list(keys))
    found = zip(batch.samples.tolist(), batch.keys, batch.images.numpy(), strict=True)
    # A different key means different shards than were evaluated.
    return {sample: image for sample, key, image in found if key == keys[sample]}


def _cell(evaluation: Evaluation, judged: Judged, images: Images) -> Cell:
    def name(number: int) -> str:
        return shortened(evaluation.classes[number], points=_NAME_POINTS)

    lines = [f"{name(judged.predicted)} ({judged.probability:.0%})"]
    if evaluation.label_kind == "multi":
        lines.append(", ".join(one_line(evaluation.classes[each]) for each in judged.true) or "no label")
    elif not is_right(judged):
        lines.append(f"is {name(judged.true[0])} ({judged.probability_of_true:.0%})")
    image = images.get(judged.sample)
    if image is None:
        size = next(iter(images.values())).shape
        return Cell(np.full(size, 0xDF, dtype=np.uint8), ("not readable here", *lines))
    return Cell(image, tuple(lines), mark="right" if is_right(judged) else "wrong")


def _listed(evaluation: Evaluation, judged: Sequence[Judged]) -> str:
    def said(each: Judged) -> str:
        predicted = f"{brief(evaluation.classes[each.predicted])} ({percent(each.probability)})"
        true = " and ".join(brief(evaluation.classes[label]) for label in each.true) or "no label"
        return f"{predicted}, right" if is_right(each) else f"{predicted}, wrong: {true}"

    return "; ".join(map(said, judged[:_MOST_IN_ALT])) + ("; and so on." if len(judged) > _MOST_IN_ALT else ".")
