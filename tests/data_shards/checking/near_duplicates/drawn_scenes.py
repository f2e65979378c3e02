"""Scenes for tests of near-duplicates: alike, and not the same.

A scene is one garment, a flat shape with folds, in the middle of a floor. All scenes on one floor share their
background to within a shift of 3 %, as product photographs do, so every two of them are a hard negative. A scene's twin
has the same outline in the same place, in another colour.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

# Corners, as shares of the picture's shorter side from its middle.
_OUTLINES = {
    "shirt": "-20 -35 -8 -30 8 -30 20 -35 45 -15 34 -2 24 -10 24 40 -24 40 -24 -10 -34 -2 -45 -15",
    "trousers": "-20 -42 20 -42 28 45 6 45 0 -10 -6 45 -28 45",
    "dress": "-12 -42 -5 -34 5 -34 12 -42 16 -10 35 42 -35 42 -16 -10",
    "skirt": "-18 -30 18 -30 35 35 -35 35",
    "bag": "-30 -10 -15 -10 -10 -30 10 -30 15 -10 30 -10 35 38 -35 38",
    "shoe": "-40 10 -15 -15 0 0 35 12 42 25 -40 28",
}


def drawn_floors(draw: np.random.Generator, number: int, *, size: tuple[int, int]) -> list[Image.Image]:
    """Floors where there are no photographs: boards of wood, or tiles, grained."""
    width, height = size
    found: list[Image.Image] = []
    for which in range(number):
        boards = np.repeat(draw.normal(0, 8, 12), -(-height // 12))[:height, None]
        tiles = np.repeat(draw.normal(0, 8, 9), -(-width // 9))[:width] if which % 2 else 0
        light = np.asarray(Image.fromarray(draw.uniform(-20, 20, (4, 4)).astype(np.float32)).resize(size))
        grain = draw.normal(0, 10, (height, width // 8 + 1)).repeat(8, axis=1)[:, :width]
        shade = (boards + tiles + light + grain)[..., None] + draw.integers(90, 210, 3)
        found.append(Image.fromarray(shade.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1)))
    return found


def scene(floor: Image.Image, draw: np.random.Generator, *, colour: NDArray[np.int64] | None = None) -> Image.Image:
    """A garment on a floor; the same draws with another `colour` are its twin."""
    width, height = floor.size
    left, top = draw.uniform(0, 0.03, 2) * floor.size
    background = floor.resize(
        floor.size, Image.Resampling.BICUBIC, box=(left, top, left + 0.97 * width, top + 0.97 * height)
    )
    corners = np.array(_OUTLINES[str(draw.choice(list(_OUTLINES)))].split(), np.float32).reshape(-1, 2) / 100
    corners += draw.normal(0, 0.012, corners.shape)
    sine, cosine = np.sin(angle := draw.normal(0, 0.05)), np.cos(angle)
    corners = corners @ np.array([[cosine, -sine], [sine, cosine]]) * draw.uniform(0.5, 0.8) * min(floor.size)
    corners += (0.5 + draw.normal(0, 0.015, 2)) * floor.size
    mask = Image.new("L", floor.size)
    ImageDraw.Draw(mask).polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(1.2))
    shadow = np.asarray(mask.filter(ImageFilter.GaussianBlur(6)), np.float32)[..., None] / 255
    folds = Image.fromarray(draw.normal(0, 0.06, (12, 9)).astype(np.float32)).resize(
        floor.size, Image.Resampling.BICUBIC
    )
    drawn = draw.integers(20, 236, 3)
    cloth = (drawn if colour is None else colour) * (1 + np.asarray(folds)[..., None])
    pattern, band, spot = draw.integers(4), int(draw.integers(8, 30)), draw.uniform(0.42, 0.58, 2) * floor.size
    radius, spot_colour = draw.uniform(0.04, 0.09) * width, draw.integers(0, 256, 3)
    if pattern == 0:
        cloth[np.arange(height) // band % 2 == 0] *= 0.6
    elif pattern == 1:
        across, down = np.arange(width) - spot[0], np.arange(height)[:, None] - spot[1]
        cloth[across**2 + down**2 < radius**2] = spot_colour
    share = np.asarray(mask, np.float32)[..., None] / 255
    lit = np.asarray(background, np.float32) * draw.uniform(0.96, 1.04) * (1 - 0.25 * shadow)
    pixels = lit * (1 - share) + cloth * share + draw.normal(0, 2, (height, width, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def scenes(floors: Sequence[Image.Image], number: int, *, seed: int, twins: bool = False) -> list[Image.Image]:
    """Scenes on each of the floors in turn; or the twins of those with the same seed."""
    found: list[Image.Image] = []
    for which in range(number):
        draw = np.random.default_rng([seed, which])
        colour = np.random.default_rng([seed, which, 1]).integers(20, 236, 3) if twins else None
        found.append(scene(floors[which % len(floors)], draw, colour=colour))
    return found
