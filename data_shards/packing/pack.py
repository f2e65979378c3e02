"""Images -> tar shards, indexes and manifests: `pack` decides, `plan` plans, `shard_writer` writes.

    OUT/pack.json                       the request, so that the same request again is recognised; what was found
    OUT/_info.json                      for timm
    OUT/train/NAME-train-000000.tar     KEY.jpg (png, ...; the source's own bytes, unless `resize` reduces them) and
                                        KEY.cls (ASCII label), or KEY.json ({"label": [3, 7]}) for several labels
    OUT/train/NAME-train-000000.idx     where each sample lies
    OUT/train/manifest.json             and sizes.json for open_clip
    OUT/val/..., OUT/test/...           the same, if the source has such splits; val also if `holdout` is given
    OUT/duplicates.jsonl                images with the same bytes, if there are any
    OUT/unreadable.jsonl                images that were left out, if there are any

Everything is written into a hidden folder beside OUT and renamed when it is whole; an OUT that exists is never
changed. After a kill, a full disk or an unreadable image the same command goes on with the shards that are finished,
and the result is the same to the byte. It costs one decode per image (60,000 JPEGs of 32x32: 6 CPU seconds, 1,000
ImageNet photographs: 2) and the space of the images plus 1.5 to 2 kB each (tar's blocks).
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from data_shards.durable import flush
from data_shards.errors import UserError
from data_shards.images.decode import PixelLimit
from data_shards.manifest import Manifest, read_manifest, write_json, write_timm_info
from data_shards.packing.finish import list_beside, unreadable_error, write_manifests
from data_shards.packing.found import (
    Counts,
    UnreadableFile,
    count,
    duplicate_groups,
    repeated,
    unreadable_files,
    write_duplicates,
    write_unreadable,
)
from data_shards.packing.image import PACKED_LIMIT, Resize
from data_shards.packing.request import PackRequest
from data_shards.packing.shard_plan import PackPlan, ShardPlan, ShardSize, make_plan, needed_bytes
from data_shards.packing.shard_writer import plan_mark, read_digests, write_shards
from data_shards.packing.split import read_holdout_list
from data_shards.packing.summary import DUPLICATES_FILE, UNREADABLE_FILE, PackReport
from data_shards.packing.work import ShardRecord, WorkFolder, open_work, work_path
from data_shards.processes import num_cores
from data_shards.progress_line import Progress
from data_shards.sources import LabelList, Source, open_source
from data_shards.sources.base import SplitName
from data_shards.text import parse_json, show_bytes

PACK_FILE = "pack.json"
PACK_VERSION = 1
DEFAULT_SAMPLES_PER_SHARD = 1000  # ImageNet: about 110 MB a shard, within the 0.1 to 1 GB that object stores like
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# An ImageNet photograph of 320 pixels' short side takes 43 kB at quality 90.
_REDUCED_BYTES_PER_SQUARE_PIXEL = 0.42


def pack(
    source_spec: str,
    out: Path,
    *,
    labels: LabelList | None = None,
    classes: Sequence[str] | None = None,
    holdout: float | None = None,
    holdout_list: Path | None = None,
    samples_per_shard: int | None = None,
    shard_size_bytes: int | None = None,
    resize: Resize | None = None,
    pixel_limit: PixelLimit = PACKED_LIMIT,
    unreadable: Literal["refuse", "skip"] = "refuse",
    duplicates: Literal["keep", "drop"] = "keep",
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> PackReport:
    """Pack a source (see `open_source`) into OUT/train and, where it has them, OUT/val and OUT/test.

    Equal source, arguments and library versions give byte-identical tars, on any number of cores and through any
    number of interruptions.

    Args:
        source_spec: a folder, or the name of a source.
        out: the folder to be made.
        labels: where the labels of a folder's images stand, if not in the names of their folders.
        classes: pack these classes only, labelled 0, 1, ... in the order given.
        holdout: the fraction of each class (of all images, where they have several labels) that becomes split val.
        holdout_list: a file with the paths of the images that become split val, one a line.
        samples_per_shard: images in a tar at most; 1000 unless `shard_size_bytes` is given.
        shard_size_bytes: size of a tar at most, within one image; decided by the sizes of the source's files.
        resize: reduce large images.
        pixel_limit: larger images count as unreadable, and are not decoded.
        unreadable: images that cannot be read end the packing, after a look at all, or are left out and listed.
        duplicates: of images with the same bytes keep all, or the first in the order of the shards, train before val.
        seed: of the shuffle and of the held-out choice.
        report: takes lines for the user.

    Raises:
        UserError: for bad input, for an OUT that holds anything else than the result of this very request, for a source
            that has changed since, for unreadable images, and for a full disk.
    """
    start = time.monotonic()
    out = Path(out)
    if holdout is not None and holdout_list is not None:
        raise UserError("holdout, holdout_list: give one of them, not both")
    if samples_per_shard is None and shard_size_bytes is None:
        samples_per_shard = DEFAULT_SAMPLES_PER_SHARD
    asked = PackRequest(
        labels=labels,
        classes=classes,
        holdout=holdout
        if holdout_list is None
        else read_holdout_list(holdout_list, root=Path(source_spec).expanduser()),
        shard_size=ShardSize(samples_per_shard, shard_size_bytes),
        resize=resize,
        pixel_limit=pixel_limit,
        unreadable=unreadable,
        duplicates=duplicates,
        seed=seed,
    )
    source = open_source(source_spec, labels=labels, unfit=unreadable)
    request = asked.as_json(source)
    fingerprint = source.fingerprint()
    counts = _demand_same(out, request, fingerprint) if _is_taken(out) else None
    reused = counts is not None
    if counts is None:
        content = {"version": PACK_VERSION, "request": request, "fingerprint": fingerprint}
        counts = _pack(source, out, asked, content, report)
    elif work_path(out).is_dir():  # it was killed between the rename and the end
        with open_work(out) as work:
            shutil.rmtree(work.path)
    manifests = _read_splits(out)
    result = PackReport(
        out,
        manifests["train"],
        manifests.get("val"),
        manifests.get("test"),
        counts,
        reused,
        time.monotonic() - start,
    )
    for line in result.lines(dropped=duplicates == "drop"):
        report(line)
    return result


def _pack(
    source: Source, out: Path, asked: PackRequest, content: dict[str, object], report: Callable[[str], None]
) -> Counts:
    """Plan, write and put OUT in place; `content` is what pack.json begins with."""
    num_threads = num_cores()
    planned = partial(
        make_plan,
        source,
        classes=asked.classes,
        holdout=asked.holdout,
        shard_size=asked.shard_size,
        seed=asked.seed,
    )
    whole_plan = plan = planned()
    digests = None
    if asked.duplicates == "drop":
        with Progress(plan.num_images, report, doing="looking for duplicates") as progress:
            digests = read_digests(plan.shards, num_threads=num_threads, progress=progress)
        plan = planned(without=repeated(plan, source, digests))
    for note in (*source.notes, *plan.notes):
        report(note)
    with open_work(out) as work:
        try:
            records = _write(plan, work, asked, num_threads, report, out)
            refused = unreadable_files(plan, records)
            if refused and asked.unreadable == "refuse":
                raise unreadable_error(refused, source, plan, out)
            if digests is None:
                digests = b"".join(records[shard.file].image_digests for shard in plan.shards)
            groups = duplicate_groups(whole_plan, digests, duplicates=asked.duplicates, unreadable=refused)
            refused = [*_unlabelled(source), *refused]
            counts = count(groups, num_unreadable=len(refused))
            if groups:
                write_duplicates(groups, work.result / DUPLICATES_FILE)
            if refused:
                write_unreadable(refused, work.result / UNREADABLE_FILE)
            write_timm_info(work.result, write_manifests(plan, source, records, work.result, report))
            write_json(work.result / PACK_FILE, {**content, "found": vars(counts)})
            for folder in (*(work.result / split for split in plan.splits), work.result):
                flush(folder)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            kept = f", it goes on from the finished shards in {work.path}" if work.has_records else ""
            raise UserError(
                f"{out}: the disk is full ({os.strerror(error.errno)}); make room and type the same command again{kept}"
            ) from None
        try:
            os.rename(work.result, out)  # replaces an empty folder, fails on any other
        except OSError as error:
            raise UserError(f"{out}: the folder could not be put in place ({error.strerror}); choose another") from None
        flush(out.parent)
    list_beside(out).unlink(missing_ok=True)
    return counts


def _unlabelled(source: Source) -> list[UnreadableFile]:
    reason = "it lies beside the class folders, so that it has no label"
    return [UnreadableFile(path=path, split=split, label=None, reason=reason) for split, path in source.left_out]


def _write(
    plan: PackPlan,
    work: WorkFolder,
    asked: PackRequest,
    num_threads: int,
    report: Callable[[str], None],
    out: Path,
) -> dict[str, ShardRecord]:
    """All shards' records, of those that were finished before and of the others."""
    marks = {
        shard.file: (split, plan_mark(shard, resize=asked.resize, limit=asked.pixel_limit) if work.has_records else "")
        for split, shards in plan.splits.items()
        for shard in shards
    }
    finished, num_others = work.recover(marks)
    if finished:
        report(f"{out}: going on: {len(finished):,} of {len(marks):,} shards are there from an earlier try")
    if num_others:
        report(
            f"{out}: {num_others:,} shards of an earlier try were thrown away: "
            f"the request or the source has changed since, or an image could not be read"
        )
    left = [shard for shard in plan.shards if shard.file not in finished]
    _demand_space(left, asked.resize, work.path)
    paths = {work.result / marks[shard.file][0] / shard.file: shard for shard in left}
    done_images = plan.num_images - sum(len(shard) for shard in left)
    with Progress(plan.num_images, report, done_images=done_images) as progress:
        written = write_shards(
            paths,
            resize=asked.resize,
            limit=asked.pixel_limit,
            num_threads=num_threads,
            progress=progress,
            save=work.save,
        )
    return finished | written


def _demand_space(shards: Sequence[ShardPlan], resize: Resize | None, folder: Path) -> None:
    most = None if resize is None else int(_REDUCED_BYTES_PER_SQUARE_PIXEL * resize.short_pixels**2)
    needed, free = needed_bytes(shards, most_image_bytes=most), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder.parent}: the shards need about {show_bytes(needed)} and {show_bytes(free)} are free; "
            f"make room or choose an OUT on another disk"
        )


def _is_taken(out: Path) -> bool:
    """Whether something is there already; an empty folder counts as nothing."""
    if not os.path.lexists(out):
        return False
    return not out.is_dir() or any(out.iterdir())


def _demand_same(out: Path, request: Mapping[str, object], fingerprint: str) -> Counts:
    """What was found then. Raises UserError unless OUT is the result of this request on this very source."""
    try:
        packed = parse_json((out / PACK_FILE).read_bytes())
        known = packed["version"] == PACK_VERSION
        before, fingerprint_before = dict(packed["request"]), packed["fingerprint"]
        counts = Counts(**packed.get("found", {}))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{out}: it exists and was not packed by shardvit; choose another folder or delete it"
        ) from None
    different = [key for key in {**request, **before} if before.get(key) != request.get(key)]
    if not known or different:
        key = different[0] if different else "version"
        raise UserError(
            f"{out}: it exists and was packed otherwise "
            f"({key}: {before.get(key)!r} then, {request.get(key)!r} now); choose another folder or delete it"
        )
    if fingerprint_before != fingerprint:
        raise UserError(
            f"{out}: it was packed from {request['source']}, which has changed since; "
            f"choose another folder or delete it"
        )
    return counts


def _read_splits(out: Path) -> dict[str, Manifest]:
    splits: tuple[SplitName, ...] = ("train", "val", "test")
    return {split: read_manifest(out / split) for split in splits if split == "train" or (out / split).is_dir()}
