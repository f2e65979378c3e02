"""Draw a model's first-layer filters and the similarity of its position embeddings, each as one tiled raster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from timm.models.vision_transformer import VisionTransformer

from shardvit.model.inspection import FirstFilters
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.pictures.style import MUTED, Drawn, new_figure, sequential
from shardvit.pipeline.runs.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 7  # as in the paper: 4 rows of 7
_MOST_PLACES = 14  # patches shown along a side of the grid
_MOST_TABLES = 3
_MOST_PIXELS = 1200  # approximate longer side to which small maps are enlarged


@dataclass(frozen=True)
class Tiles:
    """Raster of tiled maps: float [rows, columns] with NaN gaps, or [rows, columns, 4] with transparent gaps."""

    raster: NDArray[np.floating[Any]]
    steps: tuple[int, int]  # from one map to the next, down and across
    counts: tuple[int, int]  # maps, down and across
    gap: int

    def ticks(self, along: Literal["rows", "columns"], *, names: Sequence[str]) -> tuple[list[float], list[str]]:
        """Return the maps' centres and names, as set_xticks takes them."""
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
    """Pick at most `most` evenly spaced numbers below `count`, including the first and last."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(int)).tolist()


def draw_filters(found: FirstFilters, *, meta: SavedModelMeta) -> Drawn:
    """Draw the first layer's filters as colours: grey is zero, and each is scaled to its largest weight."""
    filters = found.filters.numpy()[:, [min(each, meta.model.channels - 1) for each in range(3)]]  # the first three
    count, _, side, _ = filters.shape
    largest = np.maximum(np.abs(filters).max(axis=(1, 2, 3), keepdims=True), np.finfo(np.float32).tiny)
    colours = (0.5 + 0.5 * filters / largest).transpose(0, 2, 3, 1)
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    blank = np.full((rows * columns - count, side, side, 3), np.nan)
    maps = np.concatenate([colours, blank]).reshape(rows, columns, side, side, 3)
    tiles = tiled(maps)
    tiles.raster[np.isnan(tiles.raster).any(axis=-1)] = 0.0  # transparent
    width = max(5.6 * columns / _COLUMNS, 2.0)
    figure, [[axes]] = new_figure(width=width, height=width * rows / columns)
    show_tiles(axes, tiles)
    axes.set(xticks=[], yticks=[])
    if found.kind == "components":
        first, total = 100 * found.shares[0], 100 * sum(found.shares)
        title = f"RGB embedding filters: first {count} principal components"
        caption = (
            f"Principal components of the {meta.model.sizes.width} filters that turn a patch of {side} x {side} px "
            "into a token, the strongest first, row by row (ViT paper, Figure 7, left). Grey is no weight; each is "
            "stretched to its largest. Smooth waves and edges: a basis for what is in a patch; noise: not learnt yet."
        )
        alt = f"{count} small colour patterns; the first explains {first:.0f} % of the variance, all {total:.0f} %."
    else:
        title = f"Filters of the root: the first {count}"
        caption = (
            f"The {side} x {side} kernels of the ResNet's first convolution, standardised as they are applied. Grey is "
            "no weight; each is stretched to its largest. Edges and colour blobs: learnt; noise: not learnt yet."
        )
        alt = f"{count} colour patterns of {side} x {side} pixels."
    return Picture("embedding_filters", title, caption, alt, "paper"), figure


def draw_positions(model: VisionTransformer, positions: np.ndarray, *, meta: SavedModelMeta) -> Drawn:
    """Draw cosine similarities [tables, N, N] as one map per patch, at its place in the grid."""
    grid = meta.model.grid_size(meta.image_size)
    tables = evenly(len(positions), most=_MOST_TABLES)
    places = evenly(grid, most=_MOST_PLACES)
    labels = [str(place + 1) for place in places]
    width = 5.2 if len(tables) == 1 else 3.2 * len(tables)
    figure, [panels] = new_figure(width=width, height=width / len(tables) * 0.9, columns=len(tables))
    figure.set_layout_engine("compressed")
    lowest = min(float(positions.min()), 0.99)  # sinusoidal embeddings have cosines around 0.9
    for axes, table in zip(panels, tables, strict=True):
        tiles = tiled(positions[table].reshape(grid, grid, grid, grid)[np.ix_(places, places)])
        show_tiles(axes, tiles, cmap=sequential(), vmin=lowest, vmax=1.0)
        axes.set_xticks(*tiles.ticks("columns", names=labels))
        axes.set_yticks(*tiles.ticks("rows", names=labels))
        axes.set_xlabel("patch column")
        if len(tables) > 1:
            axes.set_title(f"before block {table + 1}")
    panels[0].set_ylabel("patch row")
    bar = figure.colorbar(panels[0].get_images()[0], ax=list(panels), shrink=0.8, aspect=28, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("cosine similarity", color=MUTED)
    near, far = _near_and_far(positions[0], grid=grid)
    more = "" if len(places) == grid else f" {len(places)} x {len(places)} of the {grid} x {grid} places are shown."
    picture = Picture(
        name="position_similarity",
        title="Similarity of position embeddings",
        caption="Each small map is one patch's place in the image: how like its position embedding is to those of all "
        f"patches, as the cosine (ViT paper, Figure 7, centre).{more} A dark spot that moves with the map's place: "
        "the model knows which patches are near; rows and columns show as a cross.",
        alt=f"A grid of {len(places)} x {len(places)} maps. Neighbouring patches have a mean cosine of {near:.2f}, "
        f"patches at opposite ends of a row or column {far:.2f}.",
        group="paper",
    )
    return picture, figure


def _near_and_far(similarity: np.ndarray, *, grid: int) -> tuple[float, float]:
    """Mean cosine of adjacent patches, and of patches at opposite ends of a row or column."""
    if grid < 2:
        return 1.0, 1.0
    rows = similarity.reshape(grid, grid, grid, grid)  # [row, column, row, column]
    along_rows = np.einsum("ijik->ijk", rows)  # both patches in row i
    along_columns = np.einsum("jiki->ijk", rows)
    both = np.stack([along_rows, along_columns])
    return float(both.diagonal(1, 2, 3).mean()), float(both[..., 0, -1].mean())
