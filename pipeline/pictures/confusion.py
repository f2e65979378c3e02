"""Draw the confusion matrix, and its most frequent pairs as bars.

A matrix of more classes than `_MOST_NAMED` is ordered so that classes which are taken for one another are neighbours
(average linkage over the two-way shares, with the order of leaves that keeps neighbours alike), and beyond
`_MOST_CELLS` cells a side neighbours are summed into one cell. Takes two seconds with 1,000 classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_shards.text import counted
from pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from pipeline.pictures.style import ACCENT, GRID, INK, MUTED, PAPER, keep_picture, new_figure, plain
from pipeline.runs.pictures import DrawRequest, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

_MOST_NUMBERED = 12  # classes for which numbers fit into the cells
_MOST_NAMED = 30  # classes whose names all fit along an axis
_MOST_CELLS = 150  # cells a side that can be told apart
_MOST_DRAWN = 40  # cells a side that are shapes of their own; more are one image
_MOST_PAIRS = 15
_INCHES_A_LETTER = 0.068
_RASTER = "#2f7fc6"  # of large matrices, one image for both palettes: stands out on white and on black
_TICKS = (0, 0.001, 0.01, 0.05, 0.2, 0.5, 1)

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class that were taken for another."""

    true: int
    predicted: int
    images: int
    share: float  # of the images of `true`


def confused_pairs(confusion: Counts, *, most: int) -> list[ConfusedPair]:
    """The most frequent mistakes of `confusion` [C, C] (row: true), most images first; at equal counts the larger
    share, then the first classes."""
    totals = confusion.sum(axis=1)
    true, predicted = np.nonzero(confusion * ~np.eye(len(confusion), dtype=bool))
    images = confusion[true, predicted]
    shares = images / totals[true]
    order = np.lexsort((predicted, true, -shares, -images))[:most]
    return [ConfusedPair(int(true[at]), int(predicted[at]), int(images[at]), float(shares[at])) for at in order]


def row_shares(confusion: Counts) -> Floats:
    """Each row over its sum, [C, C]; NaN in the row of a class without images."""
    totals = confusion.sum(axis=1, keepdims=True)
    return np.divide(confusion, totals, out=np.full(confusion.shape, np.nan), where=totals > 0)


def similar_order(confusion: Counts) -> Counts:
    """The classes of `confusion` [C, C] in an order, [C], in which those that are taken for one another are neighbours;
    classes that nothing connects keep theirs."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(confusion) < 3:
        return np.arange(len(confusion))
    shares = np.nan_to_num(row_shares(confusion))
    likeness = shares + shares.T
    np.fill_diagonal(likeness, 0.0)
    if not likeness.any():
        return np.arange(len(confusion))
    distance = 1 - likeness / likeness.max()
    np.fill_diagonal(distance, 0.0)
    return leaves_list(linkage(squareform(distance, checks=False), "average", optimal_ordering=True)).astype(np.int64)


def in_blocks(confusion: Counts, *, most: int) -> tuple[Counts, int]:
    """`confusion` with so many neighbours, the second value, summed into one cell that at most `most` a side are left;
    the last of them may have fewer."""
    size = -(-len(confusion) // most)
    starts = np.arange(0, len(confusion), size)
    return np.add.reduceat(np.add.reduceat(confusion, starts, axis=0), starts, axis=1), size


@of_each_set
def draw_confused_pairs(request: DrawRequest, one: EvaluatedSet) -> None:
    """The pairs of each held-out set in which anything was confused."""
    confusion = one.evaluation.confusion
    if confusion is None or not (pairs := confused_pairs(confusion, most=_MOST_PAIRS)):
        return
    classes = one.evaluation.classes
    wrong = int(confusion.sum() - np.trace(confusion))
    picture = Picture(
        name=one.name("confused_pairs"),
        title=one.title("Most confused pairs"),
        caption="How often a class (left of the arrow) was taken for another: images, and their share of the "
        f"class. {_how_many(sum(pair.images for pair in pairs), wrong=wrong)}",
        alt="Most frequent mistakes: "
        + "; ".join(
            f"{brief(classes[pair.true])} taken for {brief(classes[pair.predicted])}, "
            f"{counted(pair.images, 'image')} ({percent(pair.share)})"
            for pair in pairs[:5]
        )
        + ".",
        group="evaluation",
    )
    keep_picture(request.stage_folder, picture, figure=_bars(pairs, classes), step=request.step)


def _how_many(shown: int, *, wrong: int) -> str:
    if shown == wrong:
        return f"That is {'the only mistake' if wrong == 1 else f'all {wrong:,} mistakes'}."
    return f"That is {percent(shown / wrong)} of the {wrong:,} mistakes."


def _bars(pairs: list[ConfusedPair], classes: tuple[str, ...]) -> Figure:
    figure, axes = new_figure(width=7.0, height=0.45 + 0.3 * len(pairs))
    [[ax]] = axes
    counts = [pair.images for pair in pairs]
    places = list(range(len(pairs)))
    ax.barh(places, counts, height=0.62, color=ACCENT)
    for place, pair in zip(places, pairs, strict=True):
        text = counted(pair.images, "image") if place == 0 else f"{pair.images:,}"
        ax.text(pair.images + 0.01 * counts[0], place, text, va="center_baseline", ha="left")
    ax.set_yticks(
        places,
        [f"{plain(classes[pair.true], longest=22)} → {plain(classes[pair.predicted], longest=22)}" for pair in pairs],
    )
    ax.set(xlim=(0, 1.45 * counts[0]), ylim=(len(pairs) - 0.5, -0.6))
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(left=False, bottom=False, labelbottom=False)
    # The shares stand in a column of their own, as numbers do in a table.
    right = {"ha": "right", "color": MUTED, "transform": ax.get_yaxis_transform()}
    for place, pair in zip(places, pairs, strict=True):
        ax.text(1.0, place, percent(pair.share), va="center_baseline", **right)
    ax.text(1.0, -0.6, "share of the true class", va="bottom", **right)
    ax.text(-0.01, -0.6, "true → predicted", va="bottom", **right)
    return figure


@of_each_set
def draw_confusion_matrix(request: DrawRequest, one: EvaluatedSet) -> None:
    """The matrix of each held-out set with at least two classes and an image."""
    confusion = one.evaluation.confusion
    if confusion is None or len(confusion) < 2 or not confusion.sum():
        return
    classes = one.evaluation.classes
    is_ordered = len(classes) > _MOST_NAMED
    order = similar_order(confusion) if is_ordered else np.arange(len(classes))
    cells, size = in_blocks(confusion[np.ix_(order, order)], most=_MOST_CELLS)
    names = [classes[number] for number in order[::size]]
    picture = Picture(
        name=one.name("confusion_matrix"),
        title=one.title("Confusion matrix"),
        caption=_matrix_caption(
            len(classes), size=size, is_ordered=is_ordered, has_empty_rows=not cells.sum(axis=1).all()
        ),
        alt=_matrix_alt(confusion, classes),
        group="evaluation",
    )
    figure = _matrix(row_shares(cells), names)
    keep_picture(request.stage_folder, picture, figure=figure, step=request.step)


def _matrix_caption(classes: int, *, size: int, is_ordered: bool, has_empty_rows: bool) -> str:
    text = "Rows: the true class; columns: the predicted one. Each cell is the share of its row's images, in per cent"
    if classes <= _MOST_NUMBERED:
        text += "; cells without a number are 0."
    else:
        text += "; shades follow its cube root, so that small shares can be seen."
    if has_empty_rows:
        text += " A blank row is a class without images."
    if is_ordered:
        text += f" The {classes:,} classes are ordered so that those which are taken for one another are neighbours"
        text += f", and each cell sums {size} x {size} of them" if size > 1 else ""
        text += "; only some are named along the axes."
    return text


def _matrix_alt(confusion: Counts, classes: tuple[str, ...]) -> str:
    total, right = int(confusion.sum()), int(np.trace(confusion))
    text = (
        f"Confusion matrix of {counted(len(classes), 'class')} and {counted(total, 'image')}, of which {right:,} "
        f"({percent(right / total)}) are right"
    )
    pairs = confused_pairs(confusion, most=3)
    if not pairs:
        return f"{text}; nothing was confused."
    shown = ", ".join(
        f"{brief(classes[pair.true])} as {brief(classes[pair.predicted])} ({percent(pair.share)} of "
        f"{brief(classes[pair.true])})"
        for pair in pairs
    )
    return f"{text}. Most often confused: {shown}."


def _matrix(shares: Floats, names: list[str]) -> Figure:
    """`names`: of the rows and columns, one each."""
    from matplotlib.colors import PowerNorm

    cells = len(shares)
    is_numbered, is_raster = cells <= _MOST_NUMBERED, cells > _MOST_DRAWN
    step = -(-cells // _MOST_NAMED)
    places = list(range(0, cells, step))
    labels = [plain(names[place], longest=18) for place in places]
    longest = _INCHES_A_LETTER * max(map(len, labels))
    side = min(max(0.52 * cells, 2.0), 5.6) if is_numbered else 5.6
    is_upright = longest > side / cells
    figure, axes = new_figure(
        width=side + longest + (0.4 if is_numbered else 1.1), height=side + 0.5 + (longest if is_upright else 0.1)
    )
    [[ax]] = axes
    norm = PowerNorm(1.0 if is_numbered else 1 / 3, vmin=0, vmax=1)
    shown_shares = np.ma.masked_invalid(shares)
    if is_raster:
        shown = ax.imshow(shown_shares, cmap=_fading(_RASTER), norm=norm, interpolation="none")
    else:
        edges = np.arange(cells + 1) - 0.5
        shown = ax.pcolormesh(
            edges, edges, shown_shares, cmap=_fading(ACCENT), norm=norm, edgecolors=GRID, linewidth=0.4
        )
        ax.set(xlim=(-0.5, cells - 0.5), ylim=(cells - 0.5, -0.5), aspect="equal")
    ax.set_yticks(places, labels)
    ax.set_xticks(places, labels, rotation=90 if is_upright else 0)
    ax.tick_params(length=0 if step == 1 else 2.5)
    ax.spines[:].set_visible(is_raster)
    ax.set(xlabel="predicted", ylabel="true")
    if is_numbered:
        _write_numbers(ax, shares, norm)
    else:
        bar = figure.colorbar(shown, ax=ax, shrink=0.6, aspect=24, pad=0.02, ticks=_TICKS)
        bar.ax.set_yticklabels([f"{100 * tick:g}{' %' if tick == 1 else ''}" for tick in _TICKS])
        bar.outline.set_visible(False)
    return figure


def _write_numbers(ax: Axes, shares: Floats, norm: Normalize) -> None:
    for row, values in enumerate(shares.tolist()):
        for column, value in enumerate(values):
            if value > 0:
                text = "< 1" if value < 0.005 else f"{100 * value:.0f}"
                colour = PAPER if norm(value) > 0.65 else INK
                ax.text(column, row, text, ha="center", va="center", color=colour)


def _fading(colour: str) -> LinearSegmentedColormap:
    """From nothing to `colour`: on paper from white, on a dark screen from black; in grey as well."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    rgb = to_rgb(colour)
    return LinearSegmentedColormap.from_list("fading", [(*rgb, 0.0), (*rgb, 1.0)])
