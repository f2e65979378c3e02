"""Host memory for reading ahead, from counts and sizes alone; `shardvit plan` prints it."""

from __future__ import annotations

PREFETCH = 4  # items of a worker, ready or in progress
STAGES = 2  # page-locked buffers on the way to a GPU: one is filled while the other's copy runs
ALIGNMENT = 256  # bytes, of a tensor in such a buffer
STAGED_TENSORS = 3  # of a batch: pixels, flips, labels


def ahead_bytes(workers: int, *, images: int, image_size: int) -> int:
    """Bytes of pixels that workers read ahead: `PREFETCH` micro-batches of `images` each."""
    return workers * PREFETCH * images * 3 * image_size**2


def staged_bytes(images: int, *, image_size: int) -> int:
    """Page-locked memory of one stream of micro-batches; torch rounds each buffer up to a power of two."""
    one = images * (3 * image_size**2 + 1 + 8) + STAGED_TENSORS * ALIGNMENT  # pixels, flip, one label
    return STAGES * 2 ** (one - 1).bit_length()
