"""Draw calibration: accuracy over confidence (a reliability diagram), and the number of images in each bin.

The bins are the evaluation's: 15 of equal width, by the probability of the predicted class. The calibration error is
the mean over images of their bin's distance from the diagonal (expected calibration error; Guo et al., 2017).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_shards.text import counted
from pipeline.evaluation.scores import calibration_error
from pipeline.pictures.evaluated import EvaluatedSet, of_each_set, percent
from pipeline.pictures.style import ACCENT, BAD, INK, MUTED, PAPER, SERIES, Drawn, new_figure, plain_numbers
from pipeline.runs.evaluations import Calibration
from pipeline.runs.pictures import DrawRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEW = 20  # images in a bin: its interval is then some 40 points wide
_Z = 1.96  # of a two-sided 95 % interval

Floats = NDArray[np.float64]


def wilson_interval(share: Floats, images: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Bounds of the 95 % interval of a share of `images`, at least one (Wilson, 1927)."""
    centre = (share + _Z**2 / (2 * images)) / (1 + _Z**2 / images)
    half = _Z * np.sqrt(share * (1 - share) / images + _Z**2 / (4 * images**2)) / (1 + _Z**2 / images)
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


@of_each_set
def draw_reliability(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """The diagram of each held-out set whose evaluation measured calibration."""
    calibration = one.evaluation.calibration
    if calibration is None or not calibration.images.sum():
        return None
    total, error = int(calibration.images.sum()), calibration_error(calibration)
    filled = calibration.images > 0
    confidence = float(calibration.images[filled] @ calibration.confidence[filled] / total)
    accuracy = float(calibration.images[filled] @ calibration.accuracy[filled] / total)
    tendency = "more sure than it is right" if confidence > accuracy else "less sure than it is right"
    picture = one.picture(
        "reliability",
        f"Reliability: calibration error {percent(error)}",
        caption="Share of right predictions over the probability that the model gave them, in bins of equal width; "
        "bars: 95 % intervals. On the dashed line the model is as sure as it is right; below it, too sure. Open "
        f"circles: bins of fewer than {_FEW} images. Below: images in each bin.",
        alt=f"Reliability diagram of {counted(total, 'image')}: calibration error {percent(error)}; mean "
        f"confidence {percent(confidence)}, accuracy {percent(accuracy)}, so the model is {tendency}.",
    )
    return picture, _diagram(calibration, confidence=confidence, accuracy=accuracy, error=error)


def _diagram(calibration: Calibration, *, confidence: float, accuracy: float, error: float) -> Figure:
    filled = calibration.images > 0
    images = calibration.images[filled]
    sure, right = 100 * calibration.confidence[filled], 100 * calibration.accuracy[filled]
    low, high = (100 * bound for bound in wilson_interval(calibration.accuracy[filled], images))
    figure, [[top], [bottom]] = new_figure(width=6.2, height=6.4, rows=2, sharex=True, height_ratios=(3, 1))
    top.grid(visible=True)
    top.plot([0, 100], [0, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
    top.text(2, 97, "not sure enough", va="top", color=MUTED)
    top.text(98, 3, "too sure", ha="right", color=MUTED)
    top.fill_between(sure, sure, right, color=ACCENT, alpha=0.12, linewidth=0)
    top.vlines(sure, low, high, color=ACCENT, linewidth=1.3, alpha=0.7)
    top.plot(sure, right, color=ACCENT)
    faces = [ACCENT if number >= _FEW else PAPER for number in images]
    top.scatter(sure, right, c=faces, edgecolors=ACCENT, s=36, clip_on=False, zorder=3)
    top.set(xlim=(0, 100), ylim=(0, 100), ylabel="right predictions, %")
    top.set_title(f"Calibration error {percent(error)}")
    edges = 100 * calibration.edges
    colours = [ACCENT if number >= _FEW else SERIES[6] for number in calibration.images]
    bottom.bar((edges[:-1] + edges[1:]) / 2, calibration.images, width=0.86 * np.diff(edges), color=colours)
    for value, name, colour, style in ((confidence, "mean confidence", INK, "-"), (accuracy, "accuracy", BAD, "--")):
        bottom.axvline(100 * value, color=colour, linewidth=1.4, linestyle=style, label=f"{name} {percent(value)}")
    bottom.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.1)
    bottom.grid(visible=True, axis="y")
    bottom.set(xlabel="confidence: probability of the predicted class, %", ylabel="images")
    plain_numbers(bottom.yaxis)
    figure.align_ylabels()
    return figure
