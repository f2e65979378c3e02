"""Scan a set of shards, or all splits below a folder, on all cores, and report what is wrong.

    scan, run     one part of a shard; all parts, on all cores
    split, judge  the parts of a split put together; what is wrong with it, and across splits
    fitness       how the set suits a world size
    against       the images that are also in other sets (see `duplicates`)
    findings      the kinds of findings, with severity and remedy
    page          the result as text and as JSON

A damaged shard never keeps the others from being checked. Nothing is changed, but sets without a manifest are indexed.
Every byte is read: 0.5 to 1.5 GB a second and core, or the disk's speed, plus 22 us a sample and any decoding. Memory:
some 110 bytes a sample, and an image per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from data_shards.checking.against import compare_splits, match_findings
from data_shards.checking.findings import Finding, FoundAt, finding
from data_shards.checking.fitness import Fitness, assess
from data_shards.checking.judge import findings_across, split_findings
from data_shards.checking.near_duplicates.matches import Matches
from data_shards.checking.run import scan_set
from data_shards.checking.scan import ScanRequest
from data_shards.checking.split import SplitScan, SplitSummary
from data_shards.errors import UserError
from data_shards.images.decode import USUAL_LIMIT, PixelLimit
from data_shards.reading.opening import open_all_splits, open_shards, splits_below
from data_shards.shards.location import is_local, local_path, redacted
from data_shards.shards.manifest import MANIFEST_FILE
from data_shards.shards.shard_set import ShardSet, ShardsSpec
from data_shards.store.store import Store, StoreError


@dataclass(frozen=True)
class CheckResult:
    """All that a check has found, problems first (see `page`); `fitness` is None without a usable world size."""

    location: str
    splits: tuple[SplitSummary, ...]
    fitness: Fitness | None
    findings: tuple[Finding, ...]
    seconds: float
    matches: tuple[Matches, ...] = ()  # of each split with `against`

    def count(self, severity: str) -> int:
        return sum(each.severity == severity for each in self.findings)

    @property
    def exit_code(self) -> int:
        return int(self.count("problem") > 0)


def check(
    spec: ShardsSpec,
    *,
    decode: bool = False,
    pixel_limit: PixelLimit = USUAL_LIMIT,
    digests: bool = True,
    world_size: int | None = None,
    lanes: int | None = None,
    processes_per_node: int = 8,
    store: Store | None = None,
    processes: int | None = None,
    against: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> CheckResult:
    """Check a set of shards, or all splits below a folder; UserError if there is none, or the spec does not fit it.

    `decode` decodes every image in full, unless it has more pixels than `pixel_limit`. `digests` compares every shard's
    SHA-256 with the manifest. Fitness is assessed only with a `world_size`. With 1 for `processes`, none is started.
    `against`: locations of other sets, or of folders with splits, whose images are looked for in this one; UserError if
    one of them is damaged.
    """
    start = time.monotonic()
    store = store or Store()
    others = open_all_splits(against, store=store, report=report)  # before hours of reading
    scans: list[SplitScan] = []
    findings: list[Finding] = []
    first: SplitScan | None = None  # the one that is trained on
    for number, (split, opened) in enumerate(_open_splits(spec, store=store, report=report)):
        if isinstance(opened, str):
            findings.append(finding("unusable-set", split=split, places=[FoundAt("", "", opened)]))
            continue
        request = ScanRequest(shards=opened, store=store, decode=decode, digests=digests, pixel_limit=pixel_limit)
        scan = SplitScan(opened, scan_set(request, processes=processes, report=report))
        findings += split_findings(scan, digests=digests)
        scans.append(scan)
        first = scan if number == 0 else first
    findings += findings_across(scans)
    matches = compare_splits(
        [scan.shards for scan in scans],
        others,
        store=store,
        pixel_limit=pixel_limit,
        processes=processes,
        report=report,
    )
    findings += [found for one in matches for found in match_findings(one)]
    fitness = None
    if world_size is not None and first is not None:
        found = zip(first.shards.shards, first.shard_bytes, strict=True)
        fitness, more = assess(
            first.shards.shard_sizes,  # lost shards included
            shard_bytes=[entry.num_bytes or num_bytes or 0 for entry, num_bytes in found],
            split=first.shards.split,
            world_size=world_size,
            lanes=lanes,
            processes_per_node=processes_per_node,
        )
        findings += more
    ranks = {"problem": 0, "warning": 1, "info": 2}
    return CheckResult(
        location=redacted(spec.location),
        splits=tuple(scan.summary() for scan in scans),
        fitness=fitness,
        findings=tuple(sorted(findings, key=lambda each: ranks[each.severity])),
        seconds=time.monotonic() - start,
        matches=tuple(matches),
    )


def _open_splits(
    spec: ShardsSpec, *, store: Store, report: Callable[[str], None]
) -> Iterator[tuple[str, ShardSet | str]]:
    """(split, set) for each split, train first; an error message in place of a set too damaged to open."""
    splits = splits_below(spec.location, store=store)
    if not splits:
        # Without a manifest, or with options that a manifest excludes, an error is the user's mistake.
        is_packed = is_local(spec.location) and _has_manifest(spec.location)
        if not is_packed or spec != ShardsSpec(spec.location):
            yield "", open_shards(spec, damaged="report", store=store, report=report)
            return
        splits = {local_path(spec.location).absolute().name: spec.location}
    without = [split for split, location in splits.items() if is_local(location) and not _has_manifest(location)]
    for split, location in splits.items():
        if 0 < len(without) < len(splits) and split in without:
            yield split, f"{location}: there is no {MANIFEST_FILE}, which the other splits have"
            continue
        try:
            opened = open_shards(replace(spec, location=location), damaged="report", store=store, report=report)
        except StoreError:
            raise
        except UserError as error:
            if spec != ShardsSpec(spec.location):
                raise
            yield split, str(error)
        else:
            yield split, replace(opened, split=split) if opened.split == "all" else opened


def _has_manifest(location: str) -> bool:
    return (local_path(location) / MANIFEST_FILE).is_file()
