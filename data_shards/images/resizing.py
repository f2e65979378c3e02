"""Resize uint8 pixels to uint8 with five kernels.

    bilinear, bicubic; antialiased   torch's uint8 kernels: 57 dB from a float reference, 73 to 77 dB from Pillow
    bilinear; not antialiased        Google's `tf.image.resize`, by torch's kernel: within one level of TensorFlow's
                                     result rounded, 58 dB from the floats that vision_transformer keeps
    the same, cast                   as big_vision, which truncates and so darkens pixels by half a level: exactly
                                     TensorFlow's
    area                             big_vision's `resize_small`: the average over the area of each output pixel,
                                     truncated: exactly TensorFlow's

Compared with TensorFlow 2.21's own: `launch/bench/records/google_path.txt`. Cost: 0.05 to 0.12 ms for a training crop
of 224 pixels from an ImageNet photograph; in numpy, cast 0.5 ms and area 10 ms.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.vocabulary import Antialias, CropInterpolation


def resize(
    image: Pixels,
    *,
    height: int,
    width: int,
    interpolation: CropInterpolation = "bilinear",
    antialias: Antialias = "antialiased",
    into: Pixels | None = None,
) -> Pixels:
    """Resize uint8 or float32 [H, W, C] to [height, width, C], in `into` if given; may return the image itself.

    `antialias` is for bilinear: leave it at its default for others. Pixel centres are at halves; the border repeats.
    """
    if image.shape[:2] == (height, width):
        return placed(image, into)
    if antialias == "cast":
        return placed(_bilinear_cast(image, height=height, width=width), into)
    if interpolation == "area":
        return placed(_area_average(image, height=height, width=width), into)
    if into is None:
        into = np.empty((height, width, image.shape[2]), dtype=image.dtype)
    assert antialias == "antialiased" or interpolation == "bilinear"
    kernel, from_numpy = _torch_kernel(interpolation, antialias)
    source, target = _channels_last(np.ascontiguousarray(image)), _channels_last(into)
    kernel(from_numpy(source), (height, width), False, None, None, out=from_numpy(target))
    return into


@cache
def _torch_kernel(interpolation: CropInterpolation, antialias: Antialias) -> tuple[Callable[..., Any], ...]:
    """Return the kernel, as torch.nn.functional.interpolate calls it but into given memory, and torch.from_numpy."""
    import torch

    name = f"_upsample_{interpolation}2d_aa" if antialias == "antialiased" else "upsample_bilinear2d"
    # By torch.ops a call takes 5 µs more.
    return getattr(torch._C._nn, name), torch.from_numpy  # pyright: ignore[reportAttributeAccessIssue]


def placed(pixels: Pixels, into: Pixels | None) -> Pixels:
    """Return contiguous pixels, copied to `into` if given."""
    if into is None:
        return np.ascontiguousarray(pixels)
    into[...] = pixels
    return into


def _channels_last(image: Pixels) -> Pixels:
    """View [h, w, c] as [1, c, h, w], with the strides that torch resizes 2 to 4 times faster."""
    # [None] would give the new axis stride 0. Each operation costs five times as much between two decodings, which
    # empty the processor's caches, so there are few, and numpy's.
    return image.reshape(1, *image.shape).transpose(0, 3, 1, 2)


def _bilinear_cast(image: Pixels, *, height: int, width: int) -> Pixels:
    """Resize across, then down, in float32 and TensorFlow's form, low + share * (high - low): flat areas stay flat."""
    left, right, across = _neighbours(image.shape[1], width)
    top, bottom, down = _neighbours(image.shape[0], height)
    rows, place = np.unique(np.concatenate([top, bottom]), return_inverse=True)
    used = image.take(rows, axis=0)
    low, high = (used.take(at, axis=1).reshape(len(rows), -1).astype(np.float32) for at in (left, right))
    low += (high - low) * np.repeat(across, image.shape[2])
    low, high = low.take(place[:height], axis=0), low.take(place[height:], axis=0)
    low += (high - low) * down[:, None]
    return low.astype(image.dtype).reshape(height, width, -1)


def _neighbours(length: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Find the pixels before and after the centre of each of `size` equal spans of `length`, and its share between."""
    half = np.float32(0.5)
    at = (np.arange(size, dtype=np.float32) + half) * (np.float32(length) / np.float32(size)) - half
    before, after = np.floor(at), np.ceil(at)
    return before.clip(0).astype(np.int64), after.clip(max=length - 1).astype(np.int64), at - before


def _area_average(image: Pixels, *, height: int, width: int) -> Pixels:
    """Average each output pixel's area, in TensorFlow's order of float32 sums so that whole numbers truncate alike."""
    columns, column_share = _spans(image.shape[1], width)
    rows, row_share = _spans(image.shape[0], height)
    across = np.zeros((image.shape[0], width, image.shape[2]), dtype=np.float32)
    for position, weight in columns:
        across += image[:, position] * weight[None, :, None]
    both = np.zeros((height, width, image.shape[2]), dtype=np.float32)
    for position, weight in rows:
        both += across[position] * weight[:, None, None]
    return (both * (np.float32(1) / (row_share * column_share))).astype(image.dtype)


def _spans(length: int, size: int) -> tuple[list[tuple[NDArray[np.int64], NDArray[np.float32]]], np.float32]:
    """List the n-th pixel of each of `size` equal spans of `length` and its part inside; return a span's length too."""
    one, share = np.float32(1), np.float32(length) / np.float32(size)
    low = np.arange(size, dtype=np.float32) * share
    high = np.arange(1, size + 1, dtype=np.float32) * share
    start, end = np.floor(low).astype(np.int64), np.ceil(high).astype(np.int64)
    touched: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    for number in range(int((end - start).max())):
        position = start + number
        at = position.astype(np.float32)
        begins, ends = at < low, at + one > high
        weight = np.where(begins, np.where(ends, share, at + one - low), np.where(ends, high - at, one))
        touched.append((np.minimum(position, length - 1), np.where(position < end, weight, 0).astype(np.float32)))
    return touched, share
