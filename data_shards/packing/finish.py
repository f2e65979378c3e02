"""Finish a packing whose shards are made: lists of what was found, manifests last, in OUT or what becomes OUT.

Reads each shard's record, in order. Takes 50 bytes of memory an image, for digests and `seen`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shardvit.data_shards.durable import flush, lines_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import found
from shardvit.data_shards.packing.appending import appended_line, open_again
from shardvit.data_shards.packing.found import Counts
from shardvit.data_shards.packing.plan_file import JOB_FILE, LEFT_OUT_FILE, PackJob, load_job
from shardvit.data_shards.packing.request import difference
from shardvit.data_shards.packing.seen import SEEN_FILE, add_digests, read_digests_of
from shardvit.data_shards.packing.shard_plan import LABEL_SPECS, Line, class_numbers
from shardvit.data_shards.packing.shard_writer import (
    ShardRecord,
    find_records,
    index_file,
    record_file,
    statistics_file,
)
from shardvit.data_shards.packing.sources.base import SplitName
from shardvit.data_shards.packing.work import open_work, scratch_folder, unpacked_path, work_folder, work_path
from shardvit.data_shards.sets.keeping import write_manifest
from shardvit.data_shards.sets.live import PACK_FILE, join_manifests, manifests_in
from shardvit.data_shards.sets.statistics import write_statistics
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    json_text,
    read_manifest,
    timm_info,
)
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.folders import LocalFolder, open_folder
from shardvit.data_shards.store.ranges import list_url
from shardvit.data_shards.text import counted, parse_json

CLAIM_FILE = "request.json"  # in a store: whose the work folder is
_REQUESTS = 16  # to a store, at a time
_ROWS_AHEAD = 4 * _REQUESTS  # shards


def finish(job: PackJob, *, report: Report) -> Counts:
    """Write all files but the shards; a local OUT is then in place. UserError if shards are missing, or images are
    unreadable and the request refuses them."""
    records = dict(enumerate(_records(job)))
    unreadable, digests = list[Line](), list[bytes]()
    kept: dict[SplitName, list[int]] = {split: [] for split in job.plan.splits}
    for number, record in records.items():
        digests.append(record.image_digests)
        if record.refused:
            shard = job.shard(number)
            unreadable += [{**shard.line(each.position), "reason": each.reason} for each in record.refused]
        if record.shard.num_samples:
            kept[job.plan.split(number)[0]].append(number)
    if unreadable and "unreadable" not in job.request:
        raise found.unreadable_error(unreadable, job)
    dtype = _dtype(job, records)
    manifests = [
        _manifest(job, split, [records[number].shard for number in numbers], dtype) for split, numbers in kept.items()
    ]
    _report_lost_classes(job, records, report)
    seen = job.work.read(SEEN_FILE)
    numbers = job.numbers(job.whole)
    if job.whole is job.plan:
        seen = add_digests(seen, numbers, b"".join(digests))
    groups = found.duplicate_groups(job, read_digests_of(seen, numbers), unreadable=unreadable)
    unreadable[:0] = left_out = [parse_json(line) for line in job.work.read(LEFT_OUT_FILE).splitlines()]
    counts = Counts(unreadable=len(unreadable), **job.excluded, **found.count_groups(groups))
    result, lists = job.result, job.lists
    for number, record in records.items():
        if not record.shard.num_samples:
            result.remove(job.file(number))
            result.remove(index_file(job.file(number)))
    for lines, file in ((groups, found.DUPLICATES_FILE), (unreadable, found.UNREADABLE_FILE)):
        if lines:
            lists.write(file, lines_text(lines))
    lists.write(SEEN_FILE, seen)
    content = {**job.content, "found": vars(counts)}
    live = open_again(job) if job.start.packing else None
    whole = join_manifests(live.manifests if live else {}, {manifest.split: manifest for manifest in manifests})
    made: dict[str, list[int]] = dict(kept.items())
    for split, manifest in whole.items():
        of_split = (record for number, record in records.items() if job.plan.split(number)[0] == split)
        lost = sum(len(record.refused) for record in of_split) + sum(each["split"] == split for each in left_out)
        rows = _rows(job, made.get(split, []))
        if found_of := live.statistics(split, rows, unreadable=lost) if live else (rows, [lost]):
            with scratch_folder(job.out) as own:
                write_statistics(result.at(split), manifest, found_of[0], unreadable=found_of[1], scratch=own)
    result.write("_info.json", json_text(timm_info(whole.values())).encode())
    if live is not None:
        report(appended_line(job, live, manifests, read_digests_of(seen, job.numbers(job.plan))))
        live.finish(content, whole)
    else:
        result.write(PACK_FILE, json_text(content).encode())
        for manifest in reversed(manifests):  # train's is the last: with it the set is there
            write_manifest(result.at(manifest.split), manifest)
        if is_local(job.out):
            _put_in_place(job)
    remove_work(job.out, job)
    return counts


def _rows(job: PackJob, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Read the rows of shards' statistics, with their numbers in the manifest; a few ahead."""
    with ThreadPoolExecutor(1 if is_local(job.out) else _REQUESTS) as pool:
        for start in range(0, len(numbers), _ROWS_AHEAD):
            names = [statistics_file(job.file(number)) for number in numbers[start : start + _ROWS_AHEAD]]
            yield from enumerate(pool.map(job.work.read, names), start)


def _records(job: PackJob) -> Iterator[ShardRecord]:
    missing = list[int]()
    for number, record in enumerate(find_records(job, unread="accept")):
        if record is None:
            missing.append(number)
        elif not missing:
            yield record
    if missing:
        raise UserError(
            f"{redacted(job.out)}: {len(missing):,} of {counted(len(job.plan.sizes), 'shard')} are not made yet (the "
            f"first: {job.file(missing[0])}): make them, then finish"
        )


def _dtype(job: PackJob, records: Mapping[int, ShardRecord]) -> str:
    """Return the type of all images' values, where channels are asked for; UserError if there are several."""
    found = sorted({dtype for record in records.values() for dtype in record.dtypes})
    if len(found) > 1:
        first = ", ".join(
            f"{dtype} in {next(job.file(number) for number, each in records.items() if dtype in each.dtypes)}"
            for dtype in found
        )
        raise UserError(f"{job.source}: its images are of several types ({first}): convert them to one")
    return "".join(found)


def _manifest(job: PackJob, split: SplitName, shards: Sequence[Shard], dtype: str) -> Manifest:
    if not shards:
        raise UserError(f"{job.source}: no image of split {split} can be read; fix them")
    return Manifest(
        Path(split),
        job.name,
        split,
        job.classes,
        tuple(shards),
        job.source,
        labels=LABEL_SPECS[job.kind],
        channels=job.channels,
        dtype=dtype,
        without_matches_of=tuple(job.request.get("without_matches_of", ())) if split == "train" else (),
    )


def _report_lost_classes(job: PackJob, records: dict[int, ShardRecord], report: Report) -> None:
    """Name the classes of unreadable images that have no other image in the split."""
    refused: dict[SplitName, set[int]] = {split: set() for split in job.plan.splits}
    for number, record in records.items():
        if record.refused:
            positions = [each.position for each in record.refused]
            shard = job.shard(number)
            refused[shard.split].update(class_numbers(shard.labels[positions].ravel()))
    for number, record in records.items() if any(refused.values()) else ():
        if lost := refused[job.plan.split(number)[0]]:
            labels = np.delete(job.shard(number).labels, [each.position for each in record.refused], axis=0)
            lost -= {*class_numbers(labels.ravel())}
    for split, lost in refused.items():
        for label in sorted(lost):
            report(f"no image of the class {job.classes[label]} in split {split} can be read")


def _put_in_place(job: PackJob) -> None:
    out, work = local_path(job.out), work_path(local_path(job.out))
    for folder in (*(work / "result" / split for split in job.plan.splits), work / "result"):
        flush(folder)
    try:
        os.rename(work / "result", out)  # replaces an empty folder, fails on any other
    except OSError as error:
        reason = f"the folder could not be put in place ({error.strerror})"
        raise UserError(f"{out}: {reason}; choose another") from None
    flush(out.parent)


def sweep(job: PackJob, old: PackJob | None, finished: Sequence[int]) -> int:
    """Remove what an earlier attempt left of shards that are not finished; return the number of its records."""
    files = {job.file(number) for number in finished}
    if not is_local(job.out) or job.start.packing:
        old = old if old and old.start == job.start else None  # else its shards may be those of the set
        before = {old.file(number) for number in range(len(old.plan.sizes))} if old else set[str]()
        planned = {job.file(number) for number in range(len(job.plan.sizes))}
        for file in before - planned:
            for name in (record_file(file), statistics_file(file)):
                job.work.remove(name)
            for name in (file, index_file(file)):
                job.result.remove(name)
        return len(before - planned)
    work = work_path(local_path(job.out))
    kept = {f"result/{name}" for file in files for name in (file, index_file(file))} | set(map(record_file, files))
    records = len([*(work / "records").glob("*.json")]) if (work / "records").is_dir() else 0
    for part in ("records", "result", "scratch"):
        for path in sorted((work / part).rglob("*"), reverse=True):  # contents before their folder
            if not path.is_dir() or path.is_symlink():
                if path.relative_to(work).as_posix() not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
    return records - len(files)


def remove_work(out: str, job: PackJob | None = None) -> None:
    """Remove the work folder: in a store by name, the plan last, as it has the names, and what was never uploaded."""
    shutil.rmtree(unpacked_path(out), ignore_errors=True)
    if is_local(out):
        found.list_beside(local_path(out)).unlink(missing_ok=True)
        shutil.rmtree(work_path(local_path(out)), ignore_errors=True)
        return
    if (job := job or load_job(out)) is None:
        return
    job.result.tidy()
    above = job.work.location.rstrip("/") + "/"
    made = [each.location.removeprefix(above) for each in job.containers if each.location.startswith(above)]
    with suppress(FileNotFoundError):
        made += [f"listing/{name}" for name, _, _ in list_url(job.work.at("listing").location)]
    names = [
        *made,
        *job.plan.parts,
        *job.whole.parts,
        SEEN_FILE,
        LEFT_OUT_FILE,
        found.UNREADABLE_FILE,
    ]
    remove_records(job, names)
    job.work.remove(JOB_FILE)
    job.work.remove(CLAIM_FILE)


def remove_records(job: PackJob, others: Sequence[str] = ()) -> None:
    """Remove the records and statistics of all shards, and `others`, from the work folder."""
    files = [job.file(number) for number in range(len(job.plan.sizes))]
    names = [*map(record_file, files), *map(statistics_file, files), *others]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(job.work.remove, dict.fromkeys(names)))


# ---- what a finished set is


def is_there(out: str) -> bool:
    """True if OUT is a finished set, or a local folder with anything in it; an empty one does not count."""
    if is_local(out):
        return os.path.lexists(out) and (not os.path.isdir(out) or bool(os.listdir(out)))
    return open_folder(out).size(f"train/{MANIFEST_FILE}") is not None


def take(out: str, request: Mapping[str, Any]) -> None:
    """Take a store's work folder for a request until its packing is done; UserError if another request has it."""
    work = work_folder(out)
    if isinstance(work, LocalFolder):  # which is locked
        return
    if different := _difference(work.claim(CLAIM_FILE, json_text(request).encode()), request):
        where = redacted(work.location)
        raise UserError(f"{redacted(out)}: another request is packed into it ({different}); wait, or delete {where}")


def clear(out: str, request: Mapping[str, Any]) -> None:
    """Remove the work folder of a request's finished packing."""
    if is_local(out):
        if work_path(local_path(out)).is_dir():
            with open_work(out, keep=True):
                remove_work(out)
        return
    work, job, claim = work_folder(out), load_job(out), None
    with suppress(FileNotFoundError):  # removed by a packing of the same, while this one wrote its plan
        claim = work.read(CLAIM_FILE)
    if claim is not None and _difference(claim, request):
        return
    if job is None or not difference(job.content["request"], request):
        remove_work(out, job)
    if claim is not None:
        work.remove(CLAIM_FILE)


def manifests_of(out: str, shown: str) -> tuple[Manifest, ...]:
    """Read the manifests of all splits; `shown` is OUT in messages and in a local manifest's root."""
    if is_local(out):
        splits = ("train", *(split for split in ("val", "test") if os.path.isdir(os.path.join(out, split))))
        return tuple(read_manifest(os.path.join(shown, split)) for split in splits)
    return tuple(manifests_in(open_folder(out)).values())


def _difference(claim: bytes, request: Mapping[str, Any]) -> str:
    try:
        return difference(dict(parse_json(claim)), request)
    except (ValueError, TypeError):
        return f"its {CLAIM_FILE} is broken"


def demand_same(out: str, content: Mapping[str, Any], *, shown: str = "") -> Counts:
    """Return OUT's counts; UserError unless it was packed by this request from this source ({}: any)."""
    shown, remedy = redacted(shown or out), "choose another folder or delete it"
    try:
        packed = parse_json(open_folder(out).read(PACK_FILE))
        before = dict(packed["request"])
        version, fingerprint = packed["version"], packed["fingerprint"]
        counts = Counts(**packed["found"])
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{shown}: it exists and was not packed by shardvit; {remedy}") from None
    if not content:
        return counts
    different = difference(before, content["request"])
    if different or version != content["version"]:
        then = different or f"version: {version!r} then, {content['version']!r} now"
        raise UserError(f"{shown}: it exists and was packed with another request ({then}); {remedy}")
    if fingerprint != content["fingerprint"]:
        raise UserError(f"{shown}: it was packed from {before['source']}, which has changed since; {remedy}")
    return counts
