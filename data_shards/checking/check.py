"""Scan a set of shards, or all splits below a folder, on all cores, and report what is wrong.

    scan      one part of a shard            fitness   how the set suits a world size
    judge     faults within a split          findings  kinds of findings, with severity and remedy
              and across splits              page      the result as text and as JSON

A damaged shard does not stop the check of others. Nothing is changed, except that sets without a manifest are indexed.
Every byte is read (0.5 to 1.5 GB/s a core, or disk speed); a sample takes 22 us more, plus decoding, and 110 bytes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from shardvit.data_shards.checking.findings import MOST_PLACES, SEVERITIES, Finding, FoundAt, finding
from shardvit.data_shards.checking.fitness import Fitness, assess
from shardvit.data_shards.checking.judge import SplitScan, SplitSummary, findings_across, split_findings
from shardvit.data_shards.checking.near_duplicates.fingerprint import ShardImages
from shardvit.data_shards.checking.near_duplicates.matches import MATCH_KINDS, Match, Matches, MatchKind, find_matches
from shardvit.data_shards.checking.scan import CheckOptions, PartScan, ScanRequest, ShardPart, scan_part
from shardvit.data_shards.checking.split_table import split_table
from shardvit.data_shards.engines.engine import PartsEngine, local_engine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.reading.opening import open_all_splits, open_shards, splits_below
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, manifest_at
from shardvit.data_shards.shards.shard_set import Report, ShardSet, ShardsSpec
from shardvit.data_shards.store.store import Store, StoreError
from shardvit.data_shards.text import counted

# Starting a process takes 0.3 s, so less work than this starts none.
_LITTLE_SECONDS = 0.5
_SECONDS_PER_SAMPLE, _SECONDS_PER_BYTE = 22e-6, 1e-9  # measured: headers, label, hashes; SHA-256 twice
_PARTS_PER_WORKER = 4  # balances workers even with few shards
_MEANING: dict[MatchKind, str] = {
    "equal-bytes": "equal bytes of",
    "equal-pixels": "equal pixels of",
    "near-duplicate": "near-duplicates of",
    "unsure": "perhaps near-duplicates of",
    "semantic": "alike, by the model's features,",
}
_NO_FAULT: tuple[MatchKind, ...] = ("unsure", "semantic")
_COPIED = "they are trained on more often than others: drop the copies at the source if that is not meant"


@dataclass(frozen=True)
class CheckResult:
    """All findings, problems first (see `page`); `fitness` is None without a usable world size."""

    location: str
    splits: tuple[SplitSummary, ...]
    fitness: Fitness | None
    findings: tuple[Finding, ...]
    seconds: float
    matches: tuple[Matches, ...] = ()  # per split, if `against` is given

    def count(self, severity: str) -> int:
        return sum(each.severity == severity for each in self.findings)

    @property
    def exit_code(self) -> int:
        return int(self.count("problem") > 0)


def check(
    spec: ShardsSpec,
    *,
    options: CheckOptions = CheckOptions(),  # noqa: B008 - frozen
    store: Store | None = None,
    engine: PartsEngine | None = None,
    against: Sequence[str] = (),
    statistics_to: str | None = None,
    report: Report = print,
) -> CheckResult:
    """Check a set, or all splits below a folder; UserError if there is none, or one of `against` is damaged.

    `engine` None: this machine's processes, or none for a little set. Statistics are written to the folder or URL
    `statistics_to`, by default beside the manifests.
    """
    start = time.monotonic()
    store = store or Store()
    others = open_all_splits(against, store=store, report=report)  # before hours of reading
    scans: list[SplitScan] = []
    findings: list[Finding] = []
    first: SplitScan | None = None  # the training split
    for number, (split, opened) in enumerate(_open_splits(spec, store=store, report=report)):
        if isinstance(opened, str):
            findings.append(finding("unusable-set", split=split, places=[FoundAt("", "", opened)]))
            continue
        request = ScanRequest(opened, store, options)
        table = split_table(opened, statistics_to, report=report) if options.statistics else nullcontext()
        with table as take_rows:
            scan = SplitScan(opened, _scan_set(request, engine=engine, report=report, take_rows=take_rows))
        scans.append(scan)
        findings += split_findings(scan, digests=options.digests)
        first = scan if number == 0 else first
    findings += findings_across(scans)
    matches: list[Matches] = []
    for scan in scans:
        # A set is compared with itself only if it is the only split.
        theirs = [ShardImages(each, store) for each in others if each.digest != scan.shards.digest or len(scans) == 1]
        if theirs:
            images = ShardImages(scan.shards, store, damaged="report")
            limit = options.pixel_limit
            matches.append(find_matches(images, theirs, pixel_limit=limit, engine=engine, report=report))
            findings += match_findings(matches[-1], split=scan.shards.split)
    fitness, more = _assess(first, options)
    findings += more
    return CheckResult(
        location=redacted(spec.location),
        splits=tuple(scan.summary() for scan in scans),
        fitness=fitness,
        findings=tuple(sorted(findings, key=lambda each: SEVERITIES.index(each.severity))),
        seconds=time.monotonic() - start,
        matches=tuple(matches),
    )


def _open_splits(spec: ShardsSpec, *, store: Store, report: Report) -> Iterator[tuple[str, ShardSet | str]]:
    """Yield (split, set), train first; an error message replaces a set too damaged to open."""
    splits = splits_below(spec.location, store=store)
    is_plain = spec == ShardsSpec(spec.location)
    if not splits:
        # Without a manifest, or with options that a manifest excludes, an error is the user's mistake.
        if not (is_plain and is_local(spec.location) and _has_manifest(spec.location)):
            yield "", open_shards(spec, damaged="report", store=store, report=report)
            return
        splits = {local_path(manifest_at(spec.location)).absolute().parent.name: spec.location}
    without = [split for split, location in splits.items() if is_local(location) and not _has_manifest(location)]
    for split, location in splits.items():
        if len(without) < len(splits) and split in without:
            yield split, f"{location}: there is no {MANIFEST_FILE}, which the other splits have"
            continue
        try:
            opened = open_shards(replace(spec, location=location), damaged="report", store=store, report=report)
        except UserError as error:
            if isinstance(error, StoreError) or not is_plain:
                raise
            yield split, str(error)
        else:
            yield split, replace(opened, split=split) if opened.split == "all" else opened


def _has_manifest(location: str) -> bool:
    return local_path(manifest_at(location)).is_file()


def _scan_set(
    request: ScanRequest, *, engine: PartsEngine | None, report: Report, take_rows: Callable[[PartScan], None] | None
) -> list[PartScan]:
    shards = request.shards
    if engine is None:
        seconds = shards.num_samples * _SECONDS_PER_SAMPLE + (shards.num_bytes or 0) * _SECONDS_PER_BYTE
        engine = local_engine(None if request.options.decode or seconds >= _LITTLE_SECONDS else 1)
    num_parts = max(1, _PARTS_PER_WORKER * engine.workers // max(1, len(shards.shards))) if engine.workers > 1 else 1
    parts = [ShardPart(shard, number, num_parts) for shard in range(len(shards.shards)) for number in range(num_parts)]
    with Progress(shards.num_samples, report, status=f"checking {shards.split or shards.name}") as progress:

        def done(scan: PartScan) -> None:
            progress.add(len(scan.samples))
            if take_rows:
                take_rows(scan)

        scans = engine.run(scan_part, request, parts, done=done)
    for part in parts:
        if part not in scans:
            scans[part] = PartScan(part)
            where = f"part {part.number + 1} of {part.parts} of its samples" if part.parts > 1 else ""
            scans[part].add_fault("crashed-check", where)
    return [scans[part] for part in parts]


def _assess(scan: SplitScan | None, options: CheckOptions) -> tuple[Fitness | None, list[Finding]]:
    if scan is None or options.world_size is None:
        return None, []
    sizes = zip(scan.shards.shards, scan.shard_bytes, strict=True)
    return assess(
        scan.shards.shard_sizes,  # lost shards included
        shard_bytes=[entry.num_bytes or num_bytes or 0 for entry, num_bytes in sizes],
        split=scan.shards.split,
        world_size=options.world_size,
        lanes=options.lanes,
        processes_per_node=options.processes_per_node,
    )


def match_findings(found: Matches, *, split: str) -> list[Finding]:
    """Grade the matches of one split: problems, but warnings within one set, and notes if unsure."""
    findings: list[Finding] = []
    for number, other in enumerate(found.others):
        within = other.digest == found.images.digest
        where = "earlier images of the set" if within else f"images of {other.name}"
        for kind in MATCH_KINDS:
            matches = [match for match in found.matches if (match.kind, match.collection) == (kind, number)]
            if not matches:
                continue
            findings.append(
                finding(
                    kind,
                    split=split,
                    count=len(matches),
                    message=f"{counted(len(matches), 'image')}: {_MEANING[kind]} {where}",
                    places=[_found_at(found, match) for match in matches[:MOST_PLACES]],
                    severity="warning" if within and kind not in _NO_FAULT else None,
                    remedy=_COPIED if within and kind not in _NO_FAULT else "",
                )
            )
    for name, count in found.undecoded.items():
        message = f"{counted(count, 'image')} of {name} cannot be decoded: compared by bytes alone"
        findings.append(finding("not-compared", split=split, count=count, message=message))
    return findings


def _found_at(found: Matches, match: Match) -> FoundAt:
    image, other = found.place(match), found.other_place(match)
    how = "" if match.kind.startswith("equal") else f"{match.likeness:.3f}{', mirrored' if match.mirrored else ''}: "
    tar, other_tar = (part.rpartition("/")[2] for part in (image.part, other.part))
    return FoundAt(tar, image.key, f"{how}{other.key} in {other_tar}")
