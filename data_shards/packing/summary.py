"""What a packing ends with: the figures, and the lines that the user reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_shards.manifest import Manifest
from data_shards.packing.found import UNREADABLE_FILE, Counts
from data_shards.text import show_bytes, show_duration

DUPLICATES_FILE = "duplicates.jsonl"


@dataclass(frozen=True)
class PackReport:
    """What OUT holds. `reused`: it was there already, from the same request, and nothing was written."""

    out: Path
    manifests: tuple[Manifest, ...]
    counts: Counts
    reused: bool
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
        """The report, a line each; `dropped` tells what became of duplicates."""
        verb = "was packed before, with" if self.reused else f"packed in {show_duration(self.seconds)}:"
        lines = [f"{self.out}: {verb} {self.num_images:,} images of {self.train.num_classes:,} classes"]
        for manifest in self.manifests:
            lines.append(
                f"  {manifest.split:<6} {manifest.num_samples:>11,} images {len(manifest.shards):>7,} shards"
                f" {show_bytes(manifest.num_bytes):>9}"
            )
        lines += self._duplicate_lines(dropped=dropped)
        unreadable = "none"
        if self.counts.unreadable:
            unreadable = f"{_several(self.counts.unreadable, 'image')} left out: see {self.out / UNREADABLE_FILE}"
        lines.append(f"  unreadable: {unreadable}")
        lines.append(f"Next: shardvit check {self.out}")
        return lines

    def _duplicate_lines(self, *, dropped: bool) -> list[str]:
        counts = self.counts
        if not counts.duplicates:
            return ["  duplicates: none"]
        where = f"({_several(counts.groups, 'group')}): see {self.out / DUPLICATES_FILE}"
        found = (
            f"{_several(counts.duplicates, 'image')}{' left out' if dropped else ''} with the bytes of an earlier one"
        )
        lines = [f"  duplicates: {found} {where}"]
        if counts.straddling_groups:
            remedy = "the first of them keeps it" if len(self.manifests) > 2 else "train keeps it"
            remedy = remedy if dropped else "held-out figures will flatter; --drop-duplicates keeps one"
            splits = [manifest.split for manifest in self.manifests]
            several = (
                f"both in {splits[0]} and in {splits[-1]}" if len(splits) == 2 else f"in several of {', '.join(splits)}"
            )
            lines.append(f"  ! {_several(counts.straddling_groups, 'group')} {several}: {remedy}")
        if counts.contradicting_groups:
            remedy = "the first one's label counts" if dropped else "look at them, one of the labels is wrong"
            lines.append(f"  ! {_several(counts.contradicting_groups, 'group')} with labels that differ: {remedy}")
        return lines


def _several(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
