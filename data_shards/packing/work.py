"""Where a packing works, and its lock: `.OUT.packing` beside a local OUT, `OUT/.packing/` in a store.

    plan.json, plan/00000.parquet    see `plan_file`
    records/SHARD.tar.json           record of a finished shard, written after its tar and index
    result/...                       renamed to OUT when complete; in a store, shards are put into OUT itself

A local lock keeps a second packing out; of two in a store, both write the same bytes.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.store.folders import Folder, open_folder

# Network file systems without locks for folders.
_NO_LOCKS = (errno.EBADF, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def work_path(out: Path) -> Path:
    """`a/OUT` -> `a/.OUT.packing`."""
    resolved = out.resolve()
    return resolved.parent / f".{resolved.name}.packing"


def work_folder(out: str) -> Folder:
    """Open the folder of plan and records."""
    return open_folder(work_path(local_path(out))) if is_local(out) else open_folder(out).at(".packing")


def unpacked_path(out: str) -> Path:
    """`a/OUT` -> `a/.OUT.unpacked`, for decompressed archives until OUT is complete; of a URL in the cache."""
    if is_local(out):
        return work_path(local_path(out)).with_suffix(".unpacked")
    from hashlib import sha256

    from shardvit.data_shards.shards.shard_index import default_index_folder

    return default_index_folder().with_name("unpacked") / sha256(out.encode()).hexdigest()[:16]


@contextmanager
def scratch_folder(out: str) -> Iterator[Path]:
    """Make a folder for what is half written, on OUT's disk (of a URL: where the system has such), and remove it."""
    above = work_path(local_path(out)) / "scratch" if is_local(out) else None
    if above:
        above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above, prefix=".packing-") as own:
        yield Path(own)


def has_records(out: str) -> bool:
    """True if a local packing has finished shards."""
    records = work_path(local_path(out)) / "records"
    return records.is_dir() and any(records.iterdir())


@contextmanager
def open_work(out: str, *, lock: Literal["alone", "shared"] = "alone", keep: bool = False) -> Iterator[None]:
    """Create or take over the work folder; UserError if another packing has it.

    Several tasks of one packing share it. Removed at the end if no shard is finished, unless `keep`.
    """
    if not is_local(out):
        yield
        return
    path = work_path(local_path(out))
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{path}: the folder cannot be made ({error.strerror}); choose another OUT") from None
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if lock == "alone" else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            ours = path.exists() and os.path.samestat(os.fstat(handle), os.stat(path))
        except OSError as error:
            ours = error.errno in _NO_LOCKS
        if not ours:
            raise UserError(
                f"{redacted(out)}: another process is packing into it; wait for it or choose another folder"
            )
        try:
            yield
        finally:
            if not keep and not (has_records(out) and (path / "result").is_dir()):
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
