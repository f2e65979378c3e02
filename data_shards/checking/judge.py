"""Judge the scan of a split (faults, duplicates, classes, stray tars), and leaks between splits.

Duplicates are found by sorting 16-byte hashes: about a second and 80 MB for a million samples.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.findings import MOST_PLACES, Finding, FoundAt, finding
from shardvit.data_shards.checking.scan import SAMPLE, PartScan
from shardvit.data_shards.shards.labels import similar_names
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.manifest import MANIFEST_FILE
from shardvit.data_shards.shards.shard_set import ShardSet, class_difference

Int64s = NDArray[np.int64]

_UNEVEN = 2.0  # times the median: a larger shard is reported
_MOST_UNPACKED = 64  # parts whose keys stay decompressed


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class SplitSummary:
    """Figures of one split, without lost samples; fields are the JSON's (see `page`)."""

    split: str
    name: str
    source: str
    digest: str
    samples: int  # found
    samples_stated: int  # by the manifest
    shards: int
    bytes: int  # of all tars
    multi_label: bool
    classes: dict[str, int]  # name -> samples, in the order of the class numbers
    samples_per_shard: Spread | None
    bytes_per_shard: Spread | None
    bytes_per_image: Spread | None
    formats: dict[str, int]  # format -> images
    height: Spread | None  # pixels; None unless decoded
    width: Spread | None
    decode_ms: float | None  # CPU time of an image on one core


class SplitScan:
    """Merge the parts of one split; samples are numbered across parts."""

    def __init__(self, shards: ShardSet, parts: Sequence[PartScan]) -> None:
        self.shards = shards
        self.parts = parts
        self.samples = np.concatenate([np.empty(0, SAMPLE), *(part.samples for part in parts)])
        self.sizes = [0] * len(shards.shards)  # samples found in each shard
        self.shard_bytes: list[int | None] = [None] * len(shards.shards)  # None: the tar is missing
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(part.class_counts)
            self.sizes[part.part.shard] += len(part.samples)
            if part.part.number == 0:
                self.shard_bytes[part.part.shard] = part.num_bytes
        self.class_counts = [counts[number] for number in range(shards.num_classes)]
        self._first_sample = np.cumsum([0, *(len(part.samples) for part in parts)])
        self._keys = lru_cache(_MOST_UNPACKED)(lambda number: parts[number].keys)
        folders = {shard.name.rpartition("/")[0] for shard in shards.shards}
        self._common = folders.pop() if len(folders) == 1 else shards.source

    def shard_name(self, shard: int) -> str:
        return self.shards.shards[shard].name.removeprefix(f"{self._common.rstrip('/')}/")

    def place(self, sample: int, detail: str = "") -> FoundAt:
        number = int(np.searchsorted(self._first_sample, sample, side="right")) - 1
        key = self._keys(number)[sample - int(self._first_sample[number])]
        return FoundAt(self.shard_name(self.parts[number].part.shard), key, detail)

    def summary(self) -> SplitSummary:
        shards = self.shards
        formats = sum((part.formats for part in self.parts), Counter[str]())
        known_bytes = [num_bytes for num_bytes in self.shard_bytes if num_bytes is not None]
        decoded = self.samples[self.samples["height"] > 0]
        seconds = sum(part.decode_seconds for part in self.parts)
        return SplitSummary(
            split=shards.split,
            name=shards.name,
            source=shards.source,
            digest=shards.digest,
            samples=len(self.samples),
            samples_stated=shards.num_samples,
            shards=len(shards.shards),
            bytes=sum(known_bytes),
            multi_label=shards.is_multi_label,
            classes=dict(zip(shards.classes, self.class_counts, strict=True)),
            samples_per_shard=spread(self.sizes),
            bytes_per_shard=spread(known_bytes),
            bytes_per_image=spread(self.samples["image_bytes"]),
            formats=dict(formats.most_common()),
            height=spread(decoded["height"]),
            width=spread(decoded["width"]),
            decode_ms=1000 * seconds / len(decoded) if len(decoded) else None,
        )


def spread(numbers: Sequence[int] | NDArray[Any]) -> Spread | None:
    """Summarise numbers; None if there are none."""
    if not len(numbers):
        return None
    median = float(np.median(numbers))
    return Spread(int(np.min(numbers)), int(median) if median.is_integer() else median, int(np.max(numbers)))


def split_findings(scan: SplitScan, *, digests: bool) -> list[Finding]:
    """Judge one split; `digests`: whether SHA-256 was to be compared."""
    shards, split = scan.shards, scan.shards.split
    counts: Counter[str] = Counter()
    places: dict[str, list[FoundAt]] = defaultdict(list)
    for part in scan.parts:
        counts.update(part.fault_counts)
        shard = scan.shard_name(part.part.shard)
        for kind, faults in part.faults.items():
            places[kind] += [fault._replace(shard=shard) for fault in faults[: MOST_PLACES - len(places[kind])]]
    findings = [finding(kind, split=split, count=count, places=places[kind]) for kind, count in counts.items()]

    def add(kind: str, *, details: Iterable[str], shards: Iterable[str] = ()) -> None:
        found = [FoundAt("", "", detail) for detail in details] + [FoundAt(shard, "", "") for shard in shards]
        if found:
            findings.append(finding(kind, split=split, count=len(found), places=found))

    faulty = {shards.shards[part.part.shard].name for part in scan.parts if part.faults}
    add("damage", details=[each for each in shards.damage if not any(name in each for name in faulty)])
    if not shards.num_samples and not findings:
        findings.append(finding("unusable-set", split=split, message="there are no samples in it"))
    findings += _duplicates(scan)
    add("extra-tar", details=(), shards=_extra_tars(shards))
    if len(scan.samples) >= shards.num_samples:  # else an empty class may have lost its samples
        counted = zip(shards.classes, scan.class_counts, strict=True)
        add("empty-class", details=[name for name, count in counted if not count])
    add("alike-classes", details=[", ".join(map(repr, names)) for names in similar_names(shards.classes)])
    if shards.num_classes == 1 and not shards.is_multi_label:
        add("one-class", details=shards.classes)
    sizes = spread([size for size in scan.sizes if size])
    if sizes is not None and len(scan.sizes) >= 3 and sizes.max > _UNEVEN * sizes.median:
        message = f"the shards are of very different sizes: {sizes.min:,} to {sizes.max:,} samples"
        findings.append(finding("uneven-shards", split=split, message=message))
    unknown = sum(not entry.sha256 for entry in shards.shards)
    if digests and unknown:
        findings.append(finding("no-digests", split=split, count=unknown))
    return findings


def findings_across(scans: Sequence[SplitScan]) -> list[Finding]:
    """Judge splits against each other."""
    findings: list[Finding] = []
    for one, other in combinations(scans, 2):
        splits = f"{one.shards.split} and {other.shards.split}"
        if difference := class_difference(one.shards, other.shards, called=(one.shards.split, other.shards.split)):
            findings.append(finding("class-list", split=splits, places=[FoundAt("", "", difference)]))
        count, places = _leaks(one, other)
        if count:
            findings.append(finding("leaked-image", split=splits, count=count, places=places))
    return findings


@dataclass(frozen=True)
class Groups:
    """Groups of equal samples: `members[starts[g] : starts[g + 1]]` are the samples of group g, ascending."""

    members: Int64s  # [samples with an equal]
    starts: Int64s  # [groups + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Int64s:
        return self.members[self.starts[number] : self.starts[number + 1]]

    def differ(self, values: Int64s) -> NDArray[np.bool_]:
        """Mark groups with unequal `values` (one per sample)."""
        own = values[self.members]
        return np.minimum.reduceat(own, self.starts[:-1]) != np.maximum.reduceat(own, self.starts[:-1])


def equal_groups(hashes: NDArray[np.uint64], *, among: NDArray[np.bool_] | None = None) -> Groups:
    """Group samples (`among` those marked) with equal hashes, [samples(, words)]; ordered by first sample."""
    words = hashes if hashes.ndim == 2 else hashes[:, None]
    samples = np.arange(len(words)) if among is None else np.flatnonzero(among)
    words = words[samples]
    by_hash = np.lexsort(words.T)  # stable: equal ones stay in their order
    samples, words = samples[by_hash], words[by_hash]
    same = np.zeros(len(samples) + 1, np.bool_)  # equals the one before
    same[1:-1] = (words[1:] == words[:-1]).all(axis=1)
    in_group = same[:-1] | same[1:]
    members, is_first = samples[in_group], ~same[:-1][in_group]
    group = np.cumsum(is_first) - 1
    by_first_sample = np.lexsort((members, members[is_first][group])) if len(members) else np.empty(0, np.int64)
    starts = np.append(np.flatnonzero(is_first[by_first_sample]), len(members)).astype(np.int64)
    return Groups(members[by_first_sample].astype(np.int64), starts)


def _duplicates(scan: SplitScan) -> list[Finding]:
    labels = scan.samples["label_code"]
    images = equal_groups(scan.samples["image_hash"], among=scan.samples["is_whole"])
    keys = equal_groups(scan.samples["key_hash"])
    contradict = images.differ(labels)

    def copy(kind: str, sample: int, first: int) -> FoundAt:
        original = scan.place(first)
        if kind == "duplicate-key":
            return scan.place(sample, f"as in {original.shard}")
        where = f"{original.key} in {original.shard}"
        if kind == "duplicate-image" or labels[sample] == labels[first]:
            return scan.place(sample, f"the same image and label as {where}")
        own, other = (_label(scan.shards, int(labels[each])) for each in (sample, first))
        return scan.place(sample, f"here {own}; as {where} it is {other}")

    findings: list[Finding] = []
    for kind, groups, numbers in (
        ("contradicting-label", images, np.flatnonzero(contradict).tolist()),
        ("duplicate-image", images, np.flatnonzero(~contradict).tolist()),
        ("duplicate-key", keys, range(len(keys))),
    ):
        places: list[FoundAt] = []
        for number in numbers:
            first, *others = groups[number][: MOST_PLACES - len(places) + 1].tolist()
            places += [copy(kind, other, first) for other in others]
        if numbers:
            findings.append(finding(kind, split=scan.shards.split, count=len(numbers), places=places))
    return findings


def _label(shards: ShardSet, code: int) -> str:
    return shards.classes[code] if 0 <= code < shards.num_classes else "another list of labels"


def _leaks(one: SplitScan, other: SplitScan) -> tuple[int, list[FoundAt]]:
    both = np.concatenate([one.samples, other.samples])
    labels, num_own = both["label_code"], len(one.samples)
    groups = equal_groups(both["image_hash"], among=both["is_whole"])
    is_in_both = groups.differ((np.arange(len(both)) >= num_own).astype(np.int64))
    places = []
    for group in np.flatnonzero(is_in_both)[:MOST_PLACES].tolist():
        members = groups[group]
        first, second = int(members[0]), int(members[members >= num_own][0])
        original = one.place(first)
        detail = f"also in {one.shards.split}: {original.key} in {original.shard}"
        if one.shards.classes == other.shards.classes and labels[first] != labels[second]:
            here, there = (_label(one.shards, int(labels[each])) for each in (second, first))
            detail += f", there as {there}, here as {here}"
        places.append(other.place(second - num_own, detail))
    return int(is_in_both.sum()), places


def _extra_tars(shards: ShardSet) -> list[str]:
    if not shards.source or not is_local(shards.source):
        return []
    folder = local_path(shards.source)
    if not (folder / MANIFEST_FILE).is_file():
        return []
    known = {os.path.realpath(local_path(entry.url)) for entry in shards.shards if is_local(entry.url)}
    return sorted(path.name for path in folder.glob("*.tar") if os.path.realpath(path) not in known)
