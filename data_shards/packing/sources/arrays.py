"""Grey images in memory: scikit-learn's digits, and MNIST's format, four IDX files, plain or gzipped.

The digits are 1,797 grey images of 8x8 in scikit-learn's wheel (the test part of the UCI set "Optical Recognition of
Handwritten Digits", Alpaydin and Kaynak, 1998). Fashion-MNIST has MNIST's files; its class names are used if the folder
has its name. Other IDX sets (more classes, other than 8-bit grey) are refused.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.sources.base import ImageSet, Source, SplitName, array_images

_DIGITS_FILE = "datasets/data/digits.csv.gz"  # what its load_digits reads: 64 pixels and the digit a line
_DIGITS_MOST = 16  # each pixel counts the set points in a 4x4 block of the scan

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts them
DIGIT_CLASSES = tuple("0123456789")
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")  # README of zalandoresearch/fashion-mnist
FASHION_CLASSES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_STEMS: dict[SplitName, str] = {"train": "train", "val": "t10k"}
_KINDS = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}
# Both spellings occur: MNIST's own server used "-", several unpackers write ".".
IDX_NAMES = frozenset(
    f"{s}-{kind}{mark}{kinds}" for s in _STEMS.values() for kind, kinds in _KINDS.items() for mark in "-."
)


def digits_source() -> Source:
    """All images as split train; values 0..16 are spread over 0..255. Raises UserError without scikit-learn."""
    found = importlib.util.find_spec("sklearn")  # not imported: that takes a second, half of what packing takes
    file = Path(found.origin or "").parent / _DIGITS_FILE if found else None
    if file is None or not file.is_file():
        raise UserError("digits: this source needs scikit-learn; install it with `pip install scikit-learn`")
    data = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels = np.rint(data[:, :-1].reshape(-1, 8, 8) * (255 / _DIGITS_MOST)).astype(np.uint8)
    return Source("digits", DIGIT_CLASSES, {"train": array_images("digits", pixels, data[:, -1])})


def fashion_mnist_source() -> Source:
    """Fashion-MNIST where Debian installs it. Raises UserError, saying how to install it, if it is missing."""
    if not DEBIAN_FOLDER.is_dir():
        raise UserError(
            f"fashion-mnist: {DEBIAN_FOLDER} is not there; install it with "
            f"`apt-get install dataset-fashion-mnist`, or give the folder that holds its four IDX files"
        )
    return idx_source(DEBIAN_FOLDER)


def idx_source(root: Path) -> Source:
    """The four files in `root`; t10k becomes split val. Raises UserError if one is missing or broken."""
    folder = root.resolve()
    name = folder.parent.name if folder.name == "raw" else folder.name  # torchvision unpacks into FashionMNIST/raw
    classes = FASHION_CLASSES if "fashion" in name.lower() else DIGIT_CLASSES
    splits: dict[SplitName, ImageSet] = {split: _read_split(root, stem, len(classes)) for split, stem in _STEMS.items()}
    return Source(spec=str(folder), classes=classes, splits=splits)


def _read_split(root: Path, stem: str, num_classes: int) -> ImageSet:
    image_path, label_path = _find(root, stem, "images"), _find(root, stem, "labels")
    pixels, labels = _read_idx(image_path, num_dims=3), _read_idx(label_path, num_dims=1)
    if 0 in pixels.shape:
        raise UserError(f"{image_path}: there is no image in it (shape {pixels.shape})")
    if len(pixels) != len(labels):
        raise UserError(f"{label_path}: {len(labels)} labels for the {len(pixels)} images of {image_path.name}")
    if labels.max() >= num_classes:
        raise UserError(f"{label_path}: the label {labels.max()} is not one of the {num_classes} classes 0..9")
    return array_images(f"{stem}-images", pixels, labels.astype(np.int64))


def _find(root: Path, stem: str, kind: str) -> Path:
    for mark in "-.":
        for suffix in ("", ".gz"):
            path = root / f"{stem}-{kind}{mark}{_KINDS[kind]}{suffix}"
            if path.is_file():
                return path
    raise UserError(
        f"{root}: {stem}-{kind}-{_KINDS[kind]} (or the same with .gz) is missing; all four files are needed"
    )


def _read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """The array of one file. IDX: bytes 0, 0, type (8: uint8), number of dims; each dim as big-endian uint32; data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: the file cannot be read ({error}); fetch it again") from None
    magic = bytes((0, 0, 8, num_dims))
    start = 4 + 4 * num_dims
    if data[:4] != magic:
        raise UserError(f"{path}: it starts with {data[:4].hex(' ')}, an IDX file of this kind with {magic.hex(' ')}")
    if len(data) < start:
        raise UserError(f"{path}: the file ends within its header; fetch it again")
    shape = [int(n) for n in np.frombuffer(data, dtype=">u4", count=num_dims, offset=4)]
    expected = start + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise UserError(f"{path}: {len(data)} bytes where its header says {expected}; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)
