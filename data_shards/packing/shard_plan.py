"""Plan each image's shard, key and label before anything is written. No I/O.

Shuffle and holdout sort by a hash of (seed, purpose, the image's place), so they depend on neither numpy's version nor
the number of cores. An image stays in train or val whichever classes are packed, as long as its class keeps its images.
Costs about 2 us an image.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.request import HoldoutList, PackRequest
from shardvit.data_shards.packing.sources.base import ImageSet, Int64s, Source, SplitName
from shardvit.data_shards.shards.labels import LabelSpec, similar_names
from shardvit.data_shards.text import named
from shardvit.data_shards.vocabulary import LabelKind

Marks = NDArray[np.bool_]  # [images] of all splits of the source
Line = dict[str, Any]  # an entry of duplicates.jsonl and the like

LABEL_SPECS: Mapping[LabelKind, LabelSpec] = {
    "single": LabelSpec(),
    "multi": LabelSpec(part="json", key="label", kind="multi"),
}
INDEX_BYTES = 120  # a line of the index, for keys of 40 to 70 characters
_BLOCK_BYTES = 512
TAR_END_BYTES = 1024 + 10_240  # two blocks of zeros, padded to a multiple of 10,240


@dataclass(frozen=True)
class Start:
    """Where a packing's numbers begin: behind those of the set that it is appended to."""

    packing: int = 0  # of the set; 0: its first
    images: int = 0  # of the sources before
    shards: Mapping[SplitName, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardPlan:
    """One planned tar: images in order, with labels that index `classes`."""

    file: str
    images: ImageSet
    numbers: Int64s  # image numbers, counted across all splits of the source
    classes: tuple[str, ...]
    split: SplitName = "train"
    first_number: int = 0  # added in keys: images of the set before this packing

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def labels(self) -> Int64s:
        return self.images.labels

    def key(self, position: int) -> str:
        name = self.classes[self.labels[position]] if self.labels.ndim == 1 else None
        return sample_key(name, self.images.trace(position), self.first_number + int(self.numbers[position]))

    def line(self, position: int) -> Line:
        """Format an image for a list; `label` is a class name, or a list of them if multi-label."""
        names = [self.classes[number] for number in class_numbers(self.labels[position])]
        label = names[0] if self.labels.ndim == 1 else names
        return {"path": self.images.trace(position), "split": self.split, "label": label}

    def label_member(self, position: int) -> tuple[str, bytes]:
        if self.labels.ndim == 1:
            return "cls", str(self.labels[position]).encode("ascii")
        return "json", json.dumps({"label": list(class_numbers(self.labels[position]))}).encode("ascii")


@dataclass(frozen=True)
class PackPlan:
    """All shards of all splits; labels index `classes`."""

    classes: tuple[str, ...]
    kind: LabelKind
    splits: dict[SplitName, list[ShardPlan]]
    notes: tuple[str, ...]

    @property
    def shards(self) -> list[ShardPlan]:
        return [shard for shards in self.splits.values() for shard in shards]

    @property
    def num_images(self) -> int:
        return sum(map(len, self.shards))

    @property
    def numbers(self) -> Int64s:
        return np.concatenate([shard.numbers for shard in self.shards])

    def locate(self, numbers: Sequence[int]) -> list[tuple[ShardPlan, int]]:
        shards = self.shards
        starts = np.cumsum([0, *map(len, shards)])
        found = np.searchsorted(starts, numbers, side="right") - 1
        return [(shards[at], number - int(starts[at])) for at, number in zip(found, numbers, strict=True)]


def make_plan(source: Source, request: PackRequest, *, without: Marks | None = None) -> PackPlan:
    """Choose classes, hold out, drop images marked in `without`, shuffle, cut into shards.

    Shards of a split differ by at most one sample (if cut by bytes, two images). UserError if classes or holdout do not
    fit the source, or leave a split or class without images.
    """
    chosen = _choose_classes(source, request.classes)
    new_label = np.full(len(source.classes) + 1, -1, dtype=np.int64)  # the last entry maps -1, no label
    new_label[[source.classes.index(name) for name in chosen]] = np.arange(len(chosen))
    parts: dict[SplitName, Int64s] = {}
    first_numbers: dict[SplitName, int] = {}
    for split, images in source.splits.items():
        is_chosen = new_label[images.labels] >= 0
        if source.kind == "multi":  # keep unlabelled images unless classes are chosen
            is_chosen = is_chosen.any(axis=1) | (request.classes is None)
        first_numbers[split] = sum(len(source.splits[before]) for before in first_numbers)
        parts[split] = np.flatnonzero(is_chosen)
    is_held = (request.holdout, request.holdout_images, request.holdout_list) != (None, None, None)
    if is_held:
        parts = hold_out(source, parts["train"], request)
    # Classes may lack val images if a number is held out, or if the source may lack some anyway.
    is_more = request.existing == "append"  # of a set that has images of the classes
    may_be_empty = request.holdout_images is not None or source.empty_classes == "report" or is_more
    plans: dict[SplitName, list[ShardPlan]] = {}
    notes = _doubts(source, request)
    for split in parts:
        indices = parts[split]
        source_split: SplitName = "train" if is_held else split
        images, first = source.splits[source_split], first_numbers[source_split]
        if without is not None:
            indices = indices[~without[first + indices]]
        if is_more and not len(indices):
            continue
        notes += _check_counts(source, split, new_label[images.labels[indices]], chosen, may_be_empty=may_be_empty)
        # Neighbours in a source share a class; a shard, and so a shuffle window, should mix all classes.
        order = _hash_order(images, indices, f"shuffle-{split}", request.seed)
        indices, parts[split] = indices[order], np.zeros(0, np.int64)
        del order
        pieces = _cut(images, indices, request)
        labels, rows = new_label[images.labels[indices]], images.rows[indices]  # shards are views of these
        plans[split] = [
            ShardPlan(
                shard_file(request.name or "", split, number),
                ImageSet(images.files, rows[start:end], labels[start:end]),
                first + indices[start:end],
                chosen,
                split,
            )
            for number, (start, end) in enumerate(pieces)
        ]
    return PackPlan(chosen, source.kind, plans, tuple(notes))


def hold_out(source: Source, indices: Int64s, request: PackRequest) -> dict[SplitName, Int64s]:
    """Split the train images `indices` into train and val; UserError if the request does not fit them."""
    if "val" in source.splits:
        raise UserError(f"holdout: {source.spec} has a held-out split already; leave holdout out")
    images = source.splits["train"]
    if request.holdout_list is not None:
        val = _listed(source, indices, request.holdout_list)
    elif (count := request.holdout_images) is not None:
        if count >= len(indices):
            raise UserError(
                f"--holdout-images: {source.spec} has {len(indices):,} images; give fewer than that, not {count:,}"
            )
        val = np.sort(indices[_hash_order(images, indices, "holdout", request.seed)[:count]])
    else:
        val = _fraction(source, indices, request.holdout or 0, request.seed)
    return {"train": np.setdiff1d(indices, val, assume_unique=True), "val": val}


def _fraction(source: Source, indices: Int64s, fraction: float, seed: int) -> Int64s:
    """Hold out `fraction` of each class, rounded; at least one image, never all."""
    if not 0 < fraction < 1:
        percent = f": {fraction:g} % is --holdout {fraction / 100:g}" if 1 <= fraction < 100 else ""
        number = ", and --holdout-images takes a number of images" if fraction >= 1 else ""
        raise UserError(f"holdout: must lie between 0 and 1 (a share of each class), not {fraction:g}{percent}{number}")
    images = source.splits["train"]
    groups = [indices]
    if source.kind == "single":
        groups = [indices[images.labels[indices] == label] for label in np.unique(images.labels[indices])]
    held = [indices[:0]]
    for members in groups:
        if len(members) > 1:
            count = min(max(round(len(members) * fraction), 1), len(members) - 1)
            held.append(members[_hash_order(images, members, "holdout", seed)[:count]])
        elif source.empty_classes == "refuse":  # else it stays in train; the notes name classes without an image in val
            raise UserError(
                f"holdout: the class {source.classes[images.labels[members[0]]]!r} of {source.spec} has one image "
                "only, so none can be held out; add images or leave the class out"
            )
    return np.sort(np.concatenate(held))


def _listed(source: Source, indices: Int64s, holdout: HoldoutList) -> Int64s:
    images = source.splits["train"]
    traces = enumerate(chain.from_iterable(images.names()))
    found = {trace: index for index, trace in traces if trace in holdout.lines}
    if missing := [path for path in holdout.lines if path not in found]:
        more = f" ({len(missing) - 1:,} more of the list are missing)" if len(missing) > 1 else ""
        raise UserError(
            f"{holdout.file}, line {holdout.lines[missing[0]]}: {source.spec} has no image {missing[0]}{more}; "
            f"paths are relative to SOURCE, as in {images.trace(0)}: correct these lines"
        )
    return np.intersect1d(indices, np.array(sorted(found.values()), dtype=np.int64))


def _hash_order(images: ImageSet, indices: Int64s, purpose: str, seed: int) -> Int64s:
    prefix = f"{seed}\0{purpose}\0".encode()

    def digest(name: bytes) -> bytes:
        return hashlib.blake2b(prefix + name, digest_size=16).digest()

    # By the first half of the digests; the rest only decides ties, of which 10^8 images have none, as a rule.
    hashes = np.empty(len(indices), np.uint64)
    done = 0
    for names in images.names(indices):
        halves = b"".join([digest(name)[:8] for name in names.encoded()])
        hashes[done : done + len(names)] = np.frombuffer(halves, ">u8")
        done += len(names)
    order = np.argsort(hashes)
    hashes.sort()
    ties = np.flatnonzero(hashes[1:] == hashes[:-1])
    for run in np.split(ties, np.flatnonzero(np.diff(ties) != 1) + 1) if len(ties) else ():
        tied = order[run[0] : run[-1] + 2]
        names = next(images.names(indices[tied])).encoded()
        tied[:] = [row for _, row in sorted(zip(map(digest, names), tied.tolist(), strict=True))]
    return order


def tar_bytes(image_bytes: Int64s) -> Int64s:
    """Size samples in a tar, in bytes: two headers, the image in whole blocks, the label."""
    return (-(-np.maximum(image_bytes, 0) // _BLOCK_BYTES) + 3) * _BLOCK_BYTES


def needed_bytes(shards: Sequence[ShardPlan], *, most_image_bytes: int | None) -> int:
    """Estimate the bytes of tars and indexes, with images capped at `most_image_bytes`."""
    total = 0
    for shard in shards:
        sizes = shard.images.num_bytes
        sizes = sizes if most_image_bytes is None else np.minimum(sizes, most_image_bytes)
        total += int(tar_bytes(sizes).sum()) + TAR_END_BYTES + len(shard) * INDEX_BYTES
    return total


def class_numbers(labels: Int64s) -> tuple[int, ...]:
    """List the labels in one row of a label array, ascending."""
    return tuple(sorted(label for label in np.atleast_1d(labels).tolist() if label >= 0))


def sample_key(class_name: str | None, trace: str, number: int) -> str:
    """`cat`, `train/cat/0338.jpg`, 42 -> `cat_0338_0000042`: readable, unique by number, safe in a tar.

    webdataset cuts keys at the first dot, DALI's index at spaces; tar (ustar) limits names to 100 bytes. The number
    counts across the whole source, so keys do not depend on the classes packed. Multi-label: `class_name` None.
    """
    stem = trace.rpartition("/")[2].rpartition(".")[0] or trace.rpartition("/")[2]
    if class_name is None:
        return f"{file_name(stem)[:40]}_{number:07d}"
    return f"{file_name(class_name)[:32]}_{_safe(stem)[:40]}_{number:07d}"


def shard_file(name: str, split: SplitName, number: int) -> str:
    """`photos`, train, 7 -> `photos-train-000007.tar`."""
    return f"{file_name(name)}-{split}-{number:06d}.tar"


def file_name(name: str) -> str:
    """Replace all but ASCII letters, digits, - and _; never empty, never starting with _ or -."""
    return _safe(name).lstrip("_-") or "x"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)


def _choose_classes(source: Source, classes: Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        return source.classes
    if not classes:
        raise UserError("classes: the list is empty; name at least one class or leave it out for all of them")
    for number, name in enumerate(classes):
        if name not in source.classes:
            near = get_close_matches(name, source.classes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(source.classes[:20])}"
            raise UserError(f"classes: {source.spec} has no class {name!r}; {hint}")
        if name in classes[:number]:
            raise UserError(f"classes: {name!r} is named twice; name each class once")
    return tuple(classes)


def _doubts(source: Source, request: PackRequest) -> list[str]:
    """Note classes spread over folders; UserError for a lone one, or names that differ only by case or blanks."""
    if request.classes is not None or request.doubtful_classes == "keep":
        return []
    for names in similar_names(source.classes):
        raise UserError(
            f"{source.spec}: the classes {', '.join(map(repr, names))} differ only by case or blanks: give them one "
            "name, or add --keep-classes if they are meant"
        )
    images, folders = source.splits["train"], dict[str, dict[str, None]]()
    by_folder = request.labels is None and source.kind == "single"
    for label, trace in zip(images.labels, chain.from_iterable(images.names()), strict=True) if by_folder else ():
        folder, name = trace.rpartition("/")[0], source.classes[label]
        if name in folder.split("/"):  # else folders are not the classes
            folders.setdefault(name, {})[folder] = None
    spread = {name: list(its) for name, its in folders.items() if len(its) > 1}
    for name, its in spread.items():
        which = f"{named(its)} are all {name}"
        if (count := len(source.classes)) > 1:
            return [f"{source.spec}: {len(spread):,} of {count:,} classes have several folders each: {which}"]
        above = os.path.join(source.spec, os.path.commonpath(its))
        raise UserError(
            f"{source.spec}: one class alone, as {which}: give {above}, or add --keep-classes if one is meant"
        )
    return []


def _check_counts(
    source: Source, split: SplitName, labels: Int64s, classes: tuple[str, ...], *, may_be_empty: bool
) -> list[str]:
    if not len(labels):
        raise UserError(f"{source.spec}: no image is left for split {split}; correct classes or the held-out choice")
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    if counts.all():
        return []
    first = classes[int(counts.argmin())]
    if not may_be_empty:
        raise UserError(f"{source.spec}: no image of class {first!r} is in split {split}; leave it out with `classes`")
    return [f"{int((counts == 0).sum()):,} of {len(classes):,} classes have no image in split {split} (first: {first})"]


def _cut(images: ImageSet, indices: Int64s, request: PackRequest) -> list[tuple[int, int]]:
    """Return the start and end of each shard."""
    count = len(indices)
    if request.samples_per_shard is not None:
        num_shards = -(-count // request.samples_per_shard)
        small, num_large = divmod(count, num_shards)  # as np.array_split
        starts = [number * small + min(number, num_large) for number in range(num_shards)]
        return list(pairwise([*starts, count]))
    sample_bytes = tar_bytes(images.num_bytes[indices])
    ends = np.cumsum(sample_bytes)
    num_shards = -(-int(ends[-1]) // max((request.shard_size_bytes or 0) - TAR_END_BYTES, 1))
    shares = ends[-1] * np.arange(1, num_shards) / num_shards
    # A sample belongs to the share that holds its middle: a piece exceeds its share by half a sample at each end.
    cuts = np.searchsorted(ends - sample_bytes / 2, shares).tolist()
    return [(start, end) for start, end in pairwise([0, *cuts, count]) if start < end]
