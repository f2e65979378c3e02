"""What a packing finds: images with the same bytes, unreadable images, and the figures.

OUT/duplicates.jsonl has one group a line: its digest, and each image's path, key, split, label (a list where images
have several) and whether it was packed. OUT/unreadable.jsonl (beside OUT if they end the packing) has one image a line:
path, split, label, reason. Neither is written empty. Costs 16 bytes and some 0.5 µs per image.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.durable import flush
from data_shards.errors import UserError
from data_shards.packing.shard_plan import PackPlan
from data_shards.packing.sources.base import Source, SplitName
from data_shards.packing.work import DIGEST_BYTES, ShardRecord
from data_shards.shards.manifest import Manifest
from data_shards.text import counted, show_bytes, show_duration

DUPLICATES_FILE = "duplicates.jsonl"
UNREADABLE_FILE = "unreadable.jsonl"
EXCLUDED_FILE = "excluded.jsonl"
UNSURE_FILE = "unsure.jsonl"
_MOST_NAMED = 5  # unreadable images, in a message

Line = dict[str, Any]  # of a list


@dataclass(frozen=True)
class Counts:
    """Counts for `pack.json`; `duplicates` counts the images beyond the first of each group."""

    unreadable: int = 0
    duplicates: int = 0
    groups: int = 0
    straddling_groups: int = 0  # whose images are in several splits
    contradicting_groups: int = 0  # whose images are labelled differently
    excluded: int = 0  # for being in another set too
    unsure: int = 0  # that may be, and were packed


@dataclass(frozen=True)
class PackReport:
    """What OUT holds. `compared`: what was compared with the source, if OUT was packed before; else empty."""

    out: Path
    manifests: tuple[Manifest, ...]
    counts: Counts
    compared: str
    seconds: float

    @property
    def train(self) -> Manifest:
        return self.manifests[0]

    @property
    def val(self) -> Manifest | None:
        return next((manifest for manifest in self.manifests if manifest.split == "val"), None)

    @property
    def num_images(self) -> int:
        return sum(manifest.num_samples for manifest in self.manifests)

    def lines(self, *, dropped: bool) -> list[str]:
        """The report's lines; `dropped`: whether duplicates were."""
        verb = "was packed before, with" if self.compared else f"packed in {show_duration(self.seconds)}:"
        classes = counted(self.train.num_classes, "class")
        lines = [f"{self.out}: {verb} {counted(self.num_images, 'image')} of {classes}"]
        for manifest in self.manifests:
            lines.append(
                f"  {manifest.split:<6} {counted(manifest.num_samples, 'image'):>18}"
                f" {counted(len(manifest.shards), 'shard'):>14} {show_bytes(manifest.num_bytes):>9}"
            )
        lines += self._duplicate_lines(dropped=dropped)
        if self.counts.excluded:
            excluded = f"{counted(self.counts.excluded, 'image')} left out of train that are also in other sets"
            lines.append(f"  excluded: {excluded}: see {self.out / EXCLUDED_FILE}")
        if self.counts.unsure:
            unsure = f"{counted(self.counts.unsure, 'image')} packed in train that may be in other sets"
            lines.append(f"  unsure: {unsure}: see {self.out / UNSURE_FILE}")
        unreadable = "none"
        if self.counts.unreadable:
            unreadable = f"{counted(self.counts.unreadable, 'image')} left out: see {self.out / UNREADABLE_FILE}"
        lines.append(f"  unreadable: {unreadable}")
        if self.compared:
            lines.append(f"  compared: {self.compared}")
        lines.append(f"Next: shardvit check {self.out}")
        return lines

    def _duplicate_lines(self, *, dropped: bool) -> list[str]:
        counts = self.counts
        if not counts.duplicates:
            return ["  duplicates: none"]
        where = f"({counted(counts.groups, 'group')}): see {self.out / DUPLICATES_FILE}"
        found = (
            f"{counted(counts.duplicates, 'image')}{' left out' if dropped else ''} with the bytes of an earlier one"
        )
        lines = [f"  duplicates: {found} {where}"]
        if counts.straddling_groups:
            remedy = "the first of them keeps it" if len(self.manifests) > 2 else "train keeps it"
            remedy = remedy if dropped else "held-out figures will flatter; --drop-duplicates keeps one"
            splits = [manifest.split for manifest in self.manifests]
            several = (
                f"both in {splits[0]} and in {splits[-1]}" if len(splits) == 2 else f"in several of {', '.join(splits)}"
            )
            lines.append(f"  ! {counted(counts.straddling_groups, 'group')} {several}: {remedy}")
        if counts.contradicting_groups:
            remedy = "the first one's label counts" if dropped else "look at them, one of the labels is wrong"
            lines.append(f"  ! {counted(counts.contradicting_groups, 'group')} with labels that differ: {remedy}")
        return lines


def count(groups: Sequence[Line], *, num_unreadable: int, num_excluded: int = 0, num_unsure: int = 0) -> Counts:
    """Count what the lists hold."""
    return Counts(
        unreadable=num_unreadable,
        excluded=num_excluded,
        unsure=num_unsure,
        duplicates=sum(len(group["images"]) - 1 for group in groups),
        groups=len(groups),
        straddling_groups=sum(len({image["split"] for image in group["images"]}) > 1 for group in groups),
        contradicting_groups=sum(
            any(image["label"] != group["images"][0]["label"] for image in group["images"]) for group in groups
        ),
    )


def equal_groups(digests: bytes) -> list[list[int]]:
    """Numbers of the images with equal digests (`DIGEST_BYTES` each; zeros: unknown), in ascending order."""
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)
    order = np.lexsort(halves.T[::-1])  # stable, so ascending within a group
    differs = np.any(halves[order][1:] != halves[order][:-1], axis=1)
    runs = np.split(order, np.flatnonzero(differs) + 1)
    return sorted(run.tolist() for run in runs if len(run) > 1 and halves[run[0]].any())


def unreadable_files(plan: PackPlan, records: Mapping[str, ShardRecord]) -> list[Line]:
    """The unreadable images in the records, in plan order."""
    return [
        {
            "path": shard.images.trace(int(shard.indices[refused.position])),
            "split": shard.split,
            "label": plan.names(shard.labels[refused.position]),
            "reason": refused.reason,
        }
        for shard in plan.shards
        for refused in records[shard.file].refused
    ]


def unlabelled_files(source: Source) -> list[Line]:
    """The images that the source left out."""
    reason = "it is not in a class folder, so it has no label"
    return [{"path": path, "split": split, "label": None, "reason": reason} for split, path in source.left_out]


def duplicate_groups(
    plan: PackPlan, digests: bytes, *, duplicates: Literal["keep", "drop"], unreadable: Sequence[Line]
) -> list[Line]:
    """Groups of planned images with equal `digests`, both in plan order: train before val before test.

    If duplicates are dropped, the first of each group is packed.
    """
    bad = {file["path"] for file in unreadable}
    groups: list[Line] = []
    for numbers in equal_groups(digests):
        images: list[Line] = []
        for shard, position in plan.locate(numbers):
            path = shard.images.trace(int(shard.indices[position]))
            images.append(
                {
                    "path": path,
                    "key": shard.key(position),
                    "split": shard.split,
                    "label": plan.names(shard.labels[position]),
                    "packed": path not in bad and (duplicates == "keep" or not images),
                }
            )
        start = numbers[0] * DIGEST_BYTES
        groups.append({"digest": digests[start : start + DIGEST_BYTES].hex(), "images": images})
    return groups


def repeated(plan: PackPlan, source: Source, digests: bytes) -> dict[SplitName, NDArray[np.bool_]]:
    """Marks, per split of the source, the images that equal an earlier one of the plan."""
    marks: dict[SplitName, NDArray[np.bool_]] = {
        split: np.zeros(len(images), dtype=np.bool_) for split, images in source.splits.items()
    }
    for shard, position in plan.locate([number for group in equal_groups(digests) for number in group[1:]]):
        marks[shard.source_split][shard.indices[position]] = True
    return marks


def write_lines(lines: Iterable[Line], path: Path) -> None:
    """One JSON entry a line."""
    # backslashreplace turns bytes in a file's name that are not UTF-8 into JSON escapes.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    flush(path)


def unreadable_error(files: Sequence[Line], source: Source, plan: PackPlan, out: Path) -> UserError:
    """The error that names the first of them; the whole list is written beside OUT."""
    path = list_beside(out)
    write_lines(files, path)
    first = "; ".join(f"{file['path']} ({file['reason']})" for file in files[:_MOST_NAMED])
    more = f"; and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return UserError(
        f"{source.spec}: {len(files):,} of {plan.num_images:,} images cannot be read: {first}{more}; all are listed "
        f"in {path}: fix or remove them, or add --skip-unreadable, and the command goes on from here"
    )


def list_beside(out: Path) -> Path:
    """`a/OUT` -> `a/OUT.unreadable.jsonl`."""
    return out.with_name(f"{out.name}.{UNREADABLE_FILE}")
