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

from data_shards.packing.shard_plan import PackPlan, ShardPlan, class_numbers
from data_shards.packing.work import DIGEST_BYTES, ShardRecord
from data_shards.sources import Source
from data_shards.sources.base import SplitName

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

    @property
    def straddles(self) -> bool:
        """Whether splits share it."""
        return len({image.split for image in self.images}) > 1

    @property
    def contradicts(self) -> bool:
        """Whether the images are labelled differently."""
        return any(image.label != self.images[0].label for image in self.images)


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
    straddling_groups: int = 0
    contradicting_groups: int = 0


def count(groups: Sequence[DuplicateGroup], *, num_unreadable: int) -> Counts:
    """Sum up."""
    return Counts(
        unreadable=num_unreadable,
        duplicates=sum(len(group.images) - 1 for group in groups),
        groups=len(groups),
        straddling_groups=sum(group.straddles for group in groups),
        contradicting_groups=sum(group.contradicts for group in groups),
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
            split=split,
            label=_label(plan, shard.labels[refused.position]),
            reason=refused.reason,
        )
        for split, shards in plan.splits.items()
        for shard in shards
        for refused in records[shard.file].refused
    ]


def duplicate_groups(
    plan: PackPlan, digests: bytes, *, duplicates: Literal["keep", "drop"], unreadable: Sequence[UnreadableFile]
) -> list[DuplicateGroup]:
    """Among the planned images, whose digests are given in plan order; if dropped, the first of each group is packed.

    Groups come in the order of their first images.
    """
    shards: list[tuple[SplitName, ShardPlan]] = [(name, shard) for name, part in plan.splits.items() for shard in part]
    starts = np.cumsum([0, *(len(shard) for _, shard in shards)])
    bad = {file.path for file in unreadable}
    groups: list[DuplicateGroup] = []
    for numbers in equal_groups(digests):
        images: list[FoundImage] = []
        for number in numbers:
            at = int(np.searchsorted(starts, number, side="right")) - 1
            split, shard = shards[at]
            position = number - int(starts[at])
            path = shard.images.trace(int(shard.indices[position]))
            images.append(
                FoundImage(
                    path=path,
                    key=shard.key(position),
                    split=split,
                    label=_label(plan, shard.labels[position]),
                    packed=path not in bad and (duplicates == "keep" or number == numbers[0]),
                )
            )
        start = numbers[0] * DIGEST_BYTES
        groups.append(DuplicateGroup(digests[start : start + DIGEST_BYTES].hex(), tuple(images)))
    return groups


def repeated(plan: PackPlan, source: Source, digests: bytes) -> dict[SplitName, NDArray[np.bool_]]:
    """Marks, per split of the source, the images that equal one which is earlier in the plan."""
    marks: dict[SplitName, NDArray[np.bool_]] = {
        split: np.zeros(len(images), dtype=np.bool_) for split, images in source.splits.items()
    }
    shards = [shard for shards in plan.splits.values() for shard in shards]
    split_of: dict[int, SplitName] = {id(images): split for split, images in source.splits.items()}
    splits: list[SplitName] = [split_of[id(shard.images)] for shard in shards for _ in range(len(shard))]
    indices = np.concatenate([shard.indices for shard in shards])
    for numbers in equal_groups(digests):
        for number in numbers[1:]:
            marks[splits[number]][indices[number]] = True
    return marks


def write_duplicates(groups: Iterable[DuplicateGroup], path: Path) -> None:
    """One group a line."""
    _write_lines(
        ({"digest": group.digest, "images": [vars(image) for image in group.images]} for group in groups), path
    )


def write_unreadable(files: Iterable[UnreadableFile], path: Path) -> None:
    """One image a line."""
    _write_lines((vars(file) for file in files), path)


def _write_lines(entries: Iterable[Mapping[str, object]], path: Path) -> None:
    # backslashreplace turns what is no UTF-8 in a file's name into an escape of JSON's.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        stream.flush()
        os.fsync(stream.fileno())


def _label(plan: PackPlan, labels: NDArray[np.int64]) -> Label:
    names = [plan.classes[number] for number in class_numbers(labels)]
    return names if plan.kind == "multi" else names[0]
