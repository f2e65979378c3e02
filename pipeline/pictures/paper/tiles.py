"""Many small square maps in rows and columns as one raster: one image in an SVG in place of hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PIXELS = 1200  # of the raster's longer side, about, to which small maps are enlarged


@dataclass(frozen=True)
class Tiles:
    """The raster: float [rows, columns], nan in the gaps, or [rows, columns, 4] with gaps that are transparent."""

    raster: NDArray[np.floating[Any]]
    steps: tuple[int, int]  # from one map to the next, down and across
    counts: tuple[int, int]  # maps, down and across
    gap: int

    def ticks(self, along: Literal["rows", "columns"], *, names: Sequence[str]) -> tuple[list[float], list[str]]:
        """Places of the maps' middles with their names, as set_xticks takes them."""
        axis = 0 if along == "rows" else 1
        middle = (self.steps[axis] - self.gap - 1) / 2
        return [number * self.steps[axis] + middle for number in range(self.counts[axis])], list(names)


def tiled(maps: NDArray[np.floating[Any]]) -> Tiles:
    """Maps [rows, columns, height, width] of numbers, or [rows, columns, height, width, 3] of colours from 0 to 1."""
    rows, columns, height, width = maps.shape[:4]
    times = max(1, min(_MOST_PIXELS // max(rows * height, columns * width), 40))
    maps = maps.repeat(times, axis=2).repeat(times, axis=3)
    height, width = height * times, width * times
    gap = max(1, round(0.08 * min(height, width)))
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap)
    raster = np.full(shape, np.nan) if maps.ndim == 4 else np.zeros((*shape, 4))
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            place = raster[top : top + height, left : left + width]
            if maps.ndim == 4:
                place[...] = maps[row, column]
            else:
                place[..., :3] = maps[row, column]
                place[..., 3] = 1.0
    return Tiles(raster, (height + gap, width + gap), (rows, columns), gap)


def show_tiles(axes: Axes, tiles: Tiles, **arguments: Any) -> Any:
    """Draw the raster without a frame; `arguments` as of imshow. Returns what imshow does."""
    image = axes.imshow(tiles.raster, interpolation="none", **arguments)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    return image


def evenly(count: int, *, most: int) -> list[int]:
    """`most` of the numbers below `count`, evenly spaced, the first and the last among them; or all."""
    if count <= most:
        return list(range(count))
    return np.unique(np.rint(np.linspace(0, count - 1, most)).astype(int)).tolist()
