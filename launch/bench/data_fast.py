"""Our decode and training transform, for ours and for the peers that are given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from data_shards.images.crops import DRAWS_PER_SAMPLE
from data_shards.images.decode import read_image
from data_shards.images.transforms import TrainTransform
from launch.bench.data_methods import CROP_AREA, PIXELS

OURS = TrainTransform(PIXELS, crop_area=CROP_AREA)


def fast_transform() -> Callable[[bytes], Any]:
    """Bytes of a JPEG -> torch uint8 [224, 224, 3], with random numbers of its own."""
    import torch

    rng = np.random.default_rng()

    def transform(content: bytes) -> torch.Tensor:
        pixels, _ = OURS(read_image(content), draws=rng.random(DRAWS_PER_SAMPLE))
        return torch.from_numpy(pixels)

    return transform
