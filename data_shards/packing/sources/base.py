"""Sources: named classes, and the encoded images of each split (arrays become PNG).

Listing costs a `scandir` per folder and a `stat` per image; only `read` opens a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.located import LocatedFiles, array_files
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.tar_index import ARRAY_EXTENSION, IMAGE_EXTENSIONS
from shardvit.data_shards.text import counted
from shardvit.data_shards.vocabulary import LabelKind

GZIPPED = (".tar.gz", ".tgz")
SUFFIXES = (".tar", *GZIPPED)  # of archives
_MOST_PROBLEMS = 20
_PIECE = 1 << 16  # names at a time

SplitName = Literal["train", "val", "test"]
Unfit = Literal["refuse", "skip"]  # what cannot be used
SPLITS: dict[str, SplitName] = {"train": "train", "val": "val", "validation": "val", "test": "test"}  # by folder
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class ImageSet:
    """Images of one split: `rows` of `files`, in an order that depends only on the source.

    `labels` index the source's classes: [num_images], or [num_images, most labels] padded with -1.
    """

    files: LocatedFiles
    rows: Int64s
    labels: Int64s

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Int64s, labels: Int64s | None = None) -> ImageSet:
        return ImageSet(self.files, self.rows[indices], self.labels[indices] if labels is None else labels)

    def read(self, index: int) -> bytes:
        return self.files.read(int(self.rows[index]))

    def names(self, indices: Int64s | None = None) -> Iterator[Texts]:
        """Yield traces in pieces, of all images or some."""
        rows = self.rows if indices is None else indices
        for start in range(0, len(rows), _PIECE):
            piece = rows[start : start + _PIECE]
            yield self.files.names.take(piece if indices is None else self.rows[piece])

    def trace(self, index: int) -> str:
        """Return the image's place, unique in the source: `train/cat/0338.jpg`."""
        return self.files.names[int(self.rows[index])]

    @property
    def stamps(self) -> NDArray[np.uint64]:
        return self.files.stamps[self.rows]

    @property
    def num_bytes(self) -> Int64s:
        return self.files.sizes[self.rows]


class LeftOut(NamedTuple):
    """An image, row or sample that is not in `Source.splits`, or a tar that breaks off."""

    path: str  # of a row, its table's
    reason: str = "is not in a class folder"
    split: SplitName = "train"
    row: int | None = None

    def __str__(self) -> str:
        return f"{self.path}{'' if self.row is None else f' row {self.row}'} {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Format for unreadable.jsonl."""
        return {"label": None} | {name: value for name, value in self._asdict().items() if value is not None}


@dataclass(frozen=True)
class Source:
    """Named classes and the images of each split."""

    spec: str  # reopens the source
    classes: tuple[str, ...]  # names of the labels
    splits: Mapping[SplitName, ImageSet]  # train, then val and test if the source has them
    notes: tuple[str, ...] = ()  # what was left out and why
    left_out: tuple[LeftOut, ...] = ()
    kind: LabelKind = "single"  # one label an image, or any number
    empty_classes: Literal["refuse", "report"] = "refuse"  # a mistake in folders, but usual in lists

    @property
    def num_images(self) -> int:
        return sum(map(len, self.splits.values()))

    def fingerprint(self) -> str:
        """Hash classes, labels, names and sizes (of arrays: pixels); reads no file."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, images in self.splits.items():
            digest.update(f"{split} {len(images)}".encode())
            if self.kind == "multi":
                digest.update(repr(images.labels.shape).encode())
            digest.update(np.ascontiguousarray(images.labels).tobytes())
            if (pixels := images.files.containers[0].pixels) is not None:
                digest.update(repr((images.files.path, pixels.shape)).encode())
                digest.update(np.ascontiguousarray(pixels).tobytes())
                continue
            sizes = iter(images.num_bytes)
            for name in chain.from_iterable(images.names()):
                digest.update(f"{name}\0{next(sizes)}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()


def published_source(path: Path, classes: Iterable[str], splits: Mapping[SplitName, ImageSet], *, title: str) -> Source:
    """Make the source of a recognised set; it may be partial, with no images of some classes."""
    note = f"{path}: recognised as {title}"
    return Source(str(path.resolve()), tuple(classes), splits, notes=(note,), empty_classes="report")


def array_images(origin: str, pixels: NDArray[np.uint8], labels: Int64s) -> ImageSet:
    """Wrap all images of an array; `origin` is the folder in their traces."""
    return ImageSet(array_files(origin, pixels), np.arange(len(pixels)), labels)


def class_images(files: LocatedFiles, by_class: Mapping[str, Sequence[int]], classes: Sequence[str]) -> ImageSet:
    """Select the rows of each class, labelled by its index in `classes`."""
    rows = [np.array(by_class.get(name, ()), dtype=np.int64) for name in classes]
    return ImageSet(
        files, np.concatenate([np.empty(0, np.int64), *rows]), np.repeat(np.arange(len(classes)), [*map(len, rows)])
    )


def scan_folder(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """List subfolders, images and other files directly in `folder`, sorted, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            is_folder = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith(".")}
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be listed ({error.strerror})") from None
    files = sorted(name for name in is_folder if not is_folder[name])
    return (sorted(name for name in is_folder if is_folder[name]), *images_of(files))


def walk(
    scan: Callable[[str], tuple[list[str], list[str], list[str]]], start: str, *, place: Callable[[str], str] = str
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each folder's images and other files, depth first in code-point order; `scan` lists one folder.

    A folder whose `place` was visited already (by a symbolic link) is passed over.
    """
    seen: set[str] = set()
    stack = [start]
    while stack:
        folder = stack.pop()
        if place(folder) in seen:
            continue
        seen.add(place(folder))
        folders, *files = scan(folder)
        above = f"{folder}/" if folder else ""
        images, others = ([f"{above}{name}" for name in names] for names in files)
        yield images, others
        stack.extend(f"{above}{name}" for name in reversed(folders))


def num_shared(paths: Iterable[Sequence[str]]) -> int:
    """Count the leading parts that all paths have."""
    return len([*takewhile(lambda column: len({*column}) == 1, zip(*paths, strict=False))])


def images_of(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the names in a folder, sorted: images, or else the npy arrays (beside images they are something else),
    and all others."""
    images = [name for name in names if is_image(name)]
    images = images or [name for name in names if is_array(name)]
    return images, sorted({*names} - {*images})


def is_image(name: str) -> bool:
    """True for a visible name with an image's extension."""
    last = name.rpartition("/")[2]
    return last.rpartition(".")[2].lower() in IMAGE_EXTENSIONS and not last.startswith(".")


def is_array(name: str) -> bool:
    """True for a visible name with the extension of npy."""
    last = name.rpartition("/")[2]
    return last.lower().endswith(f".{ARRAY_EXTENSION}") and not last.startswith(".")


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one UserError for all problems, if any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        shown = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems[:_MOST_PROBLEMS], start=1))
        more = f"; and {len(problems) - _MOST_PROBLEMS:,} more" if len(problems) > _MOST_PROBLEMS else ""
        raise UserError(f"{len(problems):,} problems: {shown}{more}")


def left_out_notes(place: Path | str, others: Sequence[str]) -> list[str]:
    """Note files that are not images."""
    if not others:
        return []
    tars = [name for name in others if name.lower().endswith(SUFFIXES)]
    inside = f"; {counted(len(tars), 'tar')} among them not looked into (the first: {tars[0]})" if tars else ""
    return [f"{place}: {counted(len(others), 'file')} left out, not being images (the first: {others[0]}){inside}"]
