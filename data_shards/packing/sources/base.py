"""Sources: named classes, and per split a set of images, each read as encoded bytes (arrays as PNG).

Listing costs one `stat` per file; images are read by `ImageSet.read` alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.shards.tar_index import IMAGE_EXTENSIONS
from data_shards.text import counted
from data_shards.vocabulary import LabelKind

GZIPPED = (".tar.gz", ".tgz")
SUFFIXES = (".tar", *GZIPPED)  # of archives
ABSENT = -1  # in place of a file's size
_MOST_PROBLEMS = 20

SplitName = Literal["train", "val", "test"]


class ImageSet(Protocol):
    """The images of one split, in an order that depends only on the source.

    `labels` index the source's `classes`: [num_images], or [num_images, most labels] padded with -1. `num_bytes`,
    [num_images], are sizes of files (-1: missing) or pixels. `read` returns an encoded image or raises OSError. `trace`
    says where it is from, unique in the source: `train/cat/0338.jpg`. `stamp` includes the trace and changes with the
    image, as far as that shows without reading it.
    """

    @property
    def labels(self) -> NDArray[np.int64]: ...
    @property
    def num_bytes(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> bytes: ...
    def trace(self, index: int) -> str: ...
    def stamp(self, index: int) -> bytes: ...


@dataclass(frozen=True)
class Source:
    """Named classes and the images of each split.

    `left_out` has (split, trace) of images without a label, which are in none of `splits`. A class without images is a
    mistake in folders, but usual in lists (`empty_classes`).
    """

    spec: str  # finds the source again
    classes: tuple[str, ...]  # names of the labels
    splits: Mapping[SplitName, ImageSet]  # train, then val and test if the source has them
    notes: tuple[str, ...] = ()  # what was left out and why
    left_out: tuple[tuple[SplitName, str], ...] = ()
    kind: LabelKind = "single"  # one label for each image, or any number
    empty_classes: Literal["refuse", "report"] = "refuse"

    def fingerprint(self) -> str:
        """Changes when classes, images, names or (of files) sizes change; files' bytes are not read."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, images in self.splits.items():
            digest.update(f"{split} {len(images)}".encode())
            if self.kind == "multi":
                digest.update(repr(images.labels.shape).encode())
            digest.update(np.ascontiguousarray(images.labels).tobytes())
            if isinstance(images, ArrayImages):
                digest.update(repr((images.origin, images.pixels.shape)).encode())
                digest.update(np.ascontiguousarray(images.pixels).tobytes())
                continue
            for row, size in enumerate(images.num_bytes.tolist()):
                digest.update(f"{images.trace(row)}\0{size}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class ArrayImages:
    """Grey images held in memory as uint8 [num_images, height, width]."""

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

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        return np.full(len(self), self.pixels[0].nbytes, dtype=np.int64)

    def stamp(self, index: int) -> bytes:
        return self.trace(index).encode() + b"\0" + self.pixels[index].tobytes()


@dataclass(frozen=True)
class FileImages:
    """Image files below `root`; `files` are paths relative to it, with forward slashes."""

    root: Path
    files: list[str]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        # A read of a pipe or a device could block forever.
        if self.num_bytes[index] == ABSENT:
            raise OSError("there is no such file, or it is not a plain file")
        with open(f"{self.root}/{self.files[index]}", "rb", buffering=0) as stream:
            return stream.read()

    def trace(self, index: int) -> str:
        return self.files[index]

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        """Sizes of the files; `ABSENT` for what is missing or not a regular file."""
        return self._stats[:, 0]

    def stamp(self, index: int) -> bytes:
        size, modified_ns = self._stats[index].tolist()
        return f"{self.files[index]}\0{size}\0{modified_ns}".encode(errors="surrogateescape")

    @cached_property
    def _stats(self) -> NDArray[np.int64]:
        """[num_images, 2]: size in bytes, mtime in ns."""
        stats = np.full((len(self.files), 2), ABSENT, dtype=np.int64)
        for i, file in enumerate(self.files):
            try:
                found = os.stat(f"{self.root}/{file}")
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                stats[i] = found.st_size, found.st_mtime_ns
        return stats


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one UserError with all problems, if there are any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        shown = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems[:_MOST_PROBLEMS], start=1))
        more = f"; and {len(problems) - _MOST_PROBLEMS:,} more" if len(problems) > _MOST_PROBLEMS else ""
        raise UserError(f"{len(problems):,} problems: {shown}{more}")


def is_image(name: str) -> bool:
    """True for an image's extension on a name that is not hidden."""
    last = name.rpartition("/")[2]
    return last.rpartition(".")[2].lower() in IMAGE_EXTENSIONS and not last.startswith(".")


def left_out_notes(place: Path, others: Sequence[str]) -> list[str]:
    """Notes on files that are not images."""
    if not others:
        return []
    tars = [name for name in others if name.lower().endswith(SUFFIXES)]
    inside = f"; {counted(len(tars), 'tar')} among them not looked into (the first: {tars[0]})" if tars else ""
    return [f"{place}: {counted(len(others), 'file')} left out, not being images (the first: {others[0]}){inside}"]
