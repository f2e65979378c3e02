"""What a scan of a split means: its faults gathered by kind, duplicates, classes, stray tars; and what splits share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.duplicates import Groups, equal_groups
from data_shards.checking.findings import MOST_PLACES, Finding, Kind, Place, finding
from data_shards.checking.split import SplitScan, spread
from data_shards.manifest import MANIFEST_FILE
from data_shards.shard_set import ShardSet
from data_shards.store.location import is_local, local_path

_UNEVEN = 2.0  # times the median that the largest shard has


def split_findings(scan: SplitScan, *, digests: bool) -> list[Finding]:
    """Everything noteworthy in one split; `digests`: whether they were to be compared."""
    shards, split = scan.shards, scan.shards.split
    counts: Counter[Kind] = Counter()
    places: dict[Kind, list[Place]] = {}
    for part in scan.parts:
        counts.update(part.fault_counts)
        for fault in part.faults:
            named = places.setdefault(fault.kind, [])
            if len(named) < MOST_PLACES:
                named.append(Place(scan.shard_name(part.part.shard), fault.key, fault.reason))
    findings = [finding(kind, split=split, count=count, places=places[kind]) for kind, count in counts.items()]
    faulty = {shards.shards[part.part.shard].name for part in scan.parts if part.faults}
    untold = [sentence for sentence in shards.damage if not any(name in sentence for name in faulty)]
    if untold:
        findings.append(
            finding("damage", split=split, count=len(untold), places=[Place("", "", sentence) for sentence in untold])
        )
    if not shards.num_samples and not findings:
        findings.append(finding("unusable-set", split=split, count=1, message="there are no samples in it"))
    findings += _duplicates(scan)
    extra = _extra_tars(shards)
    if extra:
        findings.append(
            finding("extra-tar", split=split, count=len(extra), places=[Place(name, "", "") for name in extra])
        )
    used = scan.class_counts()
    empty = [name for name, count in zip(shards.classes, used, strict=True) if not count]
    if empty and scan.num_samples >= shards.num_samples:  # or else they may be among the lost ones
        findings.append(
            finding("empty-class", split=split, count=len(empty), places=[Place("", "", name) for name in empty])
        )
    findings += _uneven(scan)
    unknown = sum(not entry.sha256 for entry in shards.shards)
    if digests and unknown:
        findings.append(finding("no-digests", split=split, count=unknown))
    return findings


def _duplicates(scan: SplitScan) -> list[Finding]:
    split, labels = scan.shards.split, scan.all("label_code")
    images = equal_groups(scan.all("image_hash"), among=scan.all("is_whole"))
    keys = equal_groups(scan.all("key_hash"))
    contradict = images.differ(labels)
    findings: list[Finding] = []

    def add(kind: Kind, groups: Groups, numbers: Iterable[int], *, count: int) -> None:
        if not count:
            return
        places: list[Place] = []
        for number in numbers:
            first, *others = groups[number][: MOST_PLACES - len(places) + 1].tolist()
            places += [_copy(scan, kind, other, first=first, labels=labels) for other in others]
            if len(places) == MOST_PLACES:
                break
        findings.append(finding(kind, split=split, count=count, places=places))

    add("contradicting-label", images, np.flatnonzero(contradict).tolist(), count=int(contradict.sum()))
    add("duplicate-image", images, np.flatnonzero(~contradict).tolist(), count=int((~contradict).sum()))
    add("duplicate-key", keys, range(len(keys)), count=len(keys))
    return findings


def _copy(scan: SplitScan, kind: Kind, sample: int, *, first: int, labels: NDArray[np.int64]) -> Place:
    """A second or further sample of a group, and what it has in common with the first."""
    original = scan.place(first)
    if kind == "duplicate-key":
        return scan.place(sample, f"as in {original.shard}")
    where = f"{original.key} in {original.shard}"
    own, other = (_label(scan.shards, int(labels[each])) for each in (sample, first))
    if labels[sample] == labels[first]:
        return scan.place(sample, f"the same image and label as {where}")
    return scan.place(sample, f"here {own}; as {where} it is {other}")


def _label(shards: ShardSet, code: int) -> str:
    return shards.classes[code] if 0 <= code < shards.num_classes else "another list of labels"


def findings_across(scans: Sequence[SplitScan]) -> list[Finding]:
    """What shows only when splits are compared."""
    findings: list[Finding] = []
    for one, other in combinations(scans, 2):
        splits = f"{one.shards.split} and {other.shards.split}"
        difference = _difference(one.shards, other.shards)
        if difference:
            findings.append(finding("class-list", split=splits, count=1, places=[Place("", "", difference)]))
        count, places = _leaks(one, other)
        if count:
            findings.append(finding("leaked-image", split=splits, count=count, places=places))
    return findings


def _difference(one: ShardSet, other: ShardSet) -> str:
    """Where two lists of classes differ; "" if they do not."""
    for number, (name, other_name) in enumerate(zip(one.classes, other.classes, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} in {one.split} and {other_name!r} in {other.split}"
    if one.num_classes == other.num_classes:
        return ""
    return f"{one.num_classes} classes in {one.split}, {other.num_classes} in {other.split}"


def _leaks(one: SplitScan, other: SplitScan) -> tuple[int, list[Place]]:
    """How many images are in both, and where in the other they are."""
    whole, hashes, labels = (
        np.concatenate([one.all(name), other.all(name)]) for name in ("is_whole", "image_hash", "label_code")
    )
    groups = equal_groups(hashes, among=whole)
    is_in_both = groups.differ((np.arange(len(hashes)) >= one.num_samples).astype(np.int64))
    places = []
    for group in np.flatnonzero(is_in_both)[:MOST_PLACES].tolist():
        members = groups[group]
        first, second = int(members[0]), int(members[members >= one.num_samples][0])
        original = one.place(first)
        detail = f"also in {one.shards.split}: {original.key} in {original.shard}"
        if one.shards.classes == other.shards.classes and labels[first] != labels[second]:
            here, there = (_label(one.shards, int(labels[each])) for each in (second, first))
            detail += f", there as {there}, here as {here}"
        places.append(other.place(second - one.num_samples, detail))
    return int(is_in_both.sum()), places


def _extra_tars(shards: ShardSet) -> list[str]:
    """Tars beside those of a packed local set that its manifest does not name."""
    if not shards.source or not is_local(shards.source):
        return []
    folder = local_path(shards.source)
    if not (folder / MANIFEST_FILE).is_file():
        return []
    known = {os.path.realpath(local_path(entry.url)) for entry in shards.shards if is_local(entry.url)}
    return sorted(path.name for path in folder.glob("*.tar") if os.path.realpath(path) not in known)


def _uneven(scan: SplitScan) -> list[Finding]:
    sizes = spread([size for size in scan.sizes if size])
    if sizes is None or len(scan.sizes) < 3 or sizes.most <= _UNEVEN * sizes.median:
        return []
    message = f"the shards are of very different sizes: {sizes.least:,.0f} to {sizes.most:,.0f} samples"
    return [finding("uneven-shards", split=scan.shards.split, count=1, message=message)]
