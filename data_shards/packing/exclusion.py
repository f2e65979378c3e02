"""Leave out training images that are also in other sets, such as test sets, and list them.

OUT/excluded.jsonl has one image a line: path, split, label; kind, likeness and mirrored (see `matches`); the other set,
and shard and key there. OUT/unsure.jsonl has images that may be in another set and were packed. OUT/excluded.html shows
both as pairs. Decodes every training image once more; fingerprints are kept in the user's cache, so a packing that was
killed does not decode them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.checking.near_duplicates.collection import ImagePlace, ShardImages, UnreadNow
from data_shards.checking.near_duplicates.matches import Match, Matches, find_matches
from data_shards.durable import replace_lines
from data_shards.packing.found import EXCLUDED_FILE, UNSURE_FILE
from data_shards.packing.request import PackRequest
from data_shards.packing.shard_plan import Line, Marks, PackPlan, ShardPlan, marks_of
from data_shards.packing.sources.base import Source
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
        return ImagePlace(self.name, self._plans[part].trace(row))


def _digest(plan: ShardPlan) -> str:
    digest = hashlib.sha256()
    for index in plan.indices.tolist():
        stamp = plan.images.stamp(index)
        digest.update(f"{len(stamp)}\0".encode())
        digest.update(stamp)
    return digest.hexdigest()


@dataclass(frozen=True)
class Excluded:
    """Matches of training images; train comes first in `plan`, so its numbers are those of `plan.locate`."""

    plan: PackPlan
    matches: Matches
    marks: Marks  # images to leave out

    def counts(self) -> tuple[int, int]:
        """Images left out, and images packed that may be in another set."""
        out, unsure = ({match.image for match in each} for each in self._sorted_out())
        return len(out), len(unsure)

    def write(self, folder: Path, request: PackRequest) -> None:
        """Write the lists and the page into `folder`, if there is anything to list."""
        for name, matches in zip((EXCLUDED_FILE, UNSURE_FILE), self._sorted_out(), strict=True):
            if matches:
                replace_lines(folder / name, map(self._line, matches))
        show = request.exclusion and request.exclusion.show
        if self.matches.matches and show:
            show(folder / EXCLUDED_PAGE, [self.matches], request.pixel_limit)

    def _sorted_out(self) -> tuple[list[Match], list[Match]]:
        """The matches of images that are left out, and the others."""
        out = _certain(self.matches)
        images = {match.image for match in out}
        return out, [match for match in self.matches.matches if match.image not in images]

    def _line(self, match: Match) -> Line:
        ((shard, position),) = self.plan.locate([match.image])
        how = {"kind": match.kind, "likeness": match.likeness, "mirrored": match.mirrored}
        against, other = self.matches.others[match.collection].name, self.matches.other_place(match)._asdict()
        return {**shard.line(position), **how, "against": against, "other": other}


def find_excluded(plan: PackPlan, source: Source, request: PackRequest, *, report: Report) -> Excluded | None:
    """None if nothing is to be excluded. Raises UserError if one of the other sets cannot be read."""
    if request.exclusion is None:
        return None
    images = PlannedImages(plan.splits["train"], name=source.spec)
    others = [ShardImages(shards, request.exclusion.store) for shards in request.exclusion.sets]
    found = find_matches(images, others, pixel_limit=request.pixel_limit, report=report)
    for other in others:
        if bad := found.undecoded.get(other.name):
            report(f"{bad:,} images of {other.name} cannot be decoded: they are compared by their bytes alone")
    return Excluded(plan, found, marks_of(source, plan.locate([match.image for match in _certain(found)])))


def _certain(found: Matches) -> list[Match]:
    return [match for match in found.matches if match.kind != "unsure"]
