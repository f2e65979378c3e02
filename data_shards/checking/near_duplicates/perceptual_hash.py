"""Hash windows of images perceptually, and index the hashes.

As in pHash, a window of a grey 32 x 32 thumbnail goes through a discrete cosine transform; the signs of the 128 lowest
frequencies but the mean are the bits, whatever the contrast and brightness. A photograph, re-encoded or resized, keeps
all but 2 of the first 64 bits; a window 3 % of its side too far down and right loses 11, one 6 % too wide 6, hence the
windows' spacing. Mirror images need no pixels: frequencies that are odd from left to right change sign.

To find crops, four windows of the smaller image (`WHOLE`, 88 % of its sides) are searched for among 68 windows of the
larger one (`PARTS`): crops to 100, 92, 84, 77 or 70 % of each side at any place, and the centre square of usual shapes,
whole or its inner 87.5 %. An image with a border counts as the larger one. Of 88 photographs, 97.7 % or more, by edit,
have a window within 10 of the first 64 bits.

The index is multi-index hashing (Norouzi, Punjani and Fleet, 2012) over four bands of 16 bits in the first word. Words
that differ in at most 7 bits differ in at most one bit of some band, so 17 values per band are looked up; many that
differ in 8 to 10 bits are found too. A hash takes 2 us and 16 bytes, 56 more in the index; a query takes 2,176
comparisons among a million evenly spread hashes (photographs: twice as many).
"""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]
Windows = NDArray[np.float32]  # [..., 4]: top, left, bottom, right, in shares of the sides

THUMBNAIL_PIXELS = 32  # a side, whatever the image's shape
NUM_WORDS = 2
_INNER = 0.88  # share of the sides that a window of `WHOLE` shows
_OFF_CENTRE = 0.03  # offset of those windows from the centre, each way
_CROPS = (1.0, 0.92, 0.84, 0.77, 0.7)  # shares of each side
_MIDDLES = (0.96, 0.88, 0.8, 0.735)  # shares of each side, between those: centre crops, and insides of borders
_SQUARES = (0.76, 0.69, 0.62, 0.56)  # the centre square as a share of the longer side: 4:3, 3:2, 16:10, 16:9
_OF_SQUARES = (1.0, 0.875)  # 224 of 256 pixels, as many evaluations take
_FREQUENCIES = 16  # per axis; they contain the 128 lowest by sum
_SAMPLES = 32  # of the window, on each axis
_BITS = 64 * NUM_WORDS
_BANDS = 4
_VALUES = 1 << 16  # of a band
# Masks for a band's value and all values at one bit from it.
_PROBES = np.array([0, *(1 << bit for bit in range(16))], np.uint16)
MOST_FIRST = 10  # bits of the first word; up to 7 are found for certain
MOST_BITS = 36  # of both words; a smooth image's second word is noise
_MOST_AT_ONCE = 1 << 22  # comparisons


def thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize greys, uint8 [height, width], to 32 x 32 pixels, ignoring the shape."""
    from PIL import Image

    # Pillow's bilinear filter averages when reducing; bicubic enlarges closer to the original.
    is_large = min(pixels.shape[:2]) >= THUMBNAIL_PIXELS
    resampling = Image.Resampling.BILINEAR if is_large else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), resampling))


def sampling(low: Any, high: Any, samples: int) -> NDArray[np.float32]:
    """Interpolate windows `low` to `high` (shares of an axis) linearly, edges repeated: float [..., samples, 32]."""
    low, high = np.asarray(low, np.float32)[..., None], np.asarray(high, np.float32)[..., None]
    shares = (np.arange(samples, dtype=np.float32) + 0.5) / samples
    places = np.clip((low + (high - low) * shares) * THUMBNAIL_PIXELS - 0.5, 0, THUMBNAIL_PIXELS - 1)
    distances = np.abs(places[..., None] - np.arange(THUMBNAIL_PIXELS, dtype=np.float32))
    return np.maximum(0, 1 - distances)


def hash_windows(thumbnails: NDArray[Any], windows: Windows) -> Words:
    """Hash each window of each grey thumbnail: [images, 32, 32], [windows, 4] -> uint64 [images, windows, 2]."""
    greys = thumbnails.astype(np.float32)
    axes = [tuple(map(tuple, window.reshape(2, 2).T.tolist())) for window in windows]  # (rows, columns) of each
    rows = {vertical: _transform(*vertical) @ greys for vertical in {vertical for vertical, _ in axes}}
    return np.stack([_signs(rows[vertical] @ _transform(*horizontal).T) for vertical, horizontal in axes], axis=1)


def mirrored(hashes: Words) -> Words:
    """Derive the mirror images' hashes, uint64 [..., 2]."""
    return hashes ^ _mirror_mask()


def distances(one: Words, other: Words) -> NDArray[np.uint8]:
    """Count differing bits: uint64 [..., words], broadcast -> uint8 [...]."""
    return np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.uint8)


def _axis_places(share: float) -> list[float]:
    """Place crops of `share` of a side so that any such crop has one within 3 % of its side."""
    step, room = share * _OFF_CENTRE, 1 - share
    number = max(1, int(np.ceil((room + 2 * step) / (4 * step) - 1e-6)))
    return np.linspace(step, max(step, room - step), number).tolist()


def _window(top: float, left: float, height: float, width: float) -> tuple[float, ...]:
    margin = (1 - _INNER) / 2
    inset_top, inset_left = top + margin * height, left + margin * width
    return inset_top, inset_left, inset_top + _INNER * height, inset_left + _INNER * width


def _parts() -> Windows:
    places = [(share, _axis_places(share)) for share in _CROPS]
    found = [_window(*place, share, share) for share, starts in places for place in product(starts, starts)]
    middles = [(share, share) for share in _MIDDLES]
    for of_square, square in product(_OF_SQUARES, _SQUARES):
        middles += [(of_square, of_square * square), (of_square * square, of_square)]
    for height, width in middles:
        top, left = ((1 - side) / 2 + side * _OFF_CENTRE for side in (height, width))
        found.append(_window(top, left, height, width))
    return np.array(found, np.float32)


PARTS: Windows = _parts()
# Crops to 100 and 92 % anywhere, to 96 and 88 % in the middle, and centre squares, whole or their insides
MILD_PARTS: Windows = PARTS[[*range(5), 48, 49, *range(52, 60)]]
WHOLE: Windows = np.array(
    [_window(top, left, 1, 1) for top in (_OFF_CENTRE, -_OFF_CENTRE) for left in (_OFF_CENTRE, -_OFF_CENTRE)],
    np.float32,
)


@cache
def _transform(low: float, high: float) -> NDArray[np.float32]:
    """Cosine transform of a part of one axis, with interpolated pixels: float [16, 32]."""
    share = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    cosines = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * share)
    return (cosines @ sampling(low, high, _SAMPLES)).astype(np.float32)


@cache
def _chosen() -> NDArray[np.int64]:
    """Row and column of each bit's frequency, int64 [128, 2], spread so that no band has all the (similar) low ones."""
    pairs = [(y, x) for y, x in product(range(_FREQUENCIES), repeat=2) if y + x]
    pairs.sort(key=lambda pair: (sum(pair), abs(pair[0] - pair[1]), pair))
    low, high = pairs[:64], pairs[64:_BITS]
    return np.array([low[start::4] for start in range(4)] + [high[start::4] for start in range(4)]).reshape(-1, 2)


def _signs(transformed: NDArray[Any]) -> Words:
    rows, columns = _chosen().T
    bits = transformed[..., rows, columns] > 0
    return np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view(np.uint64)


@cache
def _mirror_mask() -> Words:
    return np.packbits(_chosen()[:, 1] % 2 == 1, bitorder="little").view(np.uint64)


class Near(NamedTuple):
    """Queries and hashes near them, by number, and how many bits differ; pairs may repeat."""

    queries: Int64s
    hashes: Int64s
    distances: NDArray[np.uint8]


class HashIndex:
    """Multi-index of `hashes`, uint64 [hashes, 2]."""

    def __init__(self, hashes: Words) -> None:
        self._second = np.ascontiguousarray(hashes[:, 1])
        bands = np.ascontiguousarray(hashes[:, 0]).view(np.uint16).reshape(-1, _BANDS)
        self._orders, self._firsts, self._starts = [], [], []
        for band in bands.T:
            order = np.argsort(band, kind="stable").astype(np.uint32)
            self._orders.append(order)
            self._firsts.append(hashes[order, 0])
            self._starts.append(np.append(0, np.cumsum(np.bincount(band, minlength=_VALUES))))

    def near(self, queries: Words) -> Near:
        """Find hashes within `MOST_FIRST` and `MOST_BITS` of each of `queries`, uint64 [queries, 2]."""
        found = [self._near_in_band(queries, band, probe) for band in range(_BANDS) for probe in range(len(_PROBES))]
        return Near(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _near_in_band(self, queries: Words, band: int, probe: int) -> Near:
        values = (queries[:, 0] >> np.uint64(16 * band)).astype(np.uint16) ^ _PROBES[probe]
        starts, stops = self._starts[band][values], self._starts[band][values + np.int64(1)]
        counts = stops - starts
        ends = np.cumsum(counts)
        found: list[Near] = []
        done = 0
        while done < len(queries):
            # as many queries as `_MOST_AT_ONCE` comparisons allow
            before = ends[done - 1] if done else 0
            until = max(done + 1, int(np.searchsorted(ends, before + _MOST_AT_ONCE, side="right")))
            part = slice(done, until)
            rows = np.repeat(np.arange(done, until), counts[part])
            places = expand(starts[part], counts[part])
            is_near = np.bitwise_count(self._firsts[band][places] ^ queries[rows, 0]) <= MOST_FIRST
            rows, places = rows[is_near], places[is_near]
            hashes = self._orders[band][places].astype(np.int64)
            both = np.stack([self._firsts[band][places], self._second[hashes]], axis=-1)
            bits = distances(both, queries[rows])
            is_near = bits <= MOST_BITS
            found.append(Near(rows[is_near], hashes[is_near], bits[is_near]))
            done = until
        return Near(*(np.concatenate(column) for column in zip(*found, strict=True))) if found else _NONE


def expand(starts: Int64s, counts: Int64s) -> Int64s:
    """Concatenate ranges: `counts[i]` numbers from `starts[i]` on, for each i."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


_NONE = Near(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
