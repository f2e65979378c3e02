"""Training images that are also in other sets, such as test sets: left out of the packing, and listed.

OUT/excluded.jsonl has one image a line: path, split, label; kind, likeness and mirrored (see `duplicates.matches`); the
set that it is in, and its shard and key there. OUT/unsure.jsonl has those that may be in another set and were packed.
OUT/excluded.html shows both as pairs. Only the split train loses images.
Decodes every training image once more; what is known of them is kept in the user's cache, so a packing that was killed
does not decode them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.near_duplicates.collection import ImagePlace, ShardImages, UnreadNow
from data_shards.checking.near_duplicates.matches import Match, Matches, find_matches
from data_shards.checking.near_duplicates.page import write_page
from data_shards.packing.found import EXCLUDED_FILE, UNSURE_FILE, write_lines
from data_shards.packing.request import PackRequest
from data_shards.packing.shard_plan import PackPlan, ShardPlan
from data_shards.packing.sources.base import Source, SplitName
from data_shards.shards.shard_set import Report

EXCLUDED_PAGE = "excluded.html"


class PlannedImages:
    """The images of planned shards, as a collection to compare."""

    read_by: Literal["processes", "threads"] = "threads"  # a source may be large, and need not be sent to processes

    def __init__(self, plans: Sequence[ShardPlan], *, name: str) -> None:
        self._plans, self.name = plans, name
        self.sizes = [len(plan) for plan in plans]
        self._digests = [_digest(plan) for plan in plans]
        self.digest = hashlib.sha256(repr(self._digests).encode()).hexdigest()

    def part_digest(self, part: int) -> str:
        return self._digests[part]

    def read(self, part: int, row: int) -> bytes:
        plan = self._plans[part]
        try:
            return plan.images.read(int(plan.indices[row]))
        except OSError as error:
            raise UnreadNow(error.strerror or str(error)) from None

    def place(self, part: int, row: int) -> ImagePlace:
        plan = self._plans[part]
        return ImagePlace(self.name, plan.images.trace(int(plan.indices[row])))

    def locate(self, number: int) -> tuple[ShardPlan, int]:
        """Shard and position of an image, numbered through all of them."""
        starts = np.cumsum([0, *self.sizes])
        part = int(np.searchsorted(starts, number, side="right")) - 1
        return self._plans[part], number - int(starts[part])


def _digest(plan: ShardPlan) -> str:
    digest = hashlib.sha256()
    for index in plan.indices.tolist():
        stamp = plan.images.stamp(index)
        digest.update(f"{len(stamp)}\0".encode())
        digest.update(stamp)
    return digest.hexdigest()


@dataclass(frozen=True)
class Excluded:
    """What is left out; `marks` is bool [images] for each split of the source."""

    plan: PackPlan
    images: PlannedImages
    found: Matches
    marks: dict[SplitName, NDArray[np.bool_]]

    def counts(self) -> tuple[int, int]:
        """Images left out, and images packed that may be in another set."""
        out, unsure = ({match.image for match in each} for each in self._sorted_out())
        return len(out), len(unsure)

    def write(self, folder: Path, request: PackRequest) -> None:
        """Write the lists and the page into `folder`, if there is anything to list."""
        for name, matches in zip((EXCLUDED_FILE, UNSURE_FILE), self._sorted_out(), strict=True):
            if matches:
                write_lines(map(self._line, matches), folder / name)
        if self.found.matches:
            write_page(folder / EXCLUDED_PAGE, [self.found], limit=request.pixel_limit)

    def _sorted_out(self) -> tuple[list[Match], list[Match]]:
        """The matches of images that are left out, and the others."""
        out = _same(self.found)
        images = {match.image for match in out}
        return out, [match for match in self.found.matches if match.image not in images]

    def _line(self, match: Match) -> dict[str, Any]:
        shard, position = self.images.locate(match.image)
        return {
            "path": shard.images.trace(int(shard.indices[position])),
            "split": shard.split,
            "label": self.plan.names(shard.labels[position]),
            "kind": match.kind,
            "likeness": match.likeness,
            "mirrored": match.mirrored,
            "against": self.found.others[match.collection].name,
            "other": self.found.other_place(match)._asdict(),
        }


def find_excluded(plan: PackPlan, source: Source, request: PackRequest, *, report: Report) -> Excluded | None:
    """None if nothing is to be excluded. Raises UserError if one of the other sets cannot be read."""
    exclusion = request.exclusion
    if exclusion is None:
        return None
    images = PlannedImages(plan.splits["train"], name=source.spec)
    others = [ShardImages(shards, exclusion.store) for shards in exclusion.sets]
    found = find_matches(images, others, pixel_limit=request.pixel_limit, report=report)
    for other in others:
        if bad := found.undecoded.get(other.name):
            report(f"{bad:,} images of {other.name} cannot be decoded: they are compared by their bytes alone")
    marks: dict[SplitName, NDArray[np.bool_]] = {
        split: np.zeros(len(each), dtype=np.bool_) for split, each in source.splits.items()
    }
    for match in _same(found):
        shard, position = images.locate(match.image)
        marks[shard.source_split][shard.indices[position]] = True
    return Excluded(plan, images, found, marks)


def _same(found: Matches) -> list[Match]:
    """The matches that leave an image out: all but the unsure."""
    return [match for match in found.matches if match.kind != "unsure"]
