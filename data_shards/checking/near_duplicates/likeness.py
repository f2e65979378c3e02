"""Decide whether two images are the same picture, on the area that both show.

A window of one image is fixed; that of the other is moved and stretched on each axis by Gauss-Newton steps, with gain
and offset of the greys, until it shows the same. `align` does so for batches of thumbnails, coarse structure first
(fine texture fits in many places): 0.6 ms a pair. `compare` does so at up to 64 x 64 pixels, in grey if either image
has no colours: 4 ms a pair. It undoes a small change of brightness and contrast, and counts the blocks, of 8 x 8, that
differ by more than encoding and resizing explain: 4 grey levels (8 at full resolution) plus 0.4 of the block's
contrast, root mean square over colours.

    same       at most one block in 64 differs, and `likeness`, the correlation over all colours, is at least 0.94
    unsure     at most an eighth of the blocks differ: something was added, or it is a series of one scene
    different  more: photographs of different things on one floor share the floor

Below 40 pixels a side blocks tell less. There `likeness` must be 0.94, and the detail, without the coarse structure
that all dark things on a bright ground share, must correlate by 0.84 or differ by JPEG's noise alone. Such pictures are
the same if at most a quarter of the blocks differ, else unsure (bounds chosen on CIFAR-10's training images).
"""

from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates.perceptual_hash import Windows, sampling
from shardvit.data_shards.images.crops import Pixels

Floats = NDArray[Any]
Answer = Literal["same", "unsure", "different"]

DECODED_PIXELS = 128  # a side, if the image has as many
_LEAST_LIKENESS, _LEAST_DETAIL = 0.94, 0.84
_MOST_NOISE = 3.0  # grey levels
_SAME_BLOCKS, _UNSURE_BLOCKS, _SAME_BLOCKS_OF_SMALL = 1 / 64, 1 / 8, 1 / 4  # shares of blocks that differ
_SMALL = 40  # pixels of the shared area's shorter side
_MOST_COMPARED, _COMPARED_OF_SMALL = 64, 28  # pixels, on each axis
_BLOCKS, _BLOCKS_OF_SMALL = 8, 7  # on each axis
_MARGINS = 0.08, 0.03  # of the area's sides, in two passes: the first locates the area better
_STEPS = 4  # per pass, at most
_STILL = 5e-4  # shares of the sides; smaller moves end the pass
_LEAST_TOLERANCE, _TOLERANCE, _OF_CONTRAST = 4.0, 8.0, 0.4
_COLOURLESS = 3.0  # grey levels, root mean square
_MOST_GAIN = 1.25
_COARSE = 6  # smoothings that leave the coarse structure
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_SAMPLES = 20  # of a window of a thumbnail, on each axis
_THUMBNAIL_SMOOTHED = (6, 1)  # per pass; at least one, so that the pixel grid does not matter
_MOST_STEP = 0.03  # of the window's side
_LEAST_SIDE = 0.1  # of a window
_LEAST_GAIN = 0.2  # of the greys; below it there is no structure to align


def align(ones: Floats, others: Floats, fixed: Windows, windows: Windows) -> tuple[Windows, NDArray[np.float32]]:
    """Fit `windows` of `others` to `fixed` of `ones` ([pairs, 32, 32], [pairs, 4]); return correlations too."""
    wanted = shown = np.empty(0)
    for times in _THUMBNAIL_SMOOTHED:
        one, other = (smooth(each.astype(np.float32), times=times) for each in (ones, others))
        wanted = _shown_greys(one, fixed)
        for _ in range(_STEPS):
            windows = stepped(wanted, _shown_greys(other, windows), windows)
        shown = _shown_greys(other, windows)
    return windows, correlations(wanted, shown)


def stepped(wanted: Floats, shown: Floats, windows: Windows) -> Windows:
    """Move windows [pairs, 4] one step, from what is `shown` towards `wanted`, [pairs, side, side]."""
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
    """Correlate each pair, [pairs, side, side, ...], over all channels, each less its mean."""
    one, other = (each - each.mean(axis=(1, 2), keepdims=True) for each in (one, other))
    one, other = (each.reshape(len(each), -1) for each in (one, other))
    return (one * other).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1) + 1e-9)


def smooth(greys: Floats, *, times: int) -> Floats:
    """Smooth [..., height, width] by 1/4, 1/2, 1/4 on each axis, `times` times."""
    down, across = (_smoothing(side, times) for side in greys.shape[-2:])
    return down @ greys @ across.T


def _shown_greys(greys: Floats, windows: Windows) -> Floats:
    rows, columns = (sampling(windows[:, axis], windows[:, axis + 2], _SAMPLES) for axis in (0, 1))
    return rows @ greys @ columns.transpose(0, 2, 1)


@cache
def _smoothing(side: int, times: int) -> NDArray[np.float32]:
    once = 0.5 * np.eye(side)
    for neighbour in (-1, 1):
        there = np.clip(np.arange(side) + neighbour, 0, side - 1)
        once[np.arange(side), there] += 0.25
    return np.linalg.matrix_power(once, times).astype(np.float32)


class Likeness(NamedTuple):
    """Similarity of two images where they fit best; correlations are -1 to 1."""

    likeness: float
    different_blocks: float  # a share
    detail: float  # correlation without coarse structure
    difference: float  # root mean square in the detail, grey levels
    is_small: bool

    @property
    def answer(self) -> Answer:
        is_like = self.likeness >= _LEAST_LIKENESS
        if self.is_small:
            is_like = is_like and (self.detail >= _LEAST_DETAIL or self.difference <= _MOST_NOISE)
        if is_like and self.different_blocks <= (_SAME_BLOCKS_OF_SMALL if self.is_small else _SAME_BLOCKS):
            return "same"
        is_unsure = is_like if self.is_small else self.different_blocks <= _UNSURE_BLOCKS
        return "unsure" if is_unsure else "different"


def compare(one: Pixels, other: Pixels, *, here: Windows, there: Windows) -> Likeness:
    """Compare two images, uint8 [height, width, 3], whose windows `here` and `there` show about the same."""
    if np.prod(here[2:] - here[:2]) < np.prod(there[2:] - there[:2]):  # fix the window that both images show whole
        one, other, here, there = other, one, there, here
    wanted = shown = np.empty(0)
    pixels = compared = 0
    for margin in _MARGINS:
        here, there = _common(here, there, margin)
        pixels = min(
            int(((window[2:] - window[:2]) * each.shape[:2]).min()) for window, each in ((here, one), (there, other))
        )
        compared = min(_MOST_COMPARED, pixels // _BLOCKS * _BLOCKS) if pixels >= _SMALL else _COMPARED_OF_SMALL
        wanted, shown = _shown(one, here, compared), _shown(other, there, compared)
        for _ in range(_STEPS):
            before, there = there, stepped((wanted @ _LUMA)[None], (shown @ _LUMA)[None], there[None])[0]
            shown = _shown(other, there, compared)
            if np.abs(there - before).max() < _STILL:
                break
    is_small = pixels < _SMALL
    if min(_colour(wanted), _colour(shown)) < _COLOURLESS:
        wanted, shown = ((each @ _LUMA)[..., None] for each in (wanted, shown))
    tolerance = max(_LEAST_TOLERANCE, _TOLERANCE * compared / pixels)
    num_blocks = _BLOCKS_OF_SMALL if is_small else _BLOCKS
    detail, other_detail = (each - _smoothed(each, times=_COARSE) for each in (wanted, shown))
    return Likeness(
        likeness=float(correlations(wanted[None], shown[None])[0]),
        different_blocks=_different_blocks(wanted, shown, num_blocks, tolerance=tolerance),
        detail=float(correlations(detail[None], other_detail[None])[0]),
        difference=float(np.sqrt(np.mean((detail - other_detail) ** 2))),
        is_small=is_small,
    )


def _common(here: Windows, there: Windows, margin: float) -> tuple[Windows, Windows]:
    """Extend the windows to all that both images show, less `margin`."""
    starts, sides = here[:2], here[2:] - here[:2]
    their_starts, their_sides = there[:2], there[2:] - there[:2]
    low = np.maximum(-starts / sides, -their_starts / their_sides)  # in sides of the windows
    high = np.minimum((1 - starts) / sides, (1 - their_starts) / their_sides)
    low, high = low + margin * (high - low), high - margin * (high - low)
    here, there = (
        np.concatenate([first + low * side, first + high * side]).astype(np.float32)
        for first, side in ((starts, sides), (their_starts, their_sides))
    )
    return here, there


def _different_blocks(one: Floats, other: Floats, num_blocks: int, *, tolerance: float) -> float:
    greys, other_greys = (each.mean(axis=-1) if each.shape[-1] == 1 else each @ _LUMA for each in (one, other))
    gain = np.sqrt((greys.var() + 1) / (other_greys.var() + 1))
    gain = np.clip(gain, 1 / _MOST_GAIN, _MOST_GAIN)
    difference = _in_blocks((one - greys.mean() - gain * (other - other_greys.mean())) ** 2, num_blocks)
    contrasts = [_in_blocks(each**2, num_blocks) - _in_blocks(each, num_blocks) ** 2 for each in (one, other)]
    contrast = np.sqrt(np.maximum(*contrasts).clip(0).mean(axis=-1))
    return float(np.mean(np.sqrt(difference.mean(axis=-1)) > tolerance + _OF_CONTRAST * contrast))


def _in_blocks(pixels: Floats, num_blocks: int) -> Floats:
    """Average blocks: [side, side, channels] -> [blocks, blocks, channels]."""
    side = len(pixels) // num_blocks
    return pixels.reshape(num_blocks, side, num_blocks, side, -1).mean(axis=(1, 3))


def _colour(pixels: Floats) -> float:
    return float(np.sqrt(np.mean((pixels - pixels.mean(axis=-1, keepdims=True)) ** 2)))


def _shown(pixels: Pixels, window: Windows, side: int) -> Floats:
    """Crop a window to float [side, side, 3], slightly smoothed, so that the pixel grid does not matter."""
    from PIL import Image

    height, width = pixels.shape[:2]
    top, left, bottom, right = window.tolist()
    box = left * width, top * height, right * width, bottom * height
    shown = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC, box=box)
    return _smoothed(np.asarray(shown, np.float32), times=1)


def _smoothed(pixels: Floats, *, times: int) -> Floats:
    return smooth(pixels.transpose(2, 0, 1), times=times).transpose(1, 2, 0)
