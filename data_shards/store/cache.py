"""Remote shards as files of this node: complete or absent, shared by all its processes, within a size limit.

A shard is written as NAME.tar.part by the process that holds that file's lock (flock, which the kernel releases when
the process ends), with its space reserved first; the rename to NAME.tar makes it visible once it is verified and on the
disk. Above the limit the least recently used shard is removed, by the mtime that a reader refreshes with `touch`;
readers keep it open (`is_evicted`), and it takes up space until they close it. Files in progress and indexes count.
Each download costs a lock and a listing of the folder: a few milliseconds for a thousand shards. The folder must be on
a local disk: the locks are those of one node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from data_shards.control_groups import user_name
from data_shards.errors import UserError
from data_shards.shards.shard_index import ShardIndex, load_index, save_index
from data_shards.store.cache_folder import (
    PART,
    TAR,
    CachedFile,
    Evict,
    files_in,
    is_at,
    remove,
    touch,
    try_lock,
    victims,
)
from data_shards.store.download import StoreError
from data_shards.store.remote_errors import DownloadStopped, Stop, Transient
from data_shards.text import show_bytes

_GROWTH_BYTES = 64 * 2**20  # reserved at once, at most, where the size is not known beforehand
_POLL_SECONDS = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_FULL_POLL_SECONDS = 0.5
# Readers close evicted shards within a few seconds; until then they take up space.
_FULL_POLLS = {"evicted": 10**9, "busy": 300, "nothing": 30}


def default_cache_folder() -> Path:
    """In the folder for temporary files ($TMPDIR or /tmp), one for each user."""
    return Path(tempfile.gettempdir()) / f"shardvit-cache-{user_name()}"


@dataclass(frozen=True)
class CacheConfig:
    """Where shards are kept, and how many bytes of them."""

    folder: Path = field(default_factory=default_cache_folder)
    limit_bytes: int = 50 * 10**9


class NoRoom(Exception):
    """Nothing can be evicted now."""


class Cache:
    """The files of one cache folder; several processes and threads may each have their own. Picklable."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config

    def open(self, name: str, *, num_bytes: int | None) -> int | None:
        """A descriptor of a complete shard, marked as in use; None if it is not cached."""
        path = self._path(name + TAR)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.unusable(error) from None
        if num_bytes is not None and os.fstat(descriptor).st_size != num_bytes:
            os.close(descriptor)  # after a power failure, or edited by hand
            path.unlink(missing_ok=True)
            return None
        touch(descriptor)
        return descriptor

    def begin(self, name: str, *, evict: Evict, stop: Stop = lambda: False) -> PartialShard | None:
        """Become the writer of a shard; None while another process, or thread, is."""
        path = self._path(name + PART)
        try:
            self.config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.unusable(error) from None
        # Check after locking: the file may have been renamed or removed between opening and locking.
        if try_lock(descriptor) and is_at(descriptor, path):
            return PartialShard(self, descriptor, name=name, evict=evict, stop=stop)
        os.close(descriptor)
        return None

    def load_index(self, name: str, *, label: str) -> ShardIndex | None:
        path = self._index_path(name, label)
        try:
            return load_index(path)
        except FileNotFoundError:
            return None
        except ValueError:
            path.unlink(missing_ok=True)
            return None

    def save_index(self, index: ShardIndex, name: str, *, label: str, evict: Evict) -> None:
        """Keep an index beside its cached or partial shard; without room for it, it is not kept."""
        path = self._index_path(name, label)
        try:
            save_index(index, path)
            with self.locked():
                files = files_in(self.config.folder)
                others = [file for file in files if file.stem != name]
                if not self.evict_bytes(sum(file.num_bytes for file in files), others, evict=evict):
                    path.unlink(missing_ok=True)
        except OSError:
            path.unlink(missing_ok=True)

    def evict_one(self, part: Path, *, evict: Evict) -> Literal["evicted", "busy", "nothing"]:
        """Remove one shard to make room for `part`; "busy": there is none yet, but downloads are running."""
        with self.locked():
            others = [file for file in files_in(self.config.folder) if file.path != part]
            victim = next(victims(others, evict=evict), None)
            if victim is None:
                return "busy" if any(file.kind == "part" for file in others) else "nothing"
            remove(victim, others)
        return "evicted"

    def evict_bytes(self, total_bytes: int, files: list[CachedFile], *, evict: Evict) -> bool:
        """Remove shards until `total_bytes` is within the limit; whether it is. Needs the folder's lock."""
        candidates = victims(files, evict=evict)
        while total_bytes > self.config.limit_bytes:
            victim = next(candidates, None)
            if victim is None:
                return False
            total_bytes -= remove(victim, files)
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        descriptor = os.open(self._path("cache.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _path(self, file: str) -> Path:
        return self.config.folder / file

    def _index_path(self, name: str, label: str) -> Path:
        return self._path(f"{name}.{label}.npz")

    def unusable(self, error: OSError) -> UserError:
        return UserError(
            f"the cache folder {self.config.folder} cannot be used ({error.strerror}): "
            "set data.cache.folder to a folder on a local disk that you may write to"
        )


class PartialShard:
    """A shard in progress, whose lock this process holds; a `download.ByteSink`. Leaving it unpublished removes it.

    `begin` and `write` raise:
        UserError: the shard is larger than the limit, or the folder cannot be used.
        StoreError: the disk is full, and nothing can be evicted, or readers keep it open for 15 seconds.
        NoRoom: all shards are in use, and prefetching evicts none of those.
        Transient: there is no room at present.
        DownloadStopped: `stop` returned True.
    """

    def __init__(self, cache: Cache, descriptor: int, *, name: str, evict: Evict, stop: Stop) -> None:
        self._cache, self._descriptor, self._name = cache, descriptor, name
        self._evict: Evict = evict
        self._stop = stop
        self._limit_bytes = cache.config.limit_bytes
        self._done = self._reserved = 0
        self._growth = max(1, min(_GROWTH_BYTES, self._limit_bytes // 8))
        self._wanted = self._growth
        self.path = cache.config.folder / (name + PART)

    def __enter__(self) -> PartialShard:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)  # before the lock is released, or it might be the next writer's
            os.close(self._descriptor)

    def begin(self, *, num_bytes: int | None) -> None:
        """Start from the first byte, with room for all (None: unknown, then for as many as failed last time)."""
        self._done = self._reserved = 0
        os.ftruncate(self._descriptor, 0)
        self._reserve(self._wanted if num_bytes is None else num_bytes, may_wait=self._evict == "any")

    def write(self, piece: bytes) -> None:
        if self._done + len(piece) > self._reserved:
            self._wanted = max(self._done + len(piece), min(self._reserved + self._growth, self._limit_bytes))
            try:
                # Not waiting: two writers that hold some room and wait for more would deadlock.
                self._reserve(self._wanted, may_wait=False)
            except NoRoom:
                if self._evict == "idle":
                    raise
                raise Transient("the cache has no room for it at present") from None
        view = memoryview(piece)
        relief = self._relief(self._reserved)
        while view:
            try:
                written = os.pwrite(self._descriptor, view, self._done)
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._cache.unusable(error) from None
                next(relief)  # a disk that cannot reserve
                continue
            self._done += written
            view = view[written:]

    def finish(self) -> None:
        """Truncate to what came; afterwards `path` has the whole shard, not yet visible to others."""
        os.ftruncate(self._descriptor, self._done)

    def publish(self) -> int:
        """Make it visible to all, also after a power failure; the caller must close the returned descriptor."""
        os.fsync(self._descriptor)
        os.utime(self._descriptor)
        if is_at(self._descriptor, self.path):  # else the folder was cleared: as good as evicted
            os.replace(self.path, self.path.with_name(self._name + TAR))
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def _reserve(self, upto_bytes: int, *, may_wait: bool) -> None:
        """Make the file so long, with the space for it on the disk, within the limit."""
        if upto_bytes > self._limit_bytes:
            raise UserError(
                f"data.cache.limit is {show_bytes(self._limit_bytes)}, but one shard alone needs "
                f"{show_bytes(upto_bytes)}: raise it, to several shards for each process"
            )
        before = os.fstat(self._descriptor).st_size
        relief = self._relief(upto_bytes)
        while True:
            if self._claim(upto_bytes):
                if self._allocate(upto_bytes):
                    self._reserved = upto_bytes
                    return
                # The disk has less than the limit. No claim while waiting: others may wait for us.
                os.ftruncate(self._descriptor, before)
                next(relief)
            elif not may_wait:
                raise NoRoom
            elif self._stop():
                raise DownloadStopped
            else:
                time.sleep(_POLL_SECONDS)  # for downloads of others, which can be evicted when they are done

    def _claim(self, upto_bytes: int) -> bool:
        """Whether there is room; if so the file is lengthened, which is how other processes learn of the claim."""
        with self._cache.locked():
            others = [file for file in files_in(self._cache.config.folder) if file.path != self.path]
            total_bytes = sum(file.num_bytes for file in others) + upto_bytes
            if not self._cache.evict_bytes(total_bytes, others, evict=self._evict):
                return False
            if os.fstat(self._descriptor).st_size < upto_bytes:
                os.ftruncate(self._descriptor, upto_bytes)
        return True

    def _allocate(self, upto_bytes: int) -> bool:
        """Whether the disk has the space; a disk that cannot reserve fails only on writing."""
        try:
            os.posix_fallocate(self._descriptor, 0, upto_bytes)
        except OSError as error:
            if error.errno in _FULL:
                return False
            if error.errno not in _CANNOT_RESERVE:
                raise self._cache.unusable(error) from None
        return True

    def _relief(self, needed_bytes: int) -> Iterator[None]:
        """Remedies for a full disk: each step evicts a shard, or waits for one; then the caller retries."""
        has_helped = False
        for steps in count(1):
            if self._stop():
                raise DownloadStopped
            if steps > 1:
                time.sleep(_FULL_POLL_SECONDS)
            found = self._cache.evict_one(self.path, evict=self._evict)
            if found != "evicted" and self._evict == "idle":
                raise NoRoom
            has_helped |= found != "nothing"
            if steps > _FULL_POLLS[found] or not has_helped:
                raise StoreError(
                    f"the disk of data.cache.folder, {self._cache.config.folder}, is full: "
                    f"{show_bytes(needed_bytes)} are needed for one shard; free some space, set data.cache.folder to "
                    f"another disk, or data.cache.limit below {show_bytes(self._limit_bytes)}"
                )
            yield
