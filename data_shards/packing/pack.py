"""Pack images into tar shards with indexes and manifests: `shard_plan` plans, `shard_writer` writes.

    OUT/pack.json                       the request, to recognise its repetition, and counts of what was found
    OUT/images.bin                      a record of each source image, see `seen`
    OUT/_info.json                      for timm
    OUT/train/NAME-train-000000.tar     KEY.jpg (png, ...; the source's bytes, unless `resize` downscales them) and
                                        KEY.cls (ASCII label), or KEY.json ({"label": [3, 7]}) if multi-label
    OUT/train/NAME-train-000000.idx     offsets of the samples
    OUT/train/manifest.json             and sizes.json for open_clip
    OUT/val/..., OUT/test/...           the same for other splits of the source; val also with a holdout
    OUT/duplicates.jsonl, OUT/unreadable.jsonl, OUT/excluded.*, OUT/unsure.jsonl     see `found`, `exclusion`

A hidden folder next to OUT is renamed when complete; an existing OUT is never changed. After a kill, a full disk or an
unreadable image, the same command resumes with a byte-identical result. Costs one decode an image (60,000 JPEGs of
32x32: 6 CPU seconds, 1,000 ImageNet photographs: 2) and the images' size plus 1.5 to 2 kB each (tar blocks).
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardvit.data_shards.durable import flush, replace_lines
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import found
from shardvit.data_shards.packing.exclusion import Excluded, find_excluded
from shardvit.data_shards.packing.found import Counts, PackReport
from shardvit.data_shards.packing.request import HoldoutList, PackRequest, read_holdout_list
from shardvit.data_shards.packing.seen import compare_seen, write_seen
from shardvit.data_shards.packing.shard_plan import (
    LABEL_SPECS,
    PackPlan,
    ShardPlan,
    class_numbers,
    make_plan,
    needed_bytes,
)
from shardvit.data_shards.packing.shard_writer import (
    ShardRecord,
    WorkFolder,
    open_work,
    plan_mark,
    read_digests,
    unpacked_path,
    work_path,
    write_shards,
)
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.base import Source, SplitName
from shardvit.data_shards.packing.sources.recognise import open_source
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.manifest import Manifest, read_manifest, write_json, write_manifest, write_timm_info
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.shards.tar_index import index_path
from shardvit.data_shards.text import counted, parse_json, printable, show_bytes

PACK_FILE = "pack.json"
PACK_VERSION = 1
_SAID_SECONDS = 30  # listing that takes longer is told
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# ImageNet downscaled to 320 pixels takes 43 kB an image at quality 90.
_REDUCED_BYTES_PER_SQUARE_PIXEL = 0.42


def pack(
    source_spec: str, out: Path, *, holdout_list: Path | None = None, report: Report = print, **options: Any
) -> PackReport:
    """Pack a source (see `open_source`) into OUT, with a folder per split.

    Equal source, options (see `PackRequest`) and library versions give byte-identical tars, for any number of cores and
    interruptions. UserError for bad input, an OUT of another request or source, unreadable images, or a full disk.
    """
    start = time.monotonic()
    out = Path(out)
    try:
        source, request = list_source(source_spec, out, holdout_list=holdout_list, report=report, **options)
        result = _pack(source, out, request, report)
    finally:  # kept if the attempt left shards
        if not work_path(out).is_dir():
            shutil.rmtree(unpacked_path(out), ignore_errors=True)
    result = replace(result, seconds=time.monotonic() - start)
    for line in result.lines(dropped=request.duplicates == "drop"):
        report(line)
    return result


def list_source(
    source_spec: str, out: Path, *, holdout_list: Path | None = None, report: Report = print, **options: Any
) -> tuple[Source, PackRequest]:
    """Check the options and list the images; raises as `pack` does."""
    request = PackRequest(holdout_list=HoldoutList(holdout_list, {}) if holdout_list else None, **options)
    if holdout_list is not None:
        root = Path(source_spec).expanduser() if is_local(source_spec) else None
        listed = read_holdout_list(holdout_list, root=root)
        request = replace(request, holdout_list=listed)
    slow = threading.Timer(_SAID_SECONDS, report, [f"{source_spec}: listing its images"])
    slow.daemon = True
    slow.start()
    try:
        source = open_source(
            source_spec,
            labels=request.labels,
            published=request.published,
            samples=request.samples,
            unpacking=Unpacking(unpacked_path(out), report),
            unfit=request.unreadable,
        )
    finally:
        slow.cancel()
    classes = counted(len(source.classes), "class")
    report(f"{source.spec}: {counted(source.num_images, 'image')} of {classes} found")
    if Path(source.spec).is_dir() and out.resolve().is_relative_to(source.spec):  # a name like "digits" is not a folder
        raise UserError(f"{out}: it lies inside {source.spec}, whose images are packed; choose an OUT outside of it")
    return source, request


def _pack(source: Source, out: Path, request: PackRequest, report: Report) -> PackReport:
    content = {"version": PACK_VERSION, "request": request.as_json(source), "fingerprint": source.fingerprint()}
    compared = ""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):  # an empty folder does not count
        counts = _demand_same(out, **content)
        compared = compare_seen(out, source, request, report=report)
        if work_path(out).is_dir():  # killed between the rename and the end
            with open_work(out) as work:
                shutil.rmtree(work.path)
    else:
        request = replace(request, name=request.name or printable(out.resolve().name))
        counts = _Packing(source, request, out, report).run(content)
    splits = ("train", *(split for split in ("val", "test") if (out / split).is_dir()))
    return PackReport(out, tuple(read_manifest(out / split) for split in splits), counts, compared, seconds=0.0)


@dataclass(frozen=True)
class _Packing:
    source: Source
    request: PackRequest
    out: Path
    report: Report

    def run(self, content: dict[str, object]) -> Counts:
        source, request = self.source, self.request
        plan = make_plan(source, request)
        excluded = find_excluded(plan, source, request, report=self.report)
        without = None if excluded is None else excluded.marks
        whole_plan = plan = plan if without is None else make_plan(source, request, without=without)
        digests = None
        if request.duplicates == "drop":
            with Progress(plan.num_images, self.report, status="looking for duplicates") as progress:
                parts = [shard.images for shard in plan.shards]
                digests = read_digests(parts, num_threads=num_cores(), progress=progress)
            marks = np.zeros(source.num_images, dtype=np.bool_) if without is None else without.copy()
            repeated = [number for group in found.equal_digests(digests) for number in group[1:]]
            marks[plan.numbers[repeated]] = True
            plan = make_plan(source, request, without=marks)
        for note in (*source.notes, *plan.notes):
            self.report(note)
        with open_work(self.out) as work:
            with self._explain_full_disk(work):
                records = self._write_shards(plan, work)
                digests = digests or b"".join(records[shard.file].image_digests for shard in plan.shards)
                counts = self._write_lists(plan, whole_plan, records, digests, excluded, work.result)
                manifests = [self._write_manifest(split, plan, records, work.result) for split in plan.splits]
                write_timm_info(work.result, manifests)
                write_seen(work.result, source, whole_plan, digests)
                write_json(work.result / PACK_FILE, {**content, "found": vars(counts)})
                for folder in (*(work.result / split for split in plan.splits), work.result):
                    flush(folder)
            try:
                os.rename(work.result, self.out)  # replaces an empty folder, fails on any other
            except OSError as error:
                reason = f"the folder could not be put in place ({error.strerror})"
                raise UserError(f"{self.out}: {reason}; choose another") from None
            flush(self.out.parent)
        found.list_beside(self.out).unlink(missing_ok=True)
        return counts

    @contextmanager
    def _explain_full_disk(self, work: WorkFolder) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            kept = f", it resumes from the finished shards in {work.path}" if work.has_records else ""
            reason = f"the disk is full ({os.strerror(error.errno)}); make room and type the same command again{kept}"
            raise UserError(f"{self.out}: {reason}") from None

    def _write_shards(self, plan: PackPlan, work: WorkFolder) -> dict[str, ShardRecord]:
        out, request = self.out, self.request
        marks = {each.file: (each.split, plan_mark(each, request) if work.has_records else "") for each in plan.shards}
        finished, num_others = work.recover(marks)
        if finished:
            of_all = f"{len(finished):,} of {counted(len(marks), 'shard')}"
            self.report(f"{out}: resuming: {of_all} finished in an earlier attempt")
        if num_others:
            self.report(
                f"{out}: {counted(num_others, 'shard')} of an earlier attempt discarded: "
                f"the request or the source has changed since, or an image could not be read"
            )
        left = [shard for shard in plan.shards if shard.file not in finished]
        self._demand_space(left, work.path)
        paths = {work.result / shard.split / shard.file: shard for shard in left}
        done_images = plan.num_images - sum(map(len, left))
        with Progress(plan.num_images, self.report, done_images=done_images) as progress:
            return finished | write_shards(paths, request, num_threads=num_cores(), progress=progress, save=work.save)

    def _demand_space(self, shards: Sequence[ShardPlan], folder: Path) -> None:
        resize = self.request.resize
        most = None if resize is None else int(_REDUCED_BYTES_PER_SQUARE_PIXEL * resize.short_pixels**2)
        needed, free = needed_bytes(shards, most_image_bytes=most), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{folder.parent}: the shards need about {show_bytes(needed)} and {show_bytes(free)} are free; "
                f"make room or choose an OUT on another disk"
            )

    def _write_lists(
        self,
        plan: PackPlan,
        whole_plan: PackPlan,
        records: Mapping[str, ShardRecord],
        digests: bytes,
        excluded: Excluded | None,
        result: Path,
    ) -> Counts:
        """UserError if images are unreadable and the request refuses them."""
        unreadable = found.unreadable_files(plan, records)
        if unreadable and self.request.unreadable == "refuse":
            raise found.unreadable_error(unreadable, self.source, plan, self.out)
        packs_all = self.request.duplicates == "keep"
        groups = found.duplicate_groups(whole_plan, digests, packs_all=packs_all, unreadable=unreadable)
        reason = "it is not in a class folder, so it has no label"
        loose = self.source.left_out
        unreadable[:0] = [{"path": path, "split": split, "label": None, "reason": reason} for split, path in loose]
        excluded_counts: dict[str, int] = {}
        if excluded is not None:
            excluded.write(result, self.request)
            files = {"excluded": found.EXCLUDED_FILE, "unsure": found.UNSURE_FILE}
            excluded_counts = {name: excluded.count(file) for name, file in files.items()}
        for lines, file in ((groups, found.DUPLICATES_FILE), (unreadable, found.UNREADABLE_FILE)):
            if lines:
                replace_lines(result / file, lines)
        return Counts(unreadable=len(unreadable), **excluded_counts, **found.count_groups(groups))

    def _write_manifest(
        self, split: SplitName, plan: PackPlan, records: Mapping[str, ShardRecord], result: Path
    ) -> Manifest:
        """Leave out and delete shards without a readable image."""
        shards = plan.splits[split]
        kept = [record.shard for each in shards if (record := records[each.file]).shard.num_samples]
        for file in {shard.file for shard in shards} - {shard.file for shard in kept}:
            for path in (result / split / file, index_path(result / split / file)):
                path.unlink()
        if not kept:
            raise UserError(f"{self.source.spec}: no image of split {split} can be read; fix them")
        refused, packed = set[int](), set[int]()
        for shard in shards:
            positions = [entry.position for entry in records[shard.file].refused]
            refused.update(class_numbers(shard.labels[positions].ravel()))
            packed.update(class_numbers(np.delete(shard.labels, positions, axis=0).ravel()))
        for number in sorted(refused - packed):
            self.report(f"no image of the class {plan.classes[number]} in split {split} can be read")
        exclusion = self.request.exclusion if split == "train" else None
        manifest = Manifest(
            result / split,
            self.request.name or "",
            split,
            plan.classes,
            tuple(kept),
            self.source.spec,
            labels=LABEL_SPECS[plan.kind],
            without_matches_of=tuple(each.digest for each in exclusion.sets) if exclusion else (),
        )
        write_manifest(manifest)
        return manifest


def _demand_same(out: Path, *, version: int, request: Mapping[str, object], fingerprint: str) -> Counts:
    """Return OUT's counts; UserError unless it was packed by this request from this source."""
    remedy = "choose another folder or delete it"
    try:
        packed = parse_json((out / PACK_FILE).read_bytes())
        before = dict(packed["request"])
        known, same = packed["version"] == version, packed["fingerprint"] == fingerprint
        counts = Counts(**packed["found"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{out}: it exists and was not packed by shardvit; {remedy}") from None
    different = [key for key in {**request, **before} if before.get(key) != request.get(key)]
    if not known or different:
        key = different[0] if different else "version"
        then = f"{key}: {before.get(key)!r} then, {request.get(key)!r} now"
        raise UserError(f"{out}: it exists and was packed with another request ({then}); {remedy}")
    if not same:
        raise UserError(f"{out}: it was packed from {request['source']}, which has changed since; {remedy}")
    return counts
