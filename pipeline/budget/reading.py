"""What training asks of the disks and the processor cores: images, bytes and decoding a second.

An estimate. The constants are those of one recorded benchmark (launch/bench/records/data.txt: photographs of 107 kB and
0.2 megapixels, cut and resized to 224 px, one core of a Xeon): decoding is taken to grow with the pixels of the image,
and these with its bytes, the rest with the pixels of the result. Other photographs, other processors and stronger
augmentation will differ; `launch.bench.data` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

_BENCH_IMAGE_BYTES, _BENCH_PIXELS = 107_000, 224
_DECODE_MS, _REST_MS = 0.99, 0.36  # of the 1.35 ms of CPU time an image in all


@dataclass(frozen=True)
class Reading:
    """What must be read and decoded for the GPUs not to wait.

    Attributes:
        images_per_second: of all GPUs together.
        bytes_per_second: of the shards, over all nodes; None: their size is not known.
        decode_ms: processor time of one image.
        cores: that decoding keeps busy, over all nodes.
        assumed_image_bytes: of an image on average, where nobody knows them yet; None: they are known.
    """

    images_per_second: float
    bytes_per_second: float | None
    decode_ms: float
    cores: float
    assumed_image_bytes: float | None = None


def reading(images_per_second: float, *, image_bytes: float | None, image_size: int) -> Reading:
    """What so many images a second of `image_bytes` on average ask for; None: not known, and the benchmark's
    photographs are taken, smaller ones for a smaller `image_size`."""
    size = image_bytes
    if size is None:
        size = _BENCH_IMAGE_BYTES * min(1.0, (image_size / _BENCH_PIXELS) ** 2)
    decode_ms = _DECODE_MS * size / _BENCH_IMAGE_BYTES + _REST_MS * (image_size / _BENCH_PIXELS) ** 2
    return Reading(
        images_per_second,
        bytes_per_second=None if image_bytes is None else images_per_second * image_bytes,
        decode_ms=decode_ms,
        cores=images_per_second * decode_ms / 1000,
        assumed_image_bytes=size if image_bytes is None else None,
    )
