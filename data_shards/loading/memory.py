"""Host memory for reading ahead, from counts and sizes alone; `shardvit plan` prints it."""

# Images decoded in one call. More gain little, and their pixels leave the processor's caches before they are resized.
TOGETHER = 16
PREFETCH = 4  # items per worker, ready or in progress
STAGES = 2  # page-locked buffers on the way to a GPU: one fills while the other is copied


def ahead_bytes(workers: int, *, images: int, image_size: int, pixel_bytes: int = 3) -> int:
    """Bytes of pixels that workers read ahead: `PREFETCH` micro-batches of `images` each."""
    return workers * PREFETCH * images * pixel_bytes * image_size**2


def staged_bytes(images: int, *, image_size: int, pixel_bytes: int = 3) -> int:
    """Page-locked memory for one stream of micro-batches; torch rounds each buffer up to a power of two."""
    tensors = (images * pixel_bytes * image_size**2, images, 8 * images)  # bytes of pixels, flips, one label each
    return STAGES * sum(2 ** (num_bytes - 1).bit_length() for num_bytes in tensors)
