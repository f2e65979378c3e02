"""What a packing comes upon, as lists for the user: images with the same bytes, and images that cannot be read.

OUT/duplicates.jsonl has one group a line: its digest, and each image's path, key, split, label (a list where images
have several) and whether it was packed. OUT/unreadable.jsonl (beside OUT where they end the packing) has one image a
line: path, split, label, reason. Neither is written when there is nothing to say. Costs 16 bytes and some 0.5 µs for
each image; images count as equal if their files are, not if they merely look alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.shard_plan import PackPlan
from data_shards.packing.work import DIGEST_BYTES, ShardRecord
from data_shards.sources import Source
from data_shards.sources.base import SplitName

UNREADABLE_FILE = "unreadable.jsonl"
_MOST_NAMED = 5  # unreadable images, in a message

Label = str | list[str]


@dataclass(frozen=True)
class FoundImage:
    """One image of the source, and whether it is in the shards."""

    path: str
    key: str
    split: SplitName
    label: Label
    packed: bool


@dataclass(frozen=True)
class DuplicateGroup:
    """Images with the same bytes, in plan order: train before val before test."""

    digest: str
    images: tuple[FoundImage, ...]


@dataclass(frozen=True)
class UnreadableFile:
    """An image that is not in the shards; its label is None where nothing tells it."""

    path: str
    split: SplitName
    label: Label | None
    reason: str


@dataclass(frozen=True)
class Counts:
    """What `pack.json` says of the lists; `duplicates` counts the images beyond the first of each group."""

    unreadable: int = 0
    duplicates: int = 0
    groups: int = 0
    straddling_groups: int = 0  # whose images are in several splits
    contradicting_groups: int = 0  # whose images are labelled differently


def count(groups: Sequence[DuplicateGroup], *, num_unreadable: int) -> Counts:
    """Sum up."""
    return Counts(
        unreadable=num_unreadable,
        duplicates=sum(len(group.images) - 1 for group in groups),
        groups=len(groups),
        straddling_groups=sum(len({image.split for image in group.images}) > 1 for group in groups),
        contradicting_groups=sum(any(one.label != group.images[0].label for one in group.images) for group in groups),
    )


def equal_groups(digests: bytes) -> list[list[int]]:
    """Numbers of the images with equal digests (`DIGEST_BYTES` each; zeros: unknown), in ascending order."""
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)
    order = np.lexsort(halves.T[::-1])  # stable, so ascending within a group
    differs = np.any(halves[order][1:] != halves[order][:-1], axis=1)
    runs = np.split(order, np.flatnonzero(differs) + 1)
    return sorted(run.tolist() for run in runs if len(run) > 1 and halves[run[0]].any())


def unreadable_files(plan: PackPlan, records: Mapping[str, ShardRecord]) -> list[UnreadableFile]:
    """All that the records name, in plan order."""
    return [
        UnreadableFile(
            path=shard.images.trace(int(shard.indices[refused.position])),
            split=shard.split,
            label=plan.names(shard.labels[refused.position]),
            reason=refused.reason,
        )
        for shard in plan.shards
        for refused in records[shard.file].refused
    ]


def unlabelled_files(source: Source) -> list[UnreadableFile]:
    """Those that the source has left out."""
    reason = "it lies beside the class folders, so that it has no label"
    return [UnreadableFile(path=path, split=split, label=None, reason=reason) for split, path in source.left_out]


def duplicate_groups(
    plan: PackPlan, digests: bytes, *, duplicates: Literal["keep", "drop"], unreadable: Sequence[UnreadableFile]
) -> list[DuplicateGroup]:
    """Among the planned images, whose digests are given in plan order; if dropped, the first of each group is packed.

    Groups come in the order of their first images.
    """
    bad = {file.path for file in unreadable}
    groups: list[DuplicateGroup] = []
    for numbers in equal_groups(digests):
        images: list[FoundImage] = []
        for shard, position in plan.locate(numbers):
            path = shard.images.trace(int(shard.indices[position]))
            packed = path not in bad and (duplicates == "keep" or not images)
            label = plan.names(shard.labels[position])
            images.append(FoundImage(path, shard.key(position), shard.split, label, packed))
        start = numbers[0] * DIGEST_BYTES
        groups.append(DuplicateGroup(digests[start : start + DIGEST_BYTES].hex(), tuple(images)))
    return groups


def repeated(plan: PackPlan, source: Source, digests: bytes) -> dict[SplitName, NDArray[np.bool_]]:
    """Marks, per split of the source, the images that equal one which is earlier in the plan."""
    marks: dict[SplitName, NDArray[np.bool_]] = {
        split: np.zeros(len(images), dtype=np.bool_) for split, images in source.splits.items()
    }
    for shard, position in plan.locate([number for group in equal_groups(digests) for number in group[1:]]):
        marks[shard.source_split][shard.indices[position]] = True
    return marks


def write_duplicates(groups: Iterable[DuplicateGroup], path: Path) -> None:
    """One group a line."""
    _write_lines(
        ({"digest": group.digest, "images": [vars(image) for image in group.images]} for group in groups), path
    )


def write_unreadable(files: Iterable[UnreadableFile], path: Path) -> None:
    """One image a line."""
    _write_lines((vars(file) for file in files), path)


def unreadable_error(files: Sequence[UnreadableFile], source: Source, plan: PackPlan, out: Path) -> UserError:
    """The error that names the first of them; the whole list is written beside OUT."""
    path = list_beside(out)
    write_unreadable(files, path)
    first = "; ".join(f"{file.path} ({file.reason})" for file in files[:_MOST_NAMED])
    more = f"; and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return UserError(
        f"{source.spec}: {len(files):,} of {plan.num_images:,} images cannot be read: {first}{more}; all are listed "
        f"in {path}: mend or remove them, or add --skip-unreadable, and the command goes on from here"
    )


def list_beside(out: Path) -> Path:
    """`a/OUT` -> `a/OUT.unreadable.jsonl`."""
    return out.with_name(f"{out.name}.{UNREADABLE_FILE}")


def _write_lines(entries: Iterable[Mapping[str, object]], path: Path) -> None:
    # backslashreplace turns what is no UTF-8 in a file's name into an escape of JSON's.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        stream.flush()
        os.fsync(stream.fileno())
