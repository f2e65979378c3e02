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
    """The raster: float [rows, columns], NaN in the gaps, or [rows, columns, 4] with transparent gaps."""

    raster: NDArray[np.floating[Any]]
    steps: tuple[int, int]  # from one map to the next, down and across
    counts: tuple[int, int]  # maps, down and across
    gap: int

    def ticks(self, along: Literal["rows", "columns"], *, names: Sequence[str]) -> tuple[list[float], list[str]]:
        """Centres of the maps with their names, as set_xticks takes them."""
        axis = 0 if along == "rows" else 1
        middle = (self.steps[axis] - self.gap - 1) / 2
        return [number * self.steps[axis] + middle for number in range(self.counts[axis])], list(names)


def tiled(maps: NDArray[np.floating[Any]]) -> Tiles:
    """Tile maps [rows, columns, height, width] of numbers, or [rows, columns, height, width, 3] of colours in 0..1."""
    rows, columns, height, width = maps.shape[:4]
    times = max(1, min(_MOST_PIXELS // max(rows * height, columns * width), 40))
    maps = maps.repeat(times, axis=2).repeat(times, axis=3)
    gap = max(1, round(0.08 * times * min(height, width)))
    if maps.ndim == 5:
        maps = np.concatenate([maps, np.ones((*maps.shape[:4], 1))], axis=4)  # opaque
    around = [(0, 0), (0, 0), (0, gap), (0, gap), (0, 0)][: maps.ndim]
    padded = np.pad(maps.astype(np.float64), around, constant_values=np.nan if maps.ndim == 4 else 0.0)
    down, across = padded.shape[2:4]
    raster = padded.swapaxes(1, 2).reshape(rows * down, columns * across, *maps.shape[4:])
    return Tiles(raster[: rows * down - gap, : columns * across - gap], (down, across), (rows, columns), gap)


def show_tiles(axes: Axes, tiles: Tiles, **arguments: Any) -> Any:
    """Draw the raster without a frame; arguments and result are imshow's."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.imshow(tiles.raster, interpolation="none", **arguments)


def evenly(count: int, *, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(int)).tolist()
