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
    """

    images_per_second: float
    bytes_per_second: float | None
    decode_ms: float | None
    cores: float | None


def reading(images_per_second: float, *, image_bytes: float | None, image_size: int) -> Reading:
    """What so many images a second of `image_bytes` on average ask for; None: unknown."""
    if image_bytes is None:
        return Reading(images_per_second, None, None, None)
    decode_ms = _DECODE_MS * image_bytes / _BENCH_IMAGE_BYTES + _REST_MS * (image_size / _BENCH_PIXELS) ** 2
    return Reading(images_per_second, images_per_second * image_bytes, decode_ms, images_per_second * decode_ms / 1000)
