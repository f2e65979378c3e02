"""`check --against`: each split compared with other sets, and what is found as findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from data_shards.checking.findings import MOST_PLACES, Finding, FoundAt, finding
from data_shards.checking.near_duplicates.collection import Collection, ShardImages
from data_shards.checking.near_duplicates.matches import MATCH_KINDS, Match, Matches, MatchKind, find_matches
from data_shards.images.decode import PixelLimit
from data_shards.shards.shard_set import ShardSet
from data_shards.store.store import Store

_MEANING: dict[MatchKind, str] = {
    "equal-bytes": "equal bytes of",
    "equal-pixels": "equal pixels of",
    "near-duplicate": "near-duplicates of",
    "unsure": "perhaps near-duplicates of",
}


@dataclass(frozen=True)
class Against:
    """How many images of a split are also in another set; the fields are those of the JSON (see `page`)."""

    split: str
    source: str
    digest: str
    equal_bytes: int
    equal_pixels: int
    near_duplicates: int
    unsure: int


def compare_splits(
    splits: Sequence[ShardSet],
    others: Sequence[ShardSet],
    *,
    store: Store,
    pixel_limit: PixelLimit,
    processes: int | None,
    report: Callable[[str], None],
) -> list[Matches]:
    """The matches of each split; one of several splits is not compared with itself, a single one is."""
    found: list[Matches] = []
    for split in splits:
        theirs = [other for other in others if other.digest != split.digest or len(splits) == 1]
        if theirs:
            images = ShardImages(split, store, damaged="report")
            collections = [ShardImages(other, store) for other in theirs]
            found.append(find_matches(images, collections, pixel_limit=pixel_limit, processes=processes, report=report))
    return found


def match_findings(found: Matches) -> list[Finding]:
    """What the matches of one split mean: a problem, but a warning within one set, and only a note if unsure."""
    split = _split(found)
    findings: list[Finding] = []
    for number, other in enumerate(found.others):
        within = other.digest == found.images.digest
        for kind in MATCH_KINDS:
            matches = [match for match in found.matches if (match.kind, match.collection) == (kind, number)]
            if not matches:
                continue
            images = f"{len(matches):,} image{'' if len(matches) == 1 else 's'}"
            where = "earlier images of the set" if within else f"images of {other.name}"
            is_copied = within and kind != "unsure"
            findings.append(
                finding(
                    kind,
                    split=split,
                    count=len(matches),
                    message=f"{images}: {_MEANING[kind]} {where}",
                    places=[_found_at(found, match) for match in islice(matches, MOST_PLACES)],
                    severity="warning" if is_copied else None,
                    remedy="they are trained on more often than others: drop the copies at the source if that is not "
                    "meant"
                    if is_copied
                    else "",
                )
            )
    for name, count in found.undecoded.items():
        message = f"{count:,} image{'' if count == 1 else 's'} of {name} cannot be decoded: compared by bytes alone"
        findings.append(finding("not-compared", split=split, count=count, message=message))
    return findings


def summaries(found: Matches) -> list[Against]:
    """In numbers, for each of the others."""
    counts = [
        [sum((match.kind, match.collection) == (kind, number) for match in found.matches) for kind in MATCH_KINDS]
        for number in range(len(found.others))
    ]
    pairs = zip(found.others, counts, strict=True)
    return [Against(_split(found), other.name, _shards(other).digest, *numbers) for other, numbers in pairs]


def _split(found: Matches) -> str:
    return _shards(found.images).split


def _shards(collection: Collection) -> ShardSet:
    assert isinstance(collection, ShardImages)
    return collection.shards


def _found_at(found: Matches, match: Match) -> FoundAt:
    image, other = found.place(match), found.other_place(match)
    how = "" if match.kind.startswith("equal") else f"{match.likeness:.3f}{', mirrored' if match.mirrored else ''}: "
    tar, other_tar = (part.rpartition("/")[2] for part in (image.part, other.part))
    return FoundAt(tar, image.key, f"{how}{other.key} in {other_tar}")
