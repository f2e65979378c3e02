"""scikit-learn's handwritten digits: 1,797 grey images of 8x8, inside the wheel, so nothing is downloaded.

(The test part of the UCI set "Optical Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998.)
"""

import importlib.util
from pathlib import Path

import numpy as np

from data_shards.errors import UserError
from data_shards.sources.base import ArrayImages, Source

MAX_VALUE = 16  # each pixel counts the set points in a 4x4 block of the scan
_FILE = "datasets/data/digits.csv.gz"  # what its load_digits reads: 64 pixels and the digit a line


def digits_source() -> Source:
    """All images as split train; values 0..16 are spread over 0..255. Raises UserError without
    scikit-learn.
    """
    found = importlib.util.find_spec("sklearn")  # not imported: that takes a second, half of what packing takes
    file = Path(found.origin or "").parent / _FILE if found else None
    if file is None or not file.is_file():
        raise UserError("digits: this source needs scikit-learn; install it with `pip install scikit-learn`")
    data = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels = np.rint(data[:, :-1].reshape(-1, 8, 8) * (255 / MAX_VALUE)).astype(np.uint8)
    images = ArrayImages(origin="digits", pixels=pixels, labels=data[:, -1])
    return Source(spec="digits", name="digits", classes=tuple("0123456789"), splits={"train": images})
