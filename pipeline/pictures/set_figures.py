"""Draw a set of shards: a contact sheet, the number of images in each class, and the images' sizes.

Drawn from an `Overview`; each comes with its words, which say how many images or labels it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from data_shards.reading.overview import Overview
from data_shards.text import show_bytes
from pipeline.pictures.grid import Cell, image_grid, label_names, percent, shortened
from pipeline.pictures.style import ACCENT, BAD, GRID, INK, MUTED, SERIES, new_figure
from pipeline.runs.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_COLUMNS = 8
_MOST_BARS = 40  # classes that have a bar each
_NAMED = 6  # at each end of the curve of more classes
_NAME_POINTS = 150.0
_SPREAD = 20  # of values: beyond it their axis is logarithmic


def contact_sheet(seen: Overview) -> tuple[Picture, Figure] | None:
    """The images that were drawn, by class; None if there are none."""
    if not seen.images:
        return None
    classes = seen.shards.classes
    cells = [
        Cell(image.pixels, (label_names(image.labels, classes=classes), f"{image.width} × {image.height}"))
        for image in seen.images
    ]
    shown = len({label for image in seen.images for label in image.labels})
    of = f"all {shown:,} classes" if shown == len(classes) else f"{shown:,} of the {len(classes):,} classes"
    where = f"{seen.opened:,} of {len(seen.shards.shards):,} shards" if not seen.is_whole else "all shards"
    words = Picture(
        name="contact_sheet",
        title="A few of the images",
        caption=f"{len(cells):,} images of {of}, drawn at random from {where} "
        f"(seed {seen.seed}): from each class equally many, as far as there are; width × height in pixels.",
        alt=f"{len(cells):,} images with their classes, the first of them "
        + "; ".join(cell.lines[0] for cell in cells[:8]),
        group="data",
    )
    return words, image_grid(cells, columns=_COLUMNS, cell_inches=1.08)


def label_histogram(seen: Overview) -> tuple[Picture, Figure] | None:
    """How many images each class has, the largest first; None if no label was read."""
    if not seen.labelled:
        return None
    counts, classes = seen.images_of_class, seen.shards.classes
    order = np.lexsort((np.arange(len(counts)), -counts)).tolist()
    draw = _bars if len(classes) <= _MOST_BARS else _ranked
    figure = draw([classes[number] for number in order], counts[order].tolist())
    base = (
        f"Labels of all {seen.labelled:,} images"
        if seen.is_whole and not seen.damaged
        else f"Labels of {seen.labelled:,} images in {seen.opened:,} of {len(seen.shards.shards):,} shards"
        + ("" if seen.is_whole else f", drawn at random (seed {seen.seed}): what the other shards hold may differ")
    )
    several = " An image with several labels counts for each." if seen.shards.is_multi_label else ""
    without = f" {seen.without_label:,} images have no label." if seen.without_label else ""
    empty = int((counts == 0).sum())
    none = f" {empty:,} of the {len(classes):,} classes have no image." if empty else ""
    smallest, median, largest = int(counts.min()), float(np.median(counts)), int(counts.max())
    have = f"{smallest:,} to {largest:,} images, the median is {median:,.0f}"
    if smallest == largest:
        have = f"{smallest:,} image{'s' * (smallest != 1)} each"
    words = Picture(
        name="label_histogram",
        title="Images of each class",
        caption=f"{base}. The {len(classes):,} classes have {have}.{several}{without}{none}",
        alt=f"{len(classes):,} classes have {have}; the largest is "
        f"{classes[order[0]]}, the smallest {classes[order[-1]]}",
        group="data",
    )
    return words, figure


def image_sizes(seen: Overview, *, image_size: int | None = None) -> tuple[Picture, Figure] | None:
    """Widths, heights, proportions and bytes of images; `image_size`: what the model takes, drawn as a line. None if no
    size could be read."""
    if not len(seen.sizes):
        return None
    height, width, num_bytes = seen.sizes.T
    of = f"All {len(height):,} images"
    if len(height) < seen.shards.num_samples:
        of = f"{len(height):,} of the {seen.shards.num_samples:,} images, drawn at random (seed {seen.seed}),"
    short = np.minimum(height, width)
    below = float((short < image_size).mean()) if image_size else 0.0
    enlarged = (
        f" The shorter side of {percent(below)} of them is below the {image_size} px that the model takes: they are "
        "enlarged."
        if below
        else ""
    )
    divisor, unit = (1, "bytes") if np.median(num_bytes) < 2000 else (1000, "kB")
    file_label = f"size of the file ({unit})"
    if (height == height[0]).all() and (width == width[0]).all():
        figure, axes = new_figure(width=6.0, height=2.6)
        size_words = f"{of} are {width[0]:,} × {height[0]:,} px"
        _histogram(axes[0, 0], num_bytes / divisor, label=file_label)
    else:
        figure, axes = new_figure(width=10.0, height=3.6, columns=3, width_ratios=[1.25, 1, 1])
        size_words = (
            f"{of} are {width.min():,} to {width.max():,} px wide and {height.min():,} to {height.max():,} px high; "
            f"the medians are {np.median(width):,.0f} and {np.median(height):,.0f} px"
        )
        _scatter(axes[0, 0], width, height, image_size=image_size)
        _histogram(axes[0, 1], width / height, label="width / height", mark=1.0)
        _histogram(axes[0, 2], num_bytes / divisor, label=file_label)
    files = (
        f"their files have {show_bytes(float(num_bytes.min()))} to {show_bytes(float(num_bytes.max()))}, the median "
        f"is {show_bytes(float(np.median(num_bytes)))}"
    )
    words = Picture(
        name="image_sizes",
        title="Sizes of the images",
        caption=f"{size_words}; {files}.{enlarged}",
        alt=f"{size_words}; {files}",
        group="data",
    )
    return words, figure


def _bars(names: list[str], counts: list[int]) -> Figure:
    """A bar for each class, with its number at the right."""
    figure, grid = new_figure(width=7.0, height=0.75 + 0.235 * len(names))
    axes: Axes = grid[0, 0]
    places = np.arange(len(names))
    axes.barh(places, counts, height=0.68, color=ACCENT)
    axes.set_yticks(places, [shortened(name, points=_NAME_POINTS) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, max(*counts, 1)), xlabel="images")
    axes.grid(axis="x")
    _whole_numbers(axes.xaxis)
    for place, count in zip(places, counts, strict=True):
        axes.annotate(
            f"{count:,}", (1.0, place), xycoords=axes.get_yaxis_transform(), xytext=(40, 0), textcoords="offset points",
            ha="right", va="center", fontsize=8, color=INK if count else BAD, annotation_clip=False,
        )  # fmt: skip
    return figure


def _ranked(names: list[str], counts: list[int]) -> Figure:
    """The counts over the classes' ranks, and beside it the ends by name."""
    figure, grid = new_figure(width=9.4, height=3.7, columns=2, width_ratios=[1.9, 1])
    axes: Axes = grid[0, 0]
    ranks = np.arange(1, len(counts) + 1)
    axes.fill_between(ranks, counts, step="mid", color=SERIES[4], alpha=0.45, linewidth=0)
    axes.step(ranks, counts, where="mid", color=ACCENT)
    smallest = next((count for count in reversed(counts) if count), 1)
    if counts[0] > _SPREAD * smallest:
        axes.set_yscale("symlog", linthresh=1.0)
        _plain_numbers(axes.yaxis)
        axes.set_ylim(0, counts[0] * 1.3)
    else:
        axes.set_ylim(0, counts[0] * 1.08 or 1)
    axes.set(xlim=(0.5, len(counts) + 0.5), xlabel="classes, the largest first", ylabel="images")
    axes.grid(axis="y")
    _whole_numbers(axes.xaxis)
    if axes.get_yscale() == "linear":
        _whole_numbers(axes.yaxis)
    _ends(grid[0, 1], names, counts)
    return figure


def _ends(axes: Axes, names: list[str], counts: list[int]) -> None:
    """The largest and the smallest classes by name, numbers on the right."""
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(2 * _NAMED + 3, -0.5))
    rows = [("largest", ""), *zip(names[:_NAMED], counts[:_NAMED], strict=True), ("", ""), ("smallest", "")]
    rows += zip(names[-_NAMED:], counts[-_NAMED:], strict=True)
    for row, (name, count) in enumerate(rows):
        is_heading = count == ""
        shown = shortened(name, points=_NAME_POINTS)
        axes.text(0.0, row, shown, va="center", fontsize=8, color=MUTED if is_heading else INK)
        if not is_heading:
            axes.text(1.0, row, f"{count:,}", va="center", ha="right", fontsize=8, color=INK if count else BAD)


def _scatter(axes: Axes, width: np.ndarray, height: np.ndarray, *, image_size: int | None) -> None:
    longest, shortest = max(width.max(), height.max()), min(width.min(), height.min())
    is_wide = longest > _SPREAD * shortest
    if is_wide:
        axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis) if is_wide else _whole_numbers(axis)
    low, high = (shortest / 1.2, longest * 1.2) if is_wide else (0, longest * 1.05)
    axes.plot([low, high], [low, high], color=GRID, lw=1.0, zorder=0)
    axes.annotate(
        "square", (high, high), xytext=(-4, -10), textcoords="offset points", ha="right", fontsize=8, color=MUTED
    )
    # Many images have the very same size: the more of them, the darker and larger.
    places, times = np.unique(np.stack([width, height], axis=1), axis=0, return_counts=True)
    axes.scatter(places[:, 0], places[:, 1], s=6 + 60 * times / times.max(), color=ACCENT, alpha=0.45, linewidth=0)
    if image_size and low < image_size < high:
        for line in (axes.axvline, axes.axhline):
            line(image_size, color=BAD, lw=0.9, ls="--")
        axes.annotate(
            f"model: {image_size} px", (image_size, high), xytext=(3, -10), textcoords="offset points", fontsize=8,
            color=BAD,
        )  # fmt: skip
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="width (px)", ylabel="height (px)")
    axes.set_box_aspect(1)


def _histogram(axes: Axes, values: np.ndarray, *, label: str, mark: float | None = None) -> None:
    if values.min() > 0 and values.max() > _SPREAD * values.min():
        bins = np.geomspace(values.min(), values.max() * 1.0001, 31)
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    elif values.max() > values.min():
        bins = np.linspace(values.min(), values.max(), 31)
    else:
        bins = np.linspace(0.5 * values[0], 1.5 * values[0], 31)
    axes.hist(values, bins=bins.tolist(), color=ACCENT)
    if mark is not None:
        axes.axvline(mark, color=MUTED, lw=0.9)
        axes.annotate(
            "square", (mark, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(3, -8), textcoords="offset points",
            fontsize=8, color=MUTED,
        )  # fmt: skip
    axes.set(xlabel=label, ylabel="images")
    axes.grid(axis="y")
    _whole_numbers(axes.yaxis)


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}"))


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis 10, 100, 1,000; matplotlib would write powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
