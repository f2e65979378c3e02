"""List and count duplicate and unreadable images of a packing.

OUT/duplicates.jsonl has a group of equal images per line: the digest, and each image's path, key, split, label (a list
if multi-label) and whether it was packed. OUT/unreadable.jsonl (next to OUT if they stop the packing) has an image per
line: path, split, label, reason. Neither is written empty. Costs 16 bytes and about 0.5 µs an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardvit.data_shards.checking.judge import equal_groups
from shardvit.data_shards.durable import lines_text, replace_lines
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.plan_file import PackJob
from shardvit.data_shards.packing.shard_plan import Line
from shardvit.data_shards.packing.shard_writer import DIGEST_BYTES
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.text import counted, show_bytes, show_duration

DUPLICATES_FILE = "duplicates.jsonl"
UNREADABLE_FILE = "unreadable.jsonl"
EXCLUDED_FILE = "excluded.jsonl"
UNSURE_FILE = "unsure.jsonl"
_MOST_NAMED = 5  # unreadable images in a message


@dataclass(frozen=True)
class Counts:
    """Counts for `pack.json`; `duplicates` leaves out the first image of each group."""

    unreadable: int = 0
    duplicates: int = 0
    groups: int = 0
    straddling_groups: int = 0  # groups in several splits
    contradicting_groups: int = 0  # groups labelled differently
    excluded: int = 0  # images left out because another set has them
    unsure: int = 0  # packed images that another set may have


@dataclass(frozen=True)
class PackReport:
    """Contents of OUT. `compared`: what was compared with the source, if OUT existed before."""

    out: str  # a local path or a URL
    manifests: tuple[Manifest, ...]
    counts: Counts
    compared: str
    lists: str  # folder of the lists
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
        verb = "was packed before, with" if self.compared else f"packed in {show_duration(self.seconds)}:"
        classes = counted(self.train.num_classes, "class")
        lines = [f"{redacted(self.out)}: {verb} {counted(self.num_images, 'image')} of {classes}"]
        for manifest in self.manifests:
            lines.append(
                f"  {manifest.split:<6} {counted(manifest.num_samples, 'image'):>18}"
                f" {counted(len(manifest.shards), 'shard'):>14} {show_bytes(manifest.num_bytes):>9}"
            )
        lines += self._duplicate_lines(dropped=dropped)
        for label, what, file in (
            ("excluded", "left out of train that are also in other sets", EXCLUDED_FILE),
            ("unsure", "packed in train that may be in other sets", UNSURE_FILE),
            ("unreadable", "left out", UNREADABLE_FILE),
        ):
            if number := getattr(self.counts, label):
                lines.append(f"  {label}: {counted(number, 'image')} {what}: see {join(self.lists, file)}")
            elif label == "unreadable":
                lines.append("  unreadable: none")
        lines += [f"  compared: {self.compared}"] if self.compared else []
        return [*lines, f"Next: shardvit check {self.out}"]

    def _duplicate_lines(self, *, dropped: bool) -> list[str]:
        counts, splits = self.counts, [manifest.split for manifest in self.manifests]
        if not counts.duplicates:
            return ["  duplicates: none"]
        images = f"{counted(counts.duplicates, 'image')}{' left out' * dropped} with the bytes of an earlier one"
        lines = [f"  duplicates: {images} ({counted(counts.groups, 'group')}): see {join(self.lists, DUPLICATES_FILE)}"]
        if counts.straddling_groups:
            where, keeper = f"both in {splits[0]} and in {splits[-1]}", "train"
            if len(splits) > 2:
                where, keeper = f"in several of {', '.join(splits)}", "the first of them"
            remedy = f"{keeper} keeps it" if dropped else "held-out figures will flatter; --drop-duplicates keeps one"
            lines.append(f"  ! {counted(counts.straddling_groups, 'group')} {where}: {remedy}")
        if counts.contradicting_groups:
            remedy = "the first one's label counts" if dropped else "look at them, one of the labels is wrong"
            lines.append(f"  ! {counted(counts.contradicting_groups, 'group')} with labels that differ: {remedy}")
        return lines


def count_groups(groups: Sequence[Line]) -> dict[str, int]:
    """Count duplicates for `Counts`."""
    images = [group["images"] for group in groups]
    return {
        "duplicates": sum(map(len, images)) - len(groups),
        "groups": len(groups),
        "straddling_groups": sum(len({image["split"] for image in each}) > 1 for each in images),
        "contradicting_groups": sum(any(image["label"] != each[0]["label"] for image in each) for each in images),
    }


def equal_digests(digests: bytes) -> list[list[int]]:
    """Group image numbers by equal digests (`DIGEST_BYTES` each, zeros ignored), ascending."""
    words = np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)
    groups = equal_groups(words, among=np.asarray(words.any(axis=1)))
    return [groups[number].tolist() for number in range(len(groups))]


def duplicate_groups(job: PackJob, digests: bytes, *, unreadable: Sequence[Line]) -> list[Line]:
    """List groups of equal images in plan order; if duplicates are dropped, only the first of each is packed."""
    bad = {file["path"] for file in unreadable}
    groups = equal_digests(digests)
    lines = job.lines(job.whole, (number for numbers in groups for number in numbers))
    entries: list[Line] = []
    for numbers in groups:
        images: list[Line] = []
        for line in map(lines.__getitem__, numbers):
            is_packed = line["path"] not in bad and not (images and job.whole is not job.plan)
            images.append({**line, "packed": is_packed})
        start = numbers[0] * DIGEST_BYTES
        entries.append({"digest": digests[start : start + DIGEST_BYTES].hex(), "images": images})
    return entries


def unreadable_error(files: Sequence[Line], job: PackJob) -> UserError:
    """Make an error that names the first unreadable images, and list all next to OUT, or in a store's work folder."""
    if is_local(job.out):
        path = str(list_beside(local_path(job.out)))
        replace_lines(Path(path), files)
    else:
        job.work.write(UNREADABLE_FILE, lines_text(files))
        path = redacted(job.work.at(UNREADABLE_FILE).location)
    first = "; ".join(f"{file['path']} ({file['reason']})" for file in files[:_MOST_NAMED])
    more = f"; and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return UserError(
        f"{job.source}: {len(files):,} of {sum(job.plan.sizes):,} images cannot be read: {first}{more}; all are listed "
        f"in {path}: fix or remove them, or add --skip-unreadable, and the command resumes from here"
    )


def list_beside(out: Path) -> Path:
    """`a/OUT` -> `a/OUT.unreadable.jsonl`."""
    return out.with_name(f"{out.name}.{UNREADABLE_FILE}")
