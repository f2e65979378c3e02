"""Draw a set of shards from an `Overview` (contact sheet, images per class, image sizes) or from its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardvit.data_shards.reading.overview import Overview
from shardvit.data_shards.sets.statistics_summary import LEVELS, SetStatistics
from shardvit.data_shards.text import counted, show_bytes
from shardvit.pipeline.pictures.grid import Cell, image_grid, label_names, shortened, whole_percent
from shardvit.pipeline.pictures.style import (
    ACCENT,
    BAD,
    DASHES,
    GRID,
    INK,
    MUTED,
    SERIES,
    Drawn,
    new_figure,
    plain_numbers,
)
from shardvit.pipeline.runs.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MOST_BARS = 40  # up to this many classes, each has a bar
_NAMED = 6  # largest and smallest classes named, if there are more
_NAME_POINTS = 150.0
_SPREAD = 20  # largest / smallest value above which an axis is logarithmic


def contact_sheet(seen: Overview) -> Drawn | None:
    """Draw the sampled images by class; None if there are none."""
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
    picture = Picture(
        name="contact_sheet",
        title="A few of the images",
        caption=f"{len(cells):,} images of {of}, drawn at random from {where} "
        f"(seed {seen.seed}): from each class equally many, as far as there are; width × height in pixels.",
        alt=f"{len(cells):,} images with their classes, the first of them "
        + "; ".join(cell.lines[0] for cell in cells[:8]),
        group="data",
    )
    return picture, image_grid(cells, columns=8, cell_inches=1.08, shown=seen.shown)


def label_histogram(seen: Overview) -> Drawn | None:
    """Draw images per class, largest first; None if no label was read."""
    if not seen.labelled:
        return None
    base = f"Labels of all {seen.labelled:,} images"
    if seen.damaged or not seen.is_whole:
        base = f"Labels of {seen.labelled:,} images in {seen.opened:,} of {len(seen.shards.shards):,} shards"
    if not seen.is_whole:
        base += f", drawn at random (seed {seen.seed}): what the other shards hold may differ"
    several, unlabelled = seen.shards.is_multi_label, seen.without_label
    return _class_counts(seen.images_of_class, seen.shards.classes, base, several=several, unlabelled=unlabelled)


def _class_counts(counts: np.ndarray, classes: Sequence[str], base: str, *, several: bool, unlabelled: int) -> Drawn:
    order: list[int] = np.lexsort((np.arange(len(counts)), -counts)).tolist()
    smallest, median, largest = int(counts.min()), float(np.median(counts)), int(counts.max())
    have = f"{smallest:,} to {largest:,} images, the median is {median:,.0f}"
    if smallest == largest:
        have = f"{counted(smallest, 'image')} each"
    caption = f"{base}. The {len(classes):,} classes have {have}."
    if several:
        caption += " An image with several labels counts for each."
    if unlabelled:
        caption += f" {unlabelled:,} images have no label."
    if empty := int((counts == 0).sum()):
        caption += f" {empty:,} of the {len(classes):,} classes have no image."
    picture = Picture(
        name="label_histogram",
        title="Images of each class",
        caption=caption,
        alt=f"{len(classes):,} classes have {have}; the largest is "
        f"{classes[order[0]]}, the smallest {classes[order[-1]]}",
        group="data",
    )
    draw = _bars if len(classes) <= _MOST_BARS else _ranked
    return picture, draw([classes[number] for number in order], counts[order].tolist())


def image_sizes(seen: Overview, *, image_size: int | None = None) -> Drawn | None:
    """Draw widths, heights, proportions and bytes, with the model's size as a line; None if no size could be read."""
    if not len(seen.sizes):
        return None
    height, width, num_bytes = seen.sizes.T
    of = f"All {len(height):,} images"
    if len(height) < seen.shards.num_samples:
        of = f"{len(height):,} of the {seen.shards.num_samples:,} images, drawn at random (seed {seen.seed}),"
    divisor, unit = (1, "bytes") if np.median(num_bytes) < 2000 else (1000, "kB")
    if (height == height[0]).all() and (width == width[0]).all():
        figure, [[files_panel]] = new_figure(width=6.0, height=2.6)
        sizes = f"{of} are {width[0]:,} × {height[0]:,} px"
    else:
        figure, [[sides, shapes, files_panel]] = new_figure(
            width=10.0, height=3.6, columns=3, width_ratios=[1.25, 1, 1]
        )
        sizes = (
            f"{of} are {width.min():,} to {width.max():,} px wide and {height.min():,} to {height.max():,} px high; "
            f"the medians are {np.median(width):,.0f} and {np.median(height):,.0f} px"
        )
        _scatter(sides, width, height, image_size=image_size)
        _histogram(shapes, width / height, label="width / height", mark=1.0)
    _histogram(files_panel, num_bytes / divisor, label=f"size of the file ({unit})")
    least, most, median = (show_bytes(float(each(num_bytes))) for each in (np.min, np.max, np.median))
    caption = f"{sizes}; their files have {least} to {most}, the median is {median}."
    if below := float((np.minimum(height, width) < image_size).mean()) if image_size else 0.0:
        part = f"The shorter side of {whole_percent(below)} of them"
        caption += f" {part} is below the {image_size} px that the model takes: they are enlarged."
    return _picture("image_sizes", "Sizes of the images", caption), figure


def statistics_figures(seen: SetStatistics) -> list[Drawn]:
    """Draw classes, sizes, bytes, brightness and contrast of all images of a table; nothing if it has none."""
    if not seen.images:
        return []
    of, several, unlabelled = f"all {seen.images:,} images", seen.is_multi_label, seen.labels_an_image[0]
    base = f"Labels of {of}"
    drawn = [_class_counts(seen.images_of_class, seen.classes, base, several=several, unlabelled=unlabelled)]
    figure, axes = new_figure(width=10.0, height=5.6, rows=2, columns=2)
    labels = {"width": "width (px)", "height": "height (px)", "aspect": "width / height", "bytes": "bytes"}
    for panel, (what, label) in zip(axes.ravel(), labels.items(), strict=True):
        _histogram(panel, *seen.bins(what), label=label, mark=1.0 if what == "aspect" else None)
    words = "; ".join(f"{label} {_spread_of(*seen.bins(what))}" for what, label in labels.items())
    drawn.append((_picture("sizes", "Sizes of the images", f"Of {of}, least, median and most: {words}."), figure))
    drawn.append(_moments_of_colours(seen) if not seen.channels else _moments_of_channels(seen))
    if seen.is_multi_label:
        figure, [[panel]] = new_figure(width=6.0, height=2.8)
        values, counts = np.array(sorted(seen.labels_an_image.items())).T
        panel.bar(values, counts, color=ACCENT)
        panel.set(xlabel="labels of an image", ylabel="images")
        _whole_numbers(panel.xaxis)
        _whole_numbers(panel.yaxis)
        have = f"{values.min():,} to {values.max():,} labels, {values @ counts / seen.images:.3g} on average"
        drawn.append((_picture("labels", "Labels of an image", f"Of {of}: {have}."), figure))
    return drawn


def _moments_of_channels(seen: SetStatistics) -> Drawn:
    figure, [[panel]] = new_figure(width=6.0, height=3.0)
    panel.errorbar(np.arange(1, seen.channels + 1), seen.mean, yerr=seen.std, fmt="o", color=ACCENT, capsize=3)
    panel.set(xlabel="channel", ylabel="mean and deviation")
    _whole_numbers(panel.xaxis)
    mean, std = (", ".join(f"{value:.4g}" for value in each) for each in (seen.mean, seen.std))
    caption = (
        "Mean and deviation of all pixels, each image with the same weight; integers as shares of their type's range: "
        f"mean [{mean}], std [{std}]. Recipes normalise with them, unless data.normalisation says otherwise."
    )
    return _picture("channels", "Mean and deviation of each channel", caption), figure


def _moments_of_colours(seen: SetStatistics) -> Drawn:
    figure, [panels] = new_figure(width=10.0, height=3.2, columns=2)
    at = np.arange(seen.moments.shape[1]) * LEVELS + LEVELS / 2
    channels = (("red", SERIES[1]), ("green", SERIES[2]), ("blue", SERIES[0]))
    for panel, moments, label in zip(panels, np.split(seen.moments, 2), ("mean", "deviation"), strict=True):
        for counts, (name, color), dashes in zip(moments, channels, DASHES, strict=False):
            panel.step(at, counts, where="mid", color=color, ls=dashes, label=name)
        panel.set(xlabel=f"{label} of an image's pixels (0 to 255)", ylabel="images", xlim=(0, None), ylim=(0, None))
        panel.legend(frameon=False)
        _whole_numbers(panel.yaxis)
    mean, std = (", ".join(f"{value:.4f}" for value in each) for each in (seen.mean, seen.std))
    caption = (
        f"Mean and deviation of each image, by channel. Of all pixels, from 0 to 1, each image with the same weight: "
        f"mean [{mean}], std [{std}]. Recipes normalise as Google's code does, with 0.5 and 0.5, whatever these are."
    )
    return _picture("channels", "Brightness and contrast", caption), figure


def _picture(name: str, title: str, caption: str) -> Picture:
    return Picture(name, title, caption, alt=caption, group="data")


def _spread_of(values: np.ndarray, counts: np.ndarray) -> str:
    median = values[np.searchsorted(np.cumsum(counts), counts.sum() / 2)]
    return ", ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (values[0], median, values[-1]))


def _bars(names: Sequence[str], counts: list[int]) -> Figure:
    figure, [[axes]] = new_figure(width=7.0, height=0.75 + 0.235 * len(names))
    places = np.arange(len(names))
    axes.barh(places, counts, height=0.68, color=ACCENT)
    axes.set_yticks(places, [shortened(name, points=_NAME_POINTS) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, max(*counts, 1)), xlabel="images")
    axes.grid(axis="x")
    _whole_numbers(axes.xaxis)
    for place, count in zip(places, counts, strict=True):
        at = {"xycoords": axes.get_yaxis_transform(), "xytext": (40, 0), "ha": "right", "va": "center"}
        _note(axes, f"{count:,}", (1.0, float(place)), color=INK if count else BAD, annotation_clip=False, **at)
    return figure


def _ranked(names: Sequence[str], counts: list[int]) -> Figure:
    figure, [[axes, ends]] = new_figure(width=9.4, height=3.7, columns=2, width_ratios=[1.9, 1])
    ranks = np.arange(1, len(counts) + 1)
    axes.fill_between(ranks, counts, step="mid", color=SERIES[4], alpha=0.45, linewidth=0)
    axes.step(ranks, counts, where="mid", color=ACCENT)
    smallest = next((count for count in reversed(counts) if count), 1)
    if counts[0] > _SPREAD * smallest:
        axes.set_yscale("symlog", linthresh=1.0)
        plain_numbers(axes.yaxis)
        axes.set_ylim(0, counts[0] * 1.3)
    else:
        axes.set_ylim(0, counts[0] * 1.08 or 1)
        _whole_numbers(axes.yaxis)
    axes.set(xlim=(0.5, len(counts) + 0.5), xlabel="classes, the largest first", ylabel="images")
    axes.grid(axis="y")
    _whole_numbers(axes.xaxis)

    ends.set_axis_off()
    ends.set(xlim=(0, 1), ylim=(2 * _NAMED + 3, -0.5))
    named = list(zip(names, counts, strict=True))
    rows = [("largest", None), *named[:_NAMED], ("", None), ("smallest", None), *named[-_NAMED:]]
    for row, (name, count) in enumerate(rows):
        colour = MUTED if count is None else INK
        ends.text(0.0, row, shortened(name, points=_NAME_POINTS), va="center", fontsize=8, color=colour)
        if count is not None:
            ends.text(1.0, row, f"{count:,}", va="center", ha="right", fontsize=8, color=INK if count else BAD)
    return figure


def _scatter(axes: Axes, width: np.ndarray, height: np.ndarray, *, image_size: int | None) -> None:
    longest, shortest = max(width.max(), height.max()), min(width.min(), height.min())
    is_wide = longest > _SPREAD * shortest
    if is_wide:
        axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis) if is_wide else _whole_numbers(axis)
    low, high = (shortest / 1.2, longest * 1.2) if is_wide else (0, longest * 1.05)
    axes.plot([low, high], [low, high], color=GRID, lw=1.0, zorder=0)
    _note(axes, "square", (high, high), xytext=(-4, -10), ha="right")
    # Many images share a size: the more, the larger the dot.
    places, times = np.unique(np.stack([width, height], axis=1), axis=0, return_counts=True)
    axes.scatter(places[:, 0], places[:, 1], s=6 + 60 * times / times.max(), color=ACCENT, alpha=0.45, linewidth=0)
    if image_size and low < image_size < high:
        for line in (axes.axvline, axes.axhline):
            line(image_size, color=BAD, lw=0.9, ls="--")
        _note(axes, f"model: {image_size} px", (image_size, high), xytext=(3, -10), color=BAD)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="width (px)", ylabel="height (px)")
    axes.set_box_aspect(1)


def _histogram(
    axes: Axes, values: np.ndarray, counts: np.ndarray | None = None, *, label: str, mark: float | None = None
) -> None:
    low, high = values.min(), values.max()
    bins = np.linspace(low, high, 31) if high > low else np.linspace(0.5 * low, 1.5 * low, 31)
    if low > 0 and high > _SPREAD * low:
        bins = np.geomspace(low, high * 1.0001, 31)
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    axes.hist(values, bins=bins.tolist(), weights=counts, color=ACCENT)
    if mark is not None:
        axes.axvline(mark, color=MUTED, lw=0.9)
        _note(axes, "square", (mark, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(3, -8))
    axes.set(xlabel=label, ylabel="images")
    axes.grid(axis="y")
    _whole_numbers(axes.yaxis)


def _note(axes: Axes, text: str, place: tuple[float, float], *, color: str = MUTED, **how: Any) -> None:
    axes.annotate(text, place, textcoords="offset points", fontsize=8, color=color, **how)


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    plain_numbers(axis)
