"""Exclude training images that are also in other sets, such as test sets, and list them.

OUT/excluded.jsonl has an image per line: path, split, label; kind, likeness and mirrored (see `matches`); the other
set, with shard and key there. OUT/unsure.jsonl lists packed images that may be in another set, and OUT/excluded.html
shows both as pairs. Decodes every training image once more; fingerprints stay in the user's cache for a retry.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from shardvit.data_shards.checking.near_duplicates.fingerprint import ImagePlace, ShardImages, UnreadNow
from shardvit.data_shards.checking.near_duplicates.matches import Match, Matches, find_matches
from shardvit.data_shards.durable import lines_text
from shardvit.data_shards.engines.engine import PartsEngine
from shardvit.data_shards.packing.found import EXCLUDED_FILE, UNSURE_FILE
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import Line, Marks, PackPlan, ShardPlan
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.store.folders import Folder

EXCLUDED_PAGE = "excluded.html"


class PlannedImages:
    """Planned shards as a collection to compare."""

    read_by: Literal["processes", "threads"] = "threads"  # a large source need not be pickled for processes

    def __init__(self, plans: Sequence[ShardPlan], *, name: str) -> None:
        self._plans, self.name = plans, name
        self.sizes = [len(plan) for plan in plans]
        self._digests = [_digest(plan) for plan in plans]
        self.digest = hashlib.sha256(repr(self._digests).encode()).hexdigest()

    def part_digest(self, part: int) -> str:
        return self._digests[part]

    def read(self, part: int, row: int) -> bytes:
        try:
            return self._plans[part].images.read(row)
        except OSError as error:
            raise UnreadNow(error.strerror or str(error)) from None

    def place(self, part: int, row: int) -> ImagePlace:
        return ImagePlace(self.name, self._plans[part].images.trace(row))


def _digest(plan: ShardPlan) -> str:
    return hashlib.sha256(plan.images.stamps.tobytes()).hexdigest()


@dataclass(frozen=True)
class Excluded:
    """Training images that are also in other sets."""

    matches: Matches
    marks: Marks  # images to leave out
    lines: dict[str, list[Line]]  # file -> its lines

    def count(self, file: str) -> int:
        return len({line["path"] for line in self.lines[file]})

    @property
    def counts(self) -> dict[str, int]:
        """For `Counts`."""
        return {"excluded": self.count(EXCLUDED_FILE), "unsure": self.count(UNSURE_FILE)}

    def write(self, folder: Folder, request: PackRequest) -> None:
        for file, lines in self.lines.items():
            if lines:
                folder.write(file, lines_text(lines))
        show = request.exclusion and request.exclusion.show
        if self.matches.matches and show:
            with tempfile.TemporaryDirectory() as scratch:
                show(Path(scratch) / EXCLUDED_PAGE, [self.matches], request.pixel_limit)
                folder.put(EXCLUDED_PAGE, Path(scratch) / EXCLUDED_PAGE)


def find_excluded(
    plan: PackPlan, source: Source, request: PackRequest, *, engine: PartsEngine | None, report: Report
) -> Excluded | None:
    """Find training images that are in other sets; None if no set was given. UserError if a set cannot be read.

    The sets are hashed on the engine, by default on this machine's processes; the images are, by its threads.
    """
    if request.exclusion is None:
        return None
    images = PlannedImages(plan.splits["train"], name=source.spec)
    others = [ShardImages(shards, request.exclusion.store) for shards in request.exclusion.sets]
    found = find_matches(images, others, pixel_limit=request.pixel_limit, engine=engine, report=report)
    for other in others:
        if bad := found.undecoded.get(other.name):
            report(f"{bad:,} images of {other.name} cannot be decoded: they are compared by their bytes alone")
    certain = [match for match in found.matches if match.kind != "unsure"]
    left_out = {match.image for match in certain}
    unsure = [match for match in found.matches if match.image not in left_out]
    lists = {EXCLUDED_FILE: certain, UNSURE_FILE: unsure}
    lines = {file: [_line(plan, found, match) for match in matches] for file, matches in lists.items()}
    marks = np.zeros(source.num_images, dtype=np.bool_)
    marks[plan.numbers[sorted(left_out)]] = True
    return Excluded(found, marks, lines)


def _line(plan: PackPlan, found: Matches, match: Match) -> Line:
    ((shard, position),) = plan.locate([match.image])  # train comes first in the plan, so its numbers are the same
    how = {"kind": match.kind, "likeness": match.likeness, "mirrored": match.mirrored}
    against, other = found.others[match.collection].name, found.other_place(match)._asdict()
    return {**shard.line(position), **how, "against": against, "other": other}
