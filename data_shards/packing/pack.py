"""Pack images into tar shards with indexes and manifests: list the source, plan, make each shard by itself, finish.

    OUT/pack.json                       the request, to recognise its repetition, and counts of what was found
    OUT/images.bin                      a record of each source image, see `seen`
    OUT/_info.json                      for timm
    OUT/train/NAME-train-000000.tar     KEY.jpg (png, ...; the source's bytes, unless `resize` downscales them) and
                                        KEY.cls (ASCII label), or KEY.json ({"label": [3, 7]}) if multi-label
    OUT/train/NAME-train-000000.idx     offsets of the samples
    OUT/train/manifest.json             and sizes.json for open_clip
    OUT/train/statistics.parquet        a row a sample, see `data_shards.sets.statistics`
    OUT/val/..., OUT/test/...           the same for other splits of the source; val also with a holdout
    OUT/duplicates.jsonl, OUT/unreadable.jsonl, OUT/excluded.*, OUT/unsure.jsonl     see `found`, `exclusion`

A hidden folder next to OUT is renamed when complete; at a URL, train/manifest.json is the last file. An existing OUT is
never changed. After a kill, a full disk or an unreadable image, the same command resumes with a byte-identical result.
Costs one decode an image (60,000 JPEGs of 32x32: 6 CPU seconds, 1,000 ImageNet photographs: 2) and the images' size
plus 1.5 to 2 kB each (tar blocks).
"""

import errno
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardvit.data_shards.engines.engine import LocalEngine, PartsEngine
from shardvit.data_shards.engines.threads import ThreadEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import found
from shardvit.data_shards.packing.appending import go_on, has_before, start_of
from shardvit.data_shards.packing.exclusion import Excluded, find_excluded
from shardvit.data_shards.packing.finish import (
    clear,
    demand_same,
    finish,
    is_there,
    manifests_of,
    remove_records,
    sweep,
    take,
)
from shardvit.data_shards.packing.found import Counts, PackReport
from shardvit.data_shards.packing.plan_file import PackJob, PlanTable, load_job, save_job, write_table
from shardvit.data_shards.packing.request import HoldoutList, PackRequest, difference, read_holdout_list
from shardvit.data_shards.packing.seen import SEEN_FILE, compare_seen, write_seen
from shardvit.data_shards.packing.shard_plan import PackPlan, ShardPlan, Start, make_plan, needed_bytes
from shardvit.data_shards.packing.shard_writer import digest_shard, find_records, make_shard
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.sources.recognise import open_source
from shardvit.data_shards.packing.work import (
    has_records,
    open_work,
    scratch_folder,
    unpacked_path,
    work_folder,
    work_path,
)
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.sets.live import LiveSet, lists_of, open_live
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.store.folders import open_folder
from shardvit.data_shards.text import counted, printable, show_bytes

PACK_VERSION = 1
PackStep = Literal["all", "plan", "shards", "finish"]
_SAID_SECONDS = 30  # listing that takes longer is told
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_THREADS = 8  # beyond, the interpreter's lock costs more than processes
# ImageNet downscaled to 320 pixels takes 43 kB an image at quality 90.
_REDUCED_BYTES_PER_SQUARE_PIXEL = 0.42


def pack(
    source_spec: str,
    out: Path | str,
    *,
    holdout_list: Path | None = None,
    engine: PartsEngine | None = None,
    step: PackStep = "all",
    task: int = 0,
    of: int = 1,
    report: Report = print,
    **options: Any,
) -> PackReport:
    """Pack a source (see `open_source`) into OUT, with a folder per split.

    Equal source, options (see `PackRequest`) and library versions give byte-identical tars, for any engine, number of
    workers and interruptions. UserError for bad input, an OUT of another request or source, unreadable images, or a
    full disk. A batch system takes the steps "plan", "shards" (`task`, from 0, makes each `of`-th shard) and "finish",
    with the same options; only the last has manifests to report.
    """
    start, text = time.monotonic(), str(out)
    location = os.path.abspath(local_path(text)) if is_local(text) else text.rstrip("/")
    open_folder(location)  # UserError before the source is listed
    request = _request(source_spec, holdout_list, options)
    is_alone = is_local(location) or (engine is None and step == "all")
    work = "" if is_alone else work_folder(location).location
    unpacking = Unpacking(unpacked_path(location), report, engine, work)
    packing = _Packing(text, location, request, engine or _local_engine(), unpacking, report)
    try:
        counts, compared = packing.run(source_spec) if step == "all" else packing.run_step(source_spec, step, task, of)
    finally:  # kept if the attempt left shards, or a plan
        if is_local(location) and not work_path(Path(location)).is_dir():
            shutil.rmtree(unpacked_path(location), ignore_errors=True)
    manifests = () if counts is None else manifests_of(location, text)
    lists = text
    if manifests and request.existing == "append":
        live = open_live(open_folder(location))
        lists = lists_of(open_folder(text), len(live.packings) - 1).location
    result = PackReport(text, manifests, counts or Counts(), compared, lists, seconds=time.monotonic() - start)
    for line in result.lines(dropped=request.duplicates == "drop") if manifests else ():
        report(line)
    return result


def list_source(
    source_spec: str, out: Path | str, *, holdout_list: Path | None = None, report: Report = print, **options: Any
) -> tuple[Source, PackRequest]:
    """Check the options and list the images; raises as `pack` does."""
    request = _request(source_spec, holdout_list, options)
    return _open(source_spec, str(out), request, Unpacking(unpacked_path(str(out)), report)), request


def _request(source_spec: str, holdout_list: Path | None, options: Mapping[str, Any]) -> PackRequest:
    request = PackRequest(holdout_list=HoldoutList(holdout_list, {}) if holdout_list else None, **options)
    if holdout_list is None:
        return request
    root = Path(source_spec).expanduser() if is_local(source_spec) else None
    return replace(request, holdout_list=read_holdout_list(holdout_list, root=root))


def _open(source_spec: str, out: str, request: PackRequest, unpacking: Unpacking) -> Source:
    report = unpacking.report
    slow = threading.Timer(_SAID_SECONDS, report, [f"{source_spec}: listing its images"])
    slow.daemon = True
    slow.start()
    try:
        source = open_source(
            source_spec,
            labels=request.labels,
            published=request.published,
            samples=request.samples,
            unpacking=unpacking,
            unfit=request.unreadable,
        )
    finally:
        slow.cancel()
    images, classes = counted(source.num_images, "image"), counted(len(source.classes), "class")
    report(f"{source.spec}: {images} of {classes} found")
    # A name like "digits" is not a folder.
    if is_local(out) and Path(source.spec).is_dir() and local_path(out).resolve().is_relative_to(source.spec):
        raise UserError(f"{out}: it lies inside {source.spec}, whose images are packed; choose an OUT outside of it")
    return source


def _local_engine() -> PartsEngine:
    cores = num_cores()
    return ThreadEngine(cores) if cores <= _MOST_THREADS else LocalEngine(cores)


@dataclass(frozen=True)
class _Packing:
    shown: str  # OUT, as it was given
    out: str
    request: PackRequest
    engine: PartsEngine
    unpacking: Unpacking
    report: Report

    def run(self, source_spec: str) -> tuple[Counts, str]:
        """Return what was found, and what was compared if OUT was there."""
        source, content = self._open(source_spec)
        live = self._live()
        if (before := self._before(live, content)) is not None:
            return self._compare(source, content, before)
        chosen, planned = self._choose(source), None
        try:
            with open_work(self.out, keep=live is not None), self._explain_full_disk():
                planned = self._plan(source, content, *chosen, live)
                del source, chosen  # 100 bytes an image, and the plan is written
                if planned:
                    self._make(*planned)
                    return finish(planned[0], report=self.report), ""
            return self._nothing_new(content)
        except (OSError, UserError):
            before = None if is_local(self.out) else self._before(self._live(), content)
            if before is None:
                raise
            if planned:  # some records may have been written after the other process removed the work folder
                remove_records(planned[0])
            return self._compare(*self._open(source_spec), before)

    def run_step(self, source_spec: str, step: PackStep, task: int, of: int) -> tuple[Counts | None, str]:
        if step == "plan":
            source, content = self._open(source_spec)
            live = self._live()
            if (before := self._before(live, content)) is not None:
                return self._compare(source, content, before)
            with open_work(self.out, keep=True), self._explain_full_disk():
                planned = self._plan(source, content, *self._choose(source), live)
            if planned is None:
                return self._nothing_new(content)
            job, left = planned
            shards = f"{len(left):,} of {counted(len(job.plan.sizes), 'shard')}"
            self.report(f"{self.shown}: planned, {shards} to be made")
            return None, ""
        if (job := load_job(self.out)) is None:
            if step == "finish" and is_there(self.out):
                return demand_same(self.out, {}), "nothing"
            raise UserError(f"{self.shown}: it is not planned yet; take step plan first")
        before = job.content["request"]
        if different := difference(before, self.request.as_json(before["source"])):
            raise UserError(f"{self.shown}: it was planned with another request ({different}); take step plan again")
        if step == "finish":
            with open_work(self.out, keep=True), self._explain_full_disk():
                counts = finish(job, report=self.report)
            clear(self.out, before)
            return counts, ""
        if not 0 <= task < of:
            raise UserError(f"task {task} of {of}: tasks are numbered from 0 to {of - 1}")
        with open_work(self.out, lock="shared", keep=True), self._explain_full_disk():
            self._make(job, range(task, len(job.plan.sizes), of))
        return None, ""

    def _open(self, source_spec: str) -> tuple[Source, dict[str, Any]]:
        source = _open(source_spec, self.shown, self.request, self.unpacking)
        request = self.request.as_json(source.spec)
        return source, {"version": PACK_VERSION, "request": request, "fingerprint": source.fingerprint()}

    def _live(self) -> LiveSet | None:
        return open_live(open_folder(self.out)) if self.request.existing == "append" else None

    def _before(self, live: LiveSet | None, content: dict[str, Any]) -> str | None:
        """Locate the lists of an earlier packing that is to be compared; None if there is none."""
        if live is None:
            return self.out if is_there(self.out) else None
        number = live.find(content)
        return None if number is None else live.lists(number).location

    def _compare(self, source: Source, content: dict[str, Any], packing: str | None = None) -> tuple[Counts, str]:
        shown = self.shown if packing in (None, self.out) else ""
        counts = demand_same(packing or self.out, content, shown=shown)
        compared = compare_seen(packing or self.out, source, self.request, report=self.report)
        clear(self.out, content["request"])  # killed before the end
        return counts, compared

    def _nothing_new(self, content: dict[str, Any]) -> tuple[Counts, str]:
        clear(self.out, content["request"])
        return Counts(), "the bytes of all images, which the set has already"

    def _named(self, live: LiveSet | None = None) -> PackRequest:
        if live is not None:
            if self.request.name not in (None, name := live.manifests["train"].name):
                raise UserError(f"--name: {self.shown} is {name!r}, and what is appended to it, too; leave it out")
            return replace(self.request, name=name)
        last = os.path.basename(os.path.realpath(self.out)) if is_local(self.out) else self.out.rpartition("/")[2]
        return replace(self.request, name=self.request.name or printable(last))

    def _choose(self, source: Source) -> tuple[PackPlan, Excluded | None]:
        plan = make_plan(source, request := self._named())
        excluded = find_excluded(plan, source, request, engine=self.unpacking.engine, report=self.report)
        return (plan if excluded is None else make_plan(source, request, without=excluded.marks)), excluded

    def _plan(
        self, source: Source, content: dict[str, Any], plan: PackPlan, excluded: Excluded | None, live: LiveSet | None
    ) -> tuple[PackJob, Sequence[int]] | None:
        """Write the plan; return it with the shards that are not finished. None if there is nothing to append."""
        request = self._named(live)
        start = start_of(live) if live else Start()
        plan = go_on(plan, live, start) if live else plan
        take(self.out, content["request"])
        if is_there(self.out) if live is None else self._live() != live:
            raise UserError(f"{self.shown}: another packing has finished meanwhile; type the same command again")
        old = load_job(self.out)
        all_files = {id(images.files): images.files for images in source.splits.values()}
        saved = [files.saved(work_folder(self.out)) for files in all_files.values()]
        starts = np.cumsum([0, *(len(files.containers) for files in saved)]).tolist()
        first = dict(zip(all_files, starts, strict=False))
        empty = PlanTable("", {}, [], [], 1)
        job = PackJob(
            out=self.out,
            content=content,
            name=request.name or "",
            classes=plan.classes,
            kind=plan.kind,
            containers=tuple(container for files in saved for container in files.containers),
            plan=empty,
            whole=empty,
            excluded=excluded.counts if excluded else {},
            start=start,
        )
        for files in saved:
            files.prepare(self.report)
        numbers, digests = plan.numbers[:0], b""
        if request.duplicates == "drop":
            whole = job = replace(job, whole=write_table(plan.shards, "whole", job, first=first))
            numbers, digests = plan.numbers, self._digests(whole)
            marks = np.zeros(source.num_images, dtype=np.bool_) if excluded is None else excluded.marks.copy()
            marks[numbers[[number for group in found.equal_digests(digests) for number in group[1:]]]] = True
            if live is not None:
                known = has_before(live, digests)
                self.report(f"{self.shown}: {counted(int(known.sum()), 'image')} left out that the set has already")
                marks[numbers[known]] = True
                if marks[numbers].all():
                    save_job(job, ())  # names what `clear` removes
                    return None
            plan = make_plan(source, request, without=marks)
            plan = go_on(plan, live, start) if live else plan
        table = write_table(plan.shards, "plan", job, first=first)
        job = replace(job, plan=table, whole=table if job.whole is empty else job.whole)
        with scratch_folder(self.out) as scratch:
            write_seen(scratch / SEEN_FILE, source, numbers, digests)
            job.work.put(SEEN_FILE, scratch / SEEN_FILE)
        save_job(job, source.left_out)
        for note in (*source.notes, *plan.notes):
            self.report(note)
        left = self._left(job, old)
        if is_local(self.out):
            self._demand_space([plan.shards[number] for number in left])
        if excluded is not None:
            excluded.write(job.lists, request)
        return job, left

    def _digests(self, job: PackJob) -> bytes:
        sizes = job.whole.sizes
        with Progress(sum(sizes), self.report, status="looking for duplicates") as progress:
            parts = range(len(sizes))
            digests = self.engine.run(
                digest_shard, job, parts, done=lambda each: progress.add(len(each) // found.DIGEST_BYTES)
            )
        self._demand_all(job, parts, digests)
        return b"".join(digests[part] for part in parts)

    def _left(self, job: PackJob, old: PackJob | None) -> list[int]:
        """List the shards that are not finished; remove what an earlier attempt left of others."""
        everything = range(len(job.plan.sizes))
        finished = [number for number, record in enumerate(find_records(job) if old else ()) if record]
        if finished:
            of_all = f"{len(finished):,} of {counted(len(everything), 'shard')}"
            self.report(f"{self.shown}: resuming: {of_all} finished in an earlier attempt")
        if num_others := sweep(job, old, finished):
            self.report(
                f"{self.shown}: {counted(num_others, 'shard')} of an earlier attempt discarded: "
                f"the request or the source has changed since, or an image could not be read"
            )
        return sorted({*everything} - {*finished})

    def _make(self, job: PackJob, numbers: Sequence[int]) -> None:
        sizes, of_these = job.plan.sizes, sum(job.plan.sizes[number] for number in numbers)
        before = sum(sizes) - of_these if isinstance(numbers, list) else 0

        # Pillow warns of odd metadata, which does not matter here. The filter is process-wide: set around all threads.
        with (
            Progress(before + of_these, self.report, done_images=before) as progress,
            warnings.catch_warnings(action="ignore"),
        ):
            made = self.engine.run(make_shard, job, numbers, done=lambda each: progress.add(each.num_images))
            self._demand_all(job, numbers, made)

    def _demand_all(self, job: PackJob, parts: Sequence[int], made: Mapping[int, object]) -> None:
        if missing := [part for part in parts if part not in made]:
            raise UserError(
                f"{self.shown}: {counted(len(missing), 'shard')} could not be read or made (the first: "
                f"{job.file(missing[0])}): their processes died twice, of memory or in a decoder; "
                "the same command goes on"
            )

    @contextmanager
    def _explain_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            is_kept = is_local(self.out) and has_records(self.out)
            kept = f", it resumes from the finished shards in {work_path(Path(self.out))}" if is_kept else ""
            reason = f"the disk is full ({os.strerror(error.errno)}); make room and type the same command again{kept}"
            raise UserError(f"{self.shown}: {reason}") from None

    def _demand_space(self, shards: Sequence[ShardPlan]) -> None:
        folder, resize = work_path(Path(self.out)), self.request.resize
        most = None if resize is None else int(_REDUCED_BYTES_PER_SQUARE_PIXEL * resize.short_pixels**2)
        needed, free = needed_bytes(shards, most_image_bytes=most), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{folder.parent}: the shards need about {show_bytes(needed)} and {show_bytes(free)} are free; "
                f"make room or choose an OUT on another disk"
            )
