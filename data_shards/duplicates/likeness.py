"""Whether two images are the same picture: one is laid over the other, and what is left is compared.

Both become thumbnails of 32 x 32 pixels. The other one, and its mirror image, is shifted by up to 5 % and stretched by
up to 9 % on each axis until it fits best (least squares by Gauss-Newton steps, with gain and offset of the greys).
Two correlations then decide. `likeness`, over all colours, is to be 0.94: edited copies of an image of 32 x 32 pixels
(encoded again at quality 50, resized by 0.7 or 1.4, mirrored, cropped by 5 %) reach it, and photographs reach 0.99.
`detail` is the same without coarse structure, which two pictures of a dark thing on a bright ground share; it is to be
0.84, unless what differs is no more than JPEG's noise.

The bounds were chosen on CIFAR-10's training images: below them are pictures of one kind of thing from the same side,
above them one photograph, or one series of it. Takes 2 to 3 ms a pair.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.duplicates.thumbnail import THUMBNAIL_PIXELS, sampling, thumbnail
from data_shards.images.box import Pixels

LEAST_LIKENESS = 0.94
LEAST_DETAIL = 0.84
MOST_NOISE = 3.0  # grey levels
_MARGIN = 0.06  # of each side, which the other image may lack
_COMPARED = 28  # pixels of the rest, on each axis
_STEPS = 6  # at most, coarse and fine each
_MOST_SHIFT, _MOST_STRETCH = 0.05, 0.09  # shares of the side
_LEAST_GAIN = 0.2  # of the greys; below it there is nothing to go by
_COARSE = 6  # times more that an image is smoothed for its coarse structure

Floats = NDArray[np.float64]
Window = tuple[float, float]


class Likeness(NamedTuple):
    """Two correlations, -1 to 1, where the images fit best, and the root mean square of what differs in the detail."""

    likeness: float
    detail: float
    difference: float  # grey levels
    mirrored: bool

    @property
    def is_same_picture(self) -> bool:
        is_detail_same = self.detail >= LEAST_DETAIL or self.difference <= MOST_NOISE
        return self.likeness >= LEAST_LIKENESS and is_detail_same


def compare(one: Pixels, other: Pixels) -> Likeness:
    """Compare two images, uint8 [height, width, 3] of any sizes."""
    first, second = _thumbnail(one), _thumbnail(other)
    found = [_compare(first, second[..., ::-1] if mirrored else second, mirrored) for mirrored in (False, True)]
    return max(found, key=lambda each: each.likeness)


def _compare(one: Floats, other: Floats, mirrored: bool) -> Likeness:
    """Both [3, 32, 32]."""
    rows, columns = _fit(one.mean(axis=0), other.mean(axis=0))
    own, theirs = sampling(_MARGIN, 1 - _MARGIN, _COMPARED), (sampling(*rows, _COMPARED), sampling(*columns, _COMPARED))
    here, there = own @ one @ own.T, theirs[0] @ other @ theirs[1].T
    likeness = _correlation(here, there)
    here = here - own @ _smooth(one, times=_COARSE) @ own.T
    there = there - theirs[0] @ _smooth(other, times=_COARSE) @ theirs[1].T
    difference = float(np.sqrt(np.mean((here - there) ** 2)))
    return Likeness(likeness, _correlation(here, there), difference, mirrored)


def _fit(one: Floats, other: Floats) -> tuple[Window, Window]:
    """The windows of `other`, of its rows and columns, that show what `one` does within its margins.

    Coarse structure first: fine texture fits in many places.
    """
    found = np.zeros(4)  # shift of rows and columns, stretch of rows and columns
    for times in (_COARSE, 0):
        found = _descend(_smooth(one, times=times), _smooth(other, times=times), found)
    return _window(found[0], found[2]), _window(found[1], found[3])


def _descend(one: Floats, other: Floats, found: Floats) -> Floats:
    own = sampling(_MARGIN, 1 - _MARGIN, _COMPARED)
    wanted = (own @ one @ own.T).ravel()
    down, across = np.gradient(other)
    place = (np.arange(_COMPARED) + 0.5) / _COMPARED * (1 - 2 * _MARGIN) + _MARGIN - 0.5
    most = np.array([_MOST_SHIFT, _MOST_SHIFT, _MOST_STRETCH, _MOST_STRETCH])
    for _ in range(_STEPS):
        rows, columns = (sampling(*_window(found[axis], found[axis + 2]), _COMPARED) for axis in (0, 1))
        shown = rows @ other @ columns.T
        by_row, by_column = (THUMBNAIL_PIXELS * (rows @ slope @ columns.T) for slope in (down, across))
        terms = [by_row, by_column, by_row * place[:, None], by_column * place, shown, np.ones_like(shown)]
        matrix = np.stack([term.ravel() for term in terms], axis=1)
        solved = np.linalg.solve(matrix.T @ matrix + 1e-6 * np.eye(6), matrix.T @ wanted)
        if solved[4] < _LEAST_GAIN:
            break
        step = np.clip(solved[:4] / solved[4], -0.03, 0.03)
        found = np.clip(found + step, -most, most)
        if np.abs(step).max() < 1e-3:
            break
    return found


def _window(shift: float, stretch: float) -> Window:
    half = (0.5 - _MARGIN) * (1 + stretch)
    return 0.5 + shift - half, 0.5 + shift + half


def _correlation(one: Floats, other: Floats) -> float:
    """Over all channels, each without its mean."""
    one, other = (each - each.mean(axis=(1, 2), keepdims=True) for each in (one, other))
    return float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum() + 1e-9))


def _thumbnail(pixels: Pixels) -> Floats:
    """[3, 32, 32], a little smoothed, so that the grid of pixels does not matter."""
    return _smooth(thumbnail(pixels).astype(np.float64).transpose(2, 0, 1), times=1)


def _smooth(channels: Floats, *, times: int) -> Floats:
    kernel = _smoothing(times)
    return kernel @ channels @ kernel.T


@cache
def _smoothing(times: int) -> Floats:
    """The matrix of 1/4, 1/2, 1/4 on one axis, applied `times` times."""
    once = 0.5 * np.eye(THUMBNAIL_PIXELS)
    for neighbour in (-1, 1):
        there = np.clip(np.arange(THUMBNAIL_PIXELS) + neighbour, 0, THUMBNAIL_PIXELS - 1)
        once[np.arange(THUMBNAIL_PIXELS), there] += 0.25
    return np.linalg.matrix_power(once, times)
