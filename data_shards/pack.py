"""Images -> tar shards, indexes and manifests: `pack` decides, `pack_plan` plans, `shard_writer` writes.

    OUT/pack.json                       the request, so that the same request again is recognised
    OUT/_info.json                      for timm
    OUT/train/NAME-train-000000.tar     KEY.jpg (png, ...; the source's own bytes), KEY.cls (ASCII label)
    OUT/train/NAME-train-000000.idx     where each sample lies
    OUT/train/manifest.json             and sizes.json for open_clip
    OUT/val/...                         the same, if the source has a val split or `holdout` is given

Everything is written into a hidden folder beside OUT and renamed when it is whole; an OUT that exists is
never changed. It costs one decode per image (CIFAR-10, 60,000 JPEGs of 32x32: 22 s on 2 cores) and the space
of the images plus 1.5 to 2 kB each (tar's blocks). It does not resize, re-encode, rotate or drop images.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_shards.errors import UserError
from data_shards.manifest import Manifest, read_manifest, write_json, write_manifest, write_timm_info
from data_shards.pack_plan import PackPlan, make_plan
from data_shards.shard_writer import Progress, write_shards
from data_shards.sources import Source, open_source

PACK_FILE = "pack.json"
PACK_VERSION = 1
DEFAULT_SAMPLES_PER_SHARD = 1000  # ImageNet: about 110 MB a shard, within the 0.1 to 1 GB that object stores like
NAMED_FAILURES = 5


@dataclass(frozen=True)
class PackReport:
    """What OUT holds. `reused`: it was there already, from the same request, and nothing was written."""

    out: Path
    train: Manifest
    val: Manifest | None
    reused: bool
    seconds: float

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        return (self.train,) if self.val is None else (self.train, self.val)

    @property
    def num_images(self) -> int:
        return sum(manifest.num_samples for manifest in self.manifests)


def pack(
    source_spec: str,
    out: Path,
    *,
    classes: Sequence[str] | None = None,
    holdout: float | None = None,
    samples_per_shard: int = DEFAULT_SAMPLES_PER_SHARD,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> PackReport:
    """Pack a source (see `open_source`) into OUT/train and, if it has one or `holdout` is given, OUT/val.

    `classes` packs these classes only, labelled 0, 1, ... in the order given. `holdout` is the fraction of
    each class that becomes split val. Equal source, arguments and library versions give byte-identical tars.
    Raises UserError for bad input, for an OUT that holds anything else than the result of this very request,
    and for a source that has changed since; after an error nothing new is left behind.
    """
    start = time.monotonic()
    out = Path(out)
    source = open_source(source_spec)
    request = {
        "source": source.spec,
        "classes": None if classes is None else list(classes),
        "holdout": holdout,
        "samples_per_shard": samples_per_shard,
        "seed": seed,
    }
    fingerprint = source.fingerprint()
    if _is_taken(out):
        _demand_same(out, request, fingerprint)
        manifests = _read_splits(out)
        for manifest in manifests.values():
            report(_summary(manifest, "was packed before"))
        return PackReport(out, manifests["train"], manifests.get("val"), True, time.monotonic() - start)

    plan = make_plan(source, classes=classes, holdout=holdout, samples_per_shard=samples_per_shard, seed=seed)
    for note in source.notes:
        report(note)
    with _temporary_beside(out) as temporary:
        with Progress(plan.num_images, report) as progress:
            _write(plan, source, temporary, progress)
        write_json(temporary / PACK_FILE, {"version": PACK_VERSION, "request": request, "fingerprint": fingerprint})
        _sync_folders(temporary)
        try:
            os.rename(temporary, out)  # replaces an empty folder, fails on any other
        except OSError as error:
            raise UserError(f"{out}: the folder could not be put in place ({error.strerror}); choose another") from None
    _sync_folder(out.parent)
    manifests = _read_splits(out)
    for manifest in manifests.values():
        report(_summary(manifest, "packed"))
    return PackReport(out, manifests["train"], manifests.get("val"), False, time.monotonic() - start)


def _write(plan: PackPlan, source: Source, folder: Path, progress: Progress) -> None:
    """All splits; raises UserError if any image is unreadable."""
    manifests: list[Manifest] = []
    unreadable: list[tuple[str, str]] = []
    for split, shards in plan.splits.items():
        root = folder / split
        root.mkdir()
        written = write_shards(shards, root, num_threads=_num_cores(), progress=progress)
        unreadable += written.unreadable
        if not unreadable:
            manifest = Manifest(root, source.name, split, plan.classes, tuple(written.shards), source.spec)
            write_manifest(manifest)
            manifests.append(manifest)
    if unreadable:
        named = "; ".join(f"{where} ({reason})" for where, reason in sorted(unreadable)[:NAMED_FAILURES])
        more = f"; and {len(unreadable) - NAMED_FAILURES} more" if len(unreadable) > NAMED_FAILURES else ""
        raise UserError(
            f"{source.spec}: {len(unreadable)} of {plan.num_images} images cannot be read; "
            f"nothing was written; mend or remove {named}{more}"
        )
    write_timm_info(folder, manifests)


def _is_taken(out: Path) -> bool:
    """Whether something is there already; an empty folder counts as nothing."""
    if not os.path.lexists(out):
        return False
    return not out.is_dir() or any(out.iterdir())


def _demand_same(out: Path, request: Mapping[str, object], fingerprint: str) -> None:
    """Raise UserError unless OUT is the result of this request on this very source."""
    try:
        packed = json.loads((out / PACK_FILE).read_text(encoding="utf-8"))
        known = packed["version"] == PACK_VERSION
        before, fingerprint_before = dict(packed["request"]), packed["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{out}: it exists and was not packed by shardvit; choose another folder or delete it"
        ) from None
    different = [key for key in request if before.get(key) != request[key]]
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


def _read_splits(out: Path) -> dict[str, Manifest]:
    manifests = {"train": read_manifest(out / "train")}
    if (out / "val").is_dir():
        manifests["val"] = read_manifest(out / "val")
    return manifests


@contextmanager
def _temporary_beside(out: Path) -> Iterator[Path]:
    """An empty folder `.OUT.packing` that is ours alone, removed at the end unless it was renamed.

    One that a killed process left is taken over; a lock, which dies with its process, tells the two apart.
    """
    resolved = out.resolve()
    temporary = resolved.parent / f".{resolved.name}.packing"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{temporary}: the folder cannot be made ({error.strerror}); choose another OUT") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = temporary.exists() and os.path.samestat(os.fstat(handle), os.stat(temporary))
        except OSError:
            ours = False
        if not ours:
            raise UserError(f"{out}: another process is packing into it; wait for it or choose another folder")
        try:
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
        finally:
            if temporary.exists() and os.path.samestat(os.fstat(handle), os.stat(temporary)):
                shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(handle)


def _sync_folders(root: Path) -> None:
    for folder in (*(path for path in root.iterdir() if path.is_dir()), root):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _num_cores() -> int:
    """The cores that this process may use (a container or a batch system may grant fewer than the machine
    has).
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _summary(manifest: Manifest, verb: str) -> str:
    return (
        f"{manifest.root}: {verb}: {manifest.num_samples:,} images of {manifest.num_classes} classes in "
        f"{len(manifest.shards)} shards, {manifest.num_bytes / 1e6:,.1f} MB"
    )
