"""Which images are held out as split val: a fraction of each class, a number of images, or those that a list names.

Fractions and numbers are taken by sorting on a hash of (seed, where the image is from), as in `shard_plan`; a fraction
is one of all images where they have several labels each.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.sources.base import ImageSet, Source, SplitName
from data_shards.packing.sources.label_list import clean_path, read_lines


@dataclass(frozen=True)
class HoldoutList:
    """The images to hold out: path (as the source traces it) -> line of `file`."""

    file: Path
    lines: dict[str, int]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(sorted(self.lines)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.file.resolve()} ({self.digest})"


@dataclass(frozen=True)
class HoldoutCount:
    """So many images of all, whatever their classes: 51,200 of ImageNet-21k, in Google's code."""

    num_images: int

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise UserError(f"holdout_images: must be at least 1, not {self.num_images}")


Holdout = float | HoldoutList | HoldoutCount


def read_holdout_list(file: Path, *, root: Path) -> HoldoutList:
    """One path a line, below the source's folder `root`. Raises UserError for a file that is not such a list."""
    lines: dict[str, int] = {}
    for line, text in read_lines(file):
        try:
            lines.setdefault(clean_path(text, root=root), line)
        except ValueError as error:
            raise UserError(f"{file}, line {line}: {error}; correct that line") from None
    if not lines:
        raise UserError(f"{file}: it names no image; write the path of one on each line")
    return HoldoutList(file, lines)


def hold_out(
    source: Source, indices: NDArray[np.int64], holdout: Holdout, seed: int
) -> dict[SplitName, NDArray[np.int64]]:
    """Divide the images `indices` of split train into train and val.

    Raises UserError if there is a val split, or for a fraction outside (0, 1), a class of one image, or unknown paths.
    """
    if "val" in source.splits:
        raise UserError(f"holdout: {source.spec} has a held-out split already; leave holdout out")
    if isinstance(holdout, HoldoutList):
        val = _listed(source, indices, holdout)
    elif isinstance(holdout, HoldoutCount):
        val = _count(source, indices, holdout, seed)
    else:
        val = _fraction(source, indices, holdout, seed)
    return {"train": np.setdiff1d(indices, val, assume_unique=True), "val": val}


def hash_order(images: ImageSet, indices: NDArray[np.int64], purpose: str, seed: int) -> NDArray[np.int64]:
    """A permutation of range(len(indices)): the order of their hashes."""
    prefix = f"{seed}\0{purpose}\0".encode()
    hashes = [
        hashlib.blake2b(prefix + images.trace(int(i)).encode(errors="surrogateescape"), digest_size=16).digest()
        for i in indices
    ]
    return np.array(sorted(range(len(hashes)), key=hashes.__getitem__), dtype=np.int64)


def _fraction(source: Source, indices: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """Of each class the nearest whole number of images to `fraction`, but at least one and not all."""
    if not 0 < fraction < 1:
        percent = f": {fraction:g} % is --holdout {fraction / 100:g}" if 1 <= fraction < 100 else ""
        number = ", and --holdout-images takes a number of images" if fraction >= 1 else ""
        raise UserError(f"holdout: must lie between 0 and 1 (a share of each class), not {fraction:g}{percent}{number}")
    images = source.splits["train"]
    if source.kind == "multi":
        groups = [indices]
    else:
        groups = [indices[images.labels[indices] == label] for label in np.unique(images.labels[indices])]
    held: list[NDArray[np.int64]] = [indices[:0]]
    for members in groups:
        if len(members) < 2:
            if source.empty_classes == "report":
                continue  # it stays in train; the plan's notes name classes without an image in val
            name = source.classes[images.labels[members[0]]]
            raise UserError(
                f"holdout: the class {name!r} of {source.spec} has one image only, so none can be held out; "
                f"add images or leave the class out"
            )
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held.append(members[hash_order(images, members, "holdout", seed)[:count]])
    return np.sort(np.concatenate(held))


def _count(source: Source, indices: NDArray[np.int64], holdout: HoldoutCount, seed: int) -> NDArray[np.int64]:
    if holdout.num_images >= len(indices):
        raise UserError(
            f"holdout_images: {source.spec} has {len(indices):,} images, so {holdout.num_images:,} cannot be held out"
        )
    return np.sort(indices[hash_order(source.splits["train"], indices, "holdout", seed)[: holdout.num_images]])


def _listed(source: Source, indices: NDArray[np.int64], holdout: HoldoutList) -> NDArray[np.int64]:
    images = source.splits["train"]
    found = {trace: index for index in range(len(images)) if (trace := images.trace(index)) in holdout.lines}
    missing = [path for path in holdout.lines if path not in found]
    if missing:
        more = f" ({len(missing) - 1:,} more of the list are missing)" if len(missing) > 1 else ""
        raise UserError(
            f"{holdout.file}, line {holdout.lines[missing[0]]}: {source.spec} has no image {missing[0]}{more}; "
            f"paths are relative to SOURCE, as in {images.trace(0)}: correct these lines"
        )
    return np.intersect1d(indices, np.array(sorted(found.values()), dtype=np.int64))
