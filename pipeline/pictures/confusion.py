"""Draw the confusion matrix, and its most frequent pairs as bars.

Above `_MOST_NAMED` classes, often confused classes become neighbours (average linkage over the two-way shares, optimal
leaf order). Above `_MOST_CELLS`, neighbours are summed into one cell. Takes two seconds with 1,000 classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.text import counted
from shardvit.pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from shardvit.pipeline.pictures.style import ACCENT, GRID, INK, MUTED, PAPER, Drawn, new_figure, plain
from shardvit.pipeline.runs.pictures import DrawRequest

if TYPE_CHECKING:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

_MOST_NUMBERED = 12  # with more classes, numbers do not fit into the cells
_MOST_NAMED = 30  # with more classes, not all names fit along an axis
_MOST_CELLS = 150  # most cells a side that are still distinguishable
_MOST_DRAWN = 40  # most cells a side drawn as shapes; more become one raster
_MOST_PAIRS = 15
_INCHES_A_LETTER = 0.068
_RASTER = "#2f7fc6"  # one raster serves both palettes: visible on white and on black
_TICKS = (0, 0.001, 0.01, 0.05, 0.2, 0.5, 1)

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class predicted as another."""

    true: int
    predicted: int
    images: int
    share: float  # of the images of `true`


def confused_pairs(confusion: Counts, *, most: int) -> list[ConfusedPair]:
    """List the most frequent mistakes of `confusion` [C, C] (row: true), by images, then share, then class order."""
    totals = confusion.sum(axis=1)
    true, predicted = np.nonzero(confusion * ~np.eye(len(confusion), dtype=bool))
    images = confusion[true, predicted]
    shares = images / totals[true]
    order = np.lexsort((predicted, true, -shares, -images))[:most]
    columns = (each[order].tolist() for each in (true, predicted, images, shares))
    return [ConfusedPair(*pair) for pair in zip(*columns, strict=True)]


def row_shares(confusion: Counts) -> Floats:
    """Divide each row by its sum, [C, C]; NaN for a class without images."""
    totals = confusion.sum(axis=1, keepdims=True)
    return np.divide(confusion, totals, out=np.full(confusion.shape, np.nan), where=totals > 0)


def similar_order(confusion: Counts) -> Counts:
    """Order classes [C] so that confused ones are neighbours; unconnected classes keep their places."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    shares = np.nan_to_num(row_shares(confusion))
    likeness = shares + shares.T
    np.fill_diagonal(likeness, 0.0)
    if len(confusion) < 3 or not likeness.any():
        return np.arange(len(confusion))
    distance = 1 - likeness / likeness.max()
    np.fill_diagonal(distance, 0.0)
    return leaves_list(linkage(squareform(distance, checks=False), "average", optimal_ordering=True)).astype(np.int64)


def in_blocks(confusion: Counts, *, most: int) -> tuple[Counts, int]:
    """Sum neighbours to at most `most` cells a side; returns the cells and the classes per cell (fewer in the last)."""
    size = -(-len(confusion) // most)
    starts = np.arange(0, len(confusion), size)
    return np.add.reduceat(np.add.reduceat(confusion, starts, axis=0), starts, axis=1), size


@of_each_set
def draw_confused_pairs(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the most confused pairs of each held-out set with any mistake."""
    confusion, classes = one.evaluation.confusion, one.evaluation.classes
    if confusion is None or not (pairs := confused_pairs(confusion, most=_MOST_PAIRS)):
        return None
    shown, wrong = sum(pair.images for pair in pairs), int(confusion.sum() - np.trace(confusion))
    part = f"{percent(shown / wrong)} of the {wrong:,} mistakes"
    if shown == wrong:
        part = "the only mistake" if wrong == 1 else f"all {wrong:,} mistakes"
    named = (
        f"{brief(classes[pair.true])} taken for {brief(classes[pair.predicted])}, {counted(pair.images, 'image')} "
        f"({percent(pair.share)})"
        for pair in pairs[:5]
    )
    picture = one.picture(
        "confused_pairs",
        "Most confused pairs",
        caption="How often a class (left of the arrow) was taken for another: images, and their share of the class. "
        f"That is {part}.",
        alt=f"Most frequent mistakes: {'; '.join(named)}.",
    )
    return picture, _bars(pairs, classes)


def _bars(pairs: list[ConfusedPair], classes: tuple[str, ...]) -> Figure:
    figure, [[axes]] = new_figure(width=7.0, height=0.45 + 0.3 * len(pairs))
    counts, places = [pair.images for pair in pairs], list(range(len(pairs)))
    names = [[plain(classes[number], longest=22) for number in (pair.true, pair.predicted)] for pair in pairs]
    axes.barh(places, counts, height=0.62, color=ACCENT)
    axes.set_yticks(places, list(map(" → ".join, names)))
    axes.set(xlim=(0, 1.45 * counts[0]), ylim=(len(pairs) - 0.5, -0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    right = {"ha": "right", "color": MUTED, "transform": axes.get_yaxis_transform()}
    for place, pair in zip(places, pairs, strict=True):
        text = counted(pair.images, "image") if place == 0 else f"{pair.images:,}"
        axes.text(pair.images + 0.01 * counts[0], place, text, va="center_baseline")
        axes.text(1.0, place, percent(pair.share), va="center_baseline", **right)
    axes.text(1.0, -0.6, "share of the true class", va="bottom", **right)
    axes.text(-0.01, -0.6, "true → predicted", va="bottom", **right)
    return figure


@of_each_set
def draw_confusion_matrix(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the matrix of each held-out set with at least two classes and one image."""
    confusion, classes = one.evaluation.confusion, one.evaluation.classes
    if confusion is None or len(confusion) < 2 or not confusion.sum():
        return None
    is_ordered = len(classes) > _MOST_NAMED
    order = similar_order(confusion) if is_ordered else np.arange(len(classes))
    cells, size = in_blocks(confusion[np.ix_(order, order)], most=_MOST_CELLS)
    caption = "Rows: the true class; columns: the predicted one. Each cell is the share of its row's images, in per "
    if len(classes) <= _MOST_NUMBERED:
        caption += "cent; cells without a number are 0."
    else:
        caption += "cent; shades follow its cube root, so that small shares can be seen."
    if not cells.sum(axis=1).all():
        caption += " A blank row is a class without images."
    if is_ordered:
        summed = f", and each cell sums {size} x {size} of them" if size > 1 else ""
        caption += (
            f" The {len(classes):,} classes are ordered so that those which are taken for one another are neighbours"
            f"{summed}; only some are named along the axes."
        )
    alt = _matrix_alt(confusion, classes)
    picture = one.picture("confusion_matrix", "Confusion matrix", caption=caption, alt=alt)
    return picture, _matrix(row_shares(cells), [classes[number] for number in order[::size]])


def _matrix_alt(confusion: Counts, classes: tuple[str, ...]) -> str:
    total, right = int(confusion.sum()), int(np.trace(confusion))
    named = [
        f"{brief(classes[pair.true])} as {brief(classes[pair.predicted])} ({percent(pair.share)} of "
        f"{brief(classes[pair.true])})"
        for pair in confused_pairs(confusion, most=3)
    ]
    return (
        f"Confusion matrix of {counted(len(classes), 'class')} and {counted(total, 'image')}, of which {right:,} "
        f"({percent(right / total)}) are right"
        + (f". Most often confused: {', '.join(named)}." if named else "; nothing was confused.")
    )


def _matrix(shares: Floats, names: list[str]) -> Figure:
    from matplotlib.colors import PowerNorm

    cells = len(shares)
    is_numbered, is_raster = cells <= _MOST_NUMBERED, cells > _MOST_DRAWN
    step = -(-cells // _MOST_NAMED)
    places = list(range(0, cells, step))
    labels = [plain(names[place], longest=18) for place in places]
    longest = _INCHES_A_LETTER * max(map(len, labels))
    side = min(max(0.52 * cells, 2.0), 5.6) if is_numbered else 5.6
    is_upright = longest > side / cells
    width = side + longest + (0.4 if is_numbered else 1.1)
    figure, [[axes]] = new_figure(width=width, height=side + 0.5 + (longest if is_upright else 0.1))
    norm = PowerNorm(1.0 if is_numbered else 1 / 3, vmin=0, vmax=1)
    how = {"cmap": _fading(_RASTER if is_raster else ACCENT), "norm": norm}
    known = np.ma.masked_invalid(shares)
    if is_raster:
        shown = axes.imshow(known, interpolation="none", **how)
    else:
        edges = np.arange(cells + 1) - 0.5
        shown = axes.pcolormesh(edges, edges, known, edgecolors=GRID, linewidth=0.4, **how)
        axes.set(xlim=(-0.5, cells - 0.5), ylim=(cells - 0.5, -0.5), aspect="equal")
    axes.set_yticks(places, labels)
    axes.set_xticks(places, labels, rotation=90 if is_upright else 0)
    axes.tick_params(length=0 if step == 1 else 2.5)
    axes.spines[:].set_visible(is_raster)
    axes.set(xlabel="predicted", ylabel="true")
    if is_numbered:
        for row, column in np.argwhere(shares > 0).tolist():
            share = float(shares[row, column])
            text, colour = "< 1" if share < 0.005 else f"{100 * share:.0f}", PAPER if norm(share) > 0.65 else INK
            axes.text(column, row, text, ha="center", va="center", color=colour)
    else:
        bar = figure.colorbar(shown, ax=axes, shrink=0.6, aspect=24, pad=0.02, ticks=_TICKS)
        bar.ax.set_yticklabels([f"{100 * tick:g}{' %' if tick == 1 else ''}" for tick in _TICKS])
        bar.outline.set_visible(False)
    return figure


def _fading(colour: str) -> LinearSegmentedColormap:
    """Colour map from transparent to `colour`: works on white and on black, and in greyscale."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    rgb = to_rgb(colour)
    return LinearSegmentedColormap.from_list("fading", [(*rgb, 0.0), (*rgb, 1.0)])
