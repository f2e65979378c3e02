"""Laying one image over another: least squares by Gauss-Newton steps, with gain and offset of the greys.

Of two images a window of one is fixed, and that of the other is moved and stretched on each axis until it shows the
same. Many pairs at once as thumbnails, coarse structure first (fine texture fits in many places): 0.6 ms a pair.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.near_duplicates.perceptual_hash import Windows, sampling

_SAMPLES = 20  # of a window, on each axis
_SMOOTHED = (6, 1)  # how often, in each pass: a little, so that the grid of pixels does not matter
_STEPS = 4  # in each pass
_MOST_STEP = 0.03  # of the window's side
_LEAST_SIDE = 0.1  # of a window
_LEAST_GAIN = 0.2  # of the greys; below it there is nothing to go by

Floats = NDArray[Any]


class Aligned(NamedTuple):
    """The windows that fit, [pairs, 4], and how well: correlations -1 to 1, [pairs]."""

    windows: Windows
    correlations: NDArray[np.float32]


def align(ones: Floats, others: Floats, fixed: Windows, windows: Windows) -> Aligned:
    """Fit `windows` of `others` to the `fixed` ones of `ones`: grey thumbnails [pairs, 32, 32], windows [pairs, 4]."""
    wanted = shown = np.empty(0)
    for times in _SMOOTHED:
        one, other = (smooth(each.astype(np.float32), times=times) for each in (ones, others))
        wanted = _shown(one, fixed)
        for _ in range(_STEPS):
            windows = stepped(wanted, _shown(other, windows), windows)
        shown = _shown(other, windows)
    return Aligned(windows, correlations(wanted, shown))


def stepped(wanted: Floats, shown: Floats, windows: Windows) -> Windows:
    """One step nearer: what is wanted and what the windows show, [pairs, side, side], -> windows [pairs, 4]."""
    side = shown.shape[-1]
    place = (np.arange(side, dtype=np.float32) + 0.5) / side - 0.5
    down, across = (side * np.gradient(shown, axis=axis) for axis in (-2, -1))
    terms = [down, across, down * place[:, None], across * place, shown, np.ones_like(shown)]
    matrix = np.stack(terms, axis=-3).reshape(len(shown), 6, -1)
    solved = np.linalg.solve(
        matrix @ matrix.transpose(0, 2, 1) + 1e-3 * np.eye(6, dtype=np.float32),
        matrix @ wanted.reshape(len(shown), -1, 1),
    )[..., 0]
    gain = solved[:, 4:5]
    step = np.where(gain < _LEAST_GAIN, 0, solved[:, :4] / np.maximum(gain, _LEAST_GAIN))
    shift, stretch = np.split(np.clip(step, -_MOST_STEP, _MOST_STEP), 2, axis=1)
    starts, ends = windows[:, :2], windows[:, 2:]
    sides = ends - starts
    low = np.clip(starts + sides * (shift - stretch / 2), 0, 1 - _LEAST_SIDE)
    high = np.clip(ends + sides * (shift + stretch / 2), low + _LEAST_SIDE, 1)
    return np.concatenate([low, high], axis=1).astype(np.float32)


def correlations(one: Floats, other: Floats) -> NDArray[np.float32]:
    """Correlation of each pair, [pairs, side, side, ...], over all channels, each without its mean."""
    one, other = (each - each.mean(axis=(1, 2), keepdims=True) for each in (one, other))
    one, other = (each.reshape(len(each), -1) for each in (one, other))
    return (one * other).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1) + 1e-9)


def smooth(greys: Floats, *, times: int) -> Floats:
    """[..., height, width], by 1/4, 1/2, 1/4 on each axis, so many times."""
    down, across = (_smoothing(side, times) for side in greys.shape[-2:])
    return down @ greys @ across.T


def _shown(greys: Floats, windows: Windows) -> Floats:
    rows, columns = (sampling(windows[:, axis], windows[:, axis + 2], _SAMPLES) for axis in (0, 1))
    return rows @ greys @ columns.transpose(0, 2, 1)


@cache
def _smoothing(side: int, times: int) -> NDArray[np.float32]:
    once = 0.5 * np.eye(side)
    for neighbour in (-1, 1):
        there = np.clip(np.arange(side) + neighbour, 0, side - 1)
        once[np.arange(side), there] += 0.25
    return np.linalg.matrix_power(once, times).astype(np.float32)
