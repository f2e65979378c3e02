"""Which image goes into which shard, with which key and label, decided before a byte is written. No I/O.

Shuffling and holding out sort by a hash of (seed, purpose, where the image is from). So they do not depend on numpy's
version or the number of cores, and an image stays in train or val whichever classes are packed, as long as its class
has the same images. Costs about 2 us per image.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.request import PackRequest
from data_shards.packing.sources.base import ImageSet, Source, SplitName
from data_shards.packing.split import HoldoutCount, hash_order, hold_out
from data_shards.shards.labels import LabelSpec, similar_names
from data_shards.text import named
from data_shards.vocabulary import LabelKind

LABEL_SPECS: Mapping[LabelKind, LabelSpec] = {
    "single": LabelSpec(),
    "multi": LabelSpec(part="json", key="label", kind="multi"),
}
INDEX_BYTES = 120  # a line of the index, for keys of 40 to 70 characters
_BLOCK_BYTES = 512
_TAR_END_BYTES = 1024 + 10_240  # two blocks of zeros, and more up to a multiple of 10,240


@dataclass(frozen=True)
class ShardPlan:
    """One planned tar: images `indices` of `images` (of `source_split`), in this order, labelled in the packed classes.

    `labels` is [num_samples], or [num_samples, most labels] padded with -1.
    """

    file: str
    images: ImageSet
    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    first_number: int
    split: SplitName = "train"
    source_split: SplitName = "train"

    def __len__(self) -> int:
        return len(self.indices)

    def key(self, position: int) -> str:
        index = int(self.indices[position])
        name = self.classes[self.labels[position]] if self.labels.ndim == 1 else None
        return sample_key(name, self.images.trace(index), self.first_number + index)

    def label_member(self, position: int) -> tuple[str, bytes]:
        """Extension and content of the member that holds the label: ASCII in .cls, or a list in .json."""
        if self.labels.ndim == 1:
            return "cls", str(self.labels[position]).encode("ascii")
        return "json", json.dumps({"label": list(class_numbers(self.labels[position]))}).encode("ascii")


@dataclass(frozen=True)
class PackPlan:
    """All shards of all splits; `classes[label]` is the name of a label."""

    classes: tuple[str, ...]
    kind: LabelKind
    splits: dict[SplitName, list[ShardPlan]]
    notes: tuple[str, ...]

    @property
    def shards(self) -> list[ShardPlan]:
        """Of all splits, train before val before test."""
        return [shard for shards in self.splits.values() for shard in shards]

    @property
    def num_images(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def locate(self, numbers: Sequence[int]) -> list[tuple[ShardPlan, int]]:
        """Shard and position of the images with these numbers, counted in the order of `shards`."""
        shards = self.shards
        starts = np.cumsum([0, *map(len, shards)])
        found = np.searchsorted(starts, numbers, side="right") - 1
        return [(shards[at], number - int(starts[at])) for at, number in zip(found, numbers, strict=True)]

    def names(self, labels: NDArray[np.int64]) -> str | list[str]:
        """The class of an image, or a list where images have several; `labels` is its row of a label array."""
        names = [self.classes[number] for number in class_numbers(labels)]
        return names if self.kind == "multi" else names[0]


def make_plan(
    source: Source, request: PackRequest, *, without: Mapping[SplitName, NDArray[np.bool_]] | None = None
) -> PackPlan:
    """Choose classes, hold out, shuffle, cut into shards.

    Shards of a split differ by at most one sample (cut by bytes: two images), so no worker gets a tiny one. `without`
    marks duplicates, left out after the held-out images are chosen. Raises UserError for unknown, repeated or doubtful
    classes, an unfit holdout, a split without images, and, for sources that refuse it, a class without images in a
    split.
    """
    chosen = _choose_classes(source, request.classes)
    # A number of images, or a set without a held-out part of its own, need not have all classes in val.
    empty = "report" if isinstance(request.holdout, HoldoutCount) else source.empty_classes
    new_label = np.full(len(source.classes) + 1, -1, dtype=np.int64)  # the last one for -1: no label
    new_label[[source.classes.index(name) for name in chosen]] = np.arange(len(chosen))
    parts: dict[SplitName, NDArray[np.int64]] = {}
    first_numbers: dict[SplitName, int] = {}
    for split, images in source.splits.items():
        is_chosen = new_label[images.labels] >= 0
        if source.kind == "multi":  # all images, those without a label too, unless classes are chosen
            is_chosen = is_chosen.any(axis=1) | (request.classes is None)
        first_numbers[split] = sum(len(source.splits[before]) for before in first_numbers)
        parts[split] = np.flatnonzero(is_chosen)
    if request.holdout is not None:
        parts = hold_out(source, parts["train"], request.holdout, request.seed)
    plans: dict[SplitName, list[ShardPlan]] = {}
    notes = _doubts(source, request)
    for split, indices in parts.items():
        of_split: SplitName = "train" if request.holdout is not None else split
        images = source.splits[of_split]
        if without is not None:
            indices = indices[~without[of_split][indices]]
        labels = new_label[images.labels[indices]]
        notes += _check_counts(source, split, labels, chosen, empty=empty)
        # Neighbours in a source are of one class; a shard, and so a shuffle window, should hold all of them.
        order = hash_order(images, indices, f"shuffle-{split}", request.seed)
        plans[split] = [
            ShardPlan(
                file=f"{file_name(request.name or '')}-{split}-{number:06d}.tar",
                images=images,
                indices=indices[piece],
                labels=labels[piece],
                classes=chosen,
                first_number=first_numbers[of_split],
                split=split,
                source_split=of_split,
            )
            for number, piece in enumerate(_cut(order, tar_bytes(images.num_bytes[indices[order]]), request))
        ]
    return PackPlan(classes=chosen, kind=source.kind, splits=plans, notes=tuple(notes))


def tar_bytes(image_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """What samples with images of these sizes take in a tar: two headers, the image in whole blocks, the label."""
    blocks = -(-np.maximum(image_bytes, 0) // _BLOCK_BYTES)
    return (blocks + 3) * _BLOCK_BYTES


def needed_bytes(shards: Sequence[ShardPlan], *, most_image_bytes: int | None) -> int:
    """Estimated size of the tars and indexes, with images of at most `most_image_bytes`."""
    total = 0
    for shard in shards:
        sizes = shard.images.num_bytes[shard.indices]
        sizes = sizes if most_image_bytes is None else np.minimum(sizes, most_image_bytes)
        total += int(tar_bytes(sizes).sum()) + _TAR_END_BYTES + len(shard) * INDEX_BYTES
    return total


def class_numbers(labels: NDArray[np.int64]) -> tuple[int, ...]:
    """One row of a label array -> its labels, ascending."""
    return tuple(sorted(label for label in np.atleast_1d(labels).tolist() if label >= 0))


def sample_key(class_name: str | None, trace: str, number: int) -> str:
    """`cat`, `train/cat/0338.jpg`, 42 -> `cat_0338_0000042`: readable, unique by its number, and safe in a tar.

    webdataset cuts keys at the first dot, DALI's index at spaces, and tar (ustar) limits names to 100 bytes. The number
    counts the images of the whole source, so a key does not depend on the classes packed. An image with several labels
    (None) has no class in its key.
    """
    stem = trace.rpartition("/")[2].rpartition(".")[0] or trace.rpartition("/")[2]
    if class_name is None:
        return f"{file_name(stem)[:40]}_{number:07d}"
    return f"{file_name(class_name)[:32]}_{_safe(stem)[:40]}_{number:07d}"


def file_name(name: str) -> str:
    """`name` with all but ASCII letters, digits, - and _ replaced; never empty, never starting with _ or -."""
    return _safe(name).lstrip("_-") or "x"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)


def _choose_classes(source: Source, classes: Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        return source.classes
    if not classes:
        raise UserError("classes: the list is empty; name at least one class or leave it out for all of them")
    for name in classes:
        if name not in source.classes:
            near = get_close_matches(name, source.classes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(source.classes[:20])}"
            raise UserError(f"classes: {source.spec} has no class {name!r}; {hint}")
    if len(set(classes)) != len(classes):
        twice = next(name for i, name in enumerate(classes) if name in classes[:i])
        raise UserError(f"classes: {twice!r} is named twice; name each class once")
    return tuple(classes)


def _doubts(source: Source, request: PackRequest) -> list[str]:
    """Notes on classes whose images lie in several folders each. Raises UserError if such a class is the only one, and
    for names that differ only by case or blanks, unless the request names its classes or keeps those that there are."""
    if request.classes is not None or request.doubtful_classes == "keep":
        return []
    for names in similar_names(source.classes):
        raise UserError(
            f"{source.spec}: the classes {', '.join(map(repr, names))} differ only by case or blanks: give them one "
            "name, or add --keep-classes if they are meant"
        )
    images, folders = source.splits["train"], dict[str, dict[str, None]]()
    by_folder = request.labels is None and source.kind == "single"
    for row, label in enumerate(images.labels.tolist() if by_folder else ()):
        folder, name = images.trace(row).rpartition("/")[0], source.classes[label]
        if name in folder.split("/"):  # else the classes are not the folders'
            folders.setdefault(name, {})[folder] = None
    spread = {name: list(its) for name, its in folders.items() if len(its) > 1}
    for name, its in spread.items():
        which = f"{named(its)} are all {name}"
        if (count := len(source.classes)) > 1:
            return [f"{source.spec}: {len(spread):,} of {count:,} classes have several folders each: {which}"]
        above = os.path.join(source.spec, os.path.commonpath(its))
        raise UserError(
            f"{source.spec}: it has one class alone, as {which}: give {above} if these are classes, or add "
            "--keep-classes if one is meant"
        )
    return []


def _check_counts(
    source: Source,
    split: SplitName,
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    *,
    empty: Literal["refuse", "report"],
) -> list[str]:
    """Notes on classes without images in this split, where that is allowed."""
    if not len(labels):
        raise UserError(f"{source.spec}: no image is left for split {split}; correct classes or the held-out choice")
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    if counts.all():
        return []
    first = classes[int(counts.argmin())]
    if empty == "refuse":
        raise UserError(
            f"{source.spec}: the class {first!r} has no image in split {split}; leave it out with `classes`"
        )
    return [f"{int((counts == 0).sum()):,} of {len(classes):,} classes have no image in split {split} (first: {first})"]


def _cut(order: NDArray[np.int64], sample_bytes: NDArray[np.int64], request: PackRequest) -> list[NDArray[np.int64]]:
    """Even pieces of `order`: in images, or in bytes."""
    if request.samples_per_shard is not None:
        return np.array_split(order, -(-len(order) // request.samples_per_shard))
    ends = np.cumsum(sample_bytes)
    num_shards = -(-int(ends[-1]) // max((request.shard_size_bytes or 0) - _TAR_END_BYTES, 1))
    shares = ends[-1] * np.arange(1, num_shards) / num_shards
    # A sample belongs to the share that its middle lies in, so a piece exceeds its share by half a sample at each end.
    return [piece for piece in np.split(order, np.searchsorted(ends - sample_bytes / 2, shares)) if len(piece)]
