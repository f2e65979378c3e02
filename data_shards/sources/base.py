"""What a source is: named classes, and per split a set of images that are read one at a time.

Nothing is read before `ImageSet.read`, apart from the listing (folders) or the array (IDX, digits). Images
are handed on as encoded bytes: a file's own bytes unchanged, an array's as PNG (lossless).
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "val"]


class ImageSet(Protocol):
    """The images of one split, in an order that depends on nothing but the source."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Shape (num_images,): indices into the source's `classes`."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """One encoded image. Raises OSError if it cannot be read."""
        ...

    def trace(self, index: int) -> str:
        """Where the image is from, relative to the source, such as `train/cat/0338.jpg`; unique in the
        source.
        """
        ...

    def update_digest(self, digest: "hashlib._Hash") -> None:
        """Feed what identifies the content, without reading image files."""
        ...


@dataclass(frozen=True)
class Source:
    """`spec` finds the source again, `name` becomes part of file names, `notes` says what was left out and
    why.
    """

    spec: str
    name: str
    classes: tuple[str, ...]
    splits: Mapping[SplitName, ImageSet]
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Changes when classes, images, names or (of files) sizes change; of files the bytes are not read."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, images in self.splits.items():
            digest.update(f"{split} {len(images)}".encode())
            digest.update(np.ascontiguousarray(images.labels).tobytes())
            images.update_digest(digest)
        return digest.hexdigest()


@dataclass(frozen=True)
class ArrayImages:
    """Grey images held in memory as uint8 of shape (num_images, height, width)."""

    origin: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> bytes:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(self.pixels[index]).save(buffer, format="PNG")
        return buffer.getvalue()

    def trace(self, index: int) -> str:
        return f"{self.origin}/{index}"

    def update_digest(self, digest: "hashlib._Hash") -> None:
        digest.update(repr((self.origin, self.pixels.shape)).encode())
        digest.update(np.ascontiguousarray(self.pixels).tobytes())
