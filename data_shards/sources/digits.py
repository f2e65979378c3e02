"""scikit-learn's handwritten digits: 1,797 grey images of 8x8, inside the wheel, so nothing is downloaded.

(The test part of the UCI set "Optical Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998.)
"""

from typing import Any

import numpy as np

from data_shards.errors import UserError
from data_shards.sources.base import ArrayImages, Source

MAX_VALUE = 16  # each pixel counts the set points in a 4x4 block of the scan


def digits_source() -> Source:
    """All images as split train; values 0..16 are spread over 0..255. Raises UserError without
    scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("digits: this source needs scikit-learn; install it with `pip install scikit-learn`") from None
    data: Any = load_digits()  # a Bunch; its stubs are of no use
    pixels = np.rint(data.images * (255 / MAX_VALUE)).astype(np.uint8)
    images = ArrayImages(origin="digits", pixels=pixels, labels=data.target.astype(np.int64))
    return Source(spec="digits", name="digits", classes=tuple("0123456789"), splits={"train": images})
