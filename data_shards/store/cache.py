"""Cache remote shards as files on this node: complete or absent, shared by its processes, within a size limit.

The holder of its lock (flock, which the kernel releases when the process ends) writes NAME.tar.part, with its space
reserved first; once verified and flushed, it is renamed to NAME.tar. Above the limit the least recently used shard
goes, by the mtime that readers refresh with `touch`; its space is free once its readers close it. Only files with our
own names are seen or removed. The folder must be on a local disk: the locks are those of one node. A download costs a
lock and a listing of the folder, a few milliseconds for a thousand shards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from shardvit.data_shards.control_groups import user_name
from shardvit.data_shards.durable import locked
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_index import ShardIndex, load_index, save_index
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.remote_errors import DownloadStopped, Stop, Transient
from shardvit.data_shards.text import show_bytes

Evict = Literal["any", "idle"]

IDLE_SECONDS = 30.0  # a shard untouched for longer is neither in use nor about to be
TOUCH_SECONDS = 5.0  # interval at which shards in use, or prefetched, need `touch`
_TAR, _PART = ".tar", ".tar.part"
_OURS = re.compile(r"\.?[\w.+-]*-[0-9a-f]{32}(\.tar|\.tar\.part|\.[a-z]+\.npz|\.[a-z]+\.npz\.\d+\.tmp)")
_GROWTH_BYTES = 64 * 2**20  # most to reserve at a time for a shard of unknown size
_POLL_SECONDS = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_FULL_POLL_SECONDS = 0.5
_MOST_POLLS, _MOST_BUSY_POLLS = 30, 300  # of a full disk; the second while others download


def default_cache_folder() -> Path:
    """The user's own folder in the one for temporary files ($TMPDIR or /tmp)."""
    return Path(tempfile.gettempdir()) / f"shardvit-cache-{user_name()}"


@dataclass(frozen=True)
class CacheConfig:
    """The cache's folder and size limit."""

    folder: Path = field(default_factory=default_cache_folder)
    limit_bytes: int = 50 * 10**9


class CacheFull(Exception):
    """Nothing can be evicted at present."""


def is_evicted(descriptor: int) -> bool:
    """True if an open shard was removed from the cache: closing it frees its bytes."""
    return os.fstat(descriptor).st_nlink == 0


def touch(descriptor: int) -> None:
    """Mark an open shard as in use (1 to 2 µs)."""
    with contextlib.suppress(PermissionError):  # a cache filled by another user
        os.utime(descriptor)


@dataclass(frozen=True)
class _CachedFile:
    path: Path
    stem: str  # the shard's name
    kind: str  # "tar", "part" (a tar in progress), "npz" (an index) or "tmp"
    num_bytes: int
    modified: float  # seconds since 1970


class Cache:
    """The files of one cache folder; processes and threads may each have their own `Cache`. Picklable."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config

    def open(self, name: str, *, num_bytes: int | None) -> int | None:
        """Open a complete shard and mark it as in use; None if it is not cached."""
        path = self._path(name + _TAR)
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

    def begin(
        self, name: str, *, evict: Evict, stop: Stop = lambda: False, on_claimed: Callable[[], None] = lambda: None
    ) -> PartialShard | None:
        """Take the lock to write a shard; None while another process or thread has it. See there for `on_claimed`."""
        path = self._path(name + _PART)
        try:
            self.config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.unusable(error) from None
        # The file may have been renamed or removed before it was locked.
        if _try_lock(descriptor) and _is_at(descriptor, path):
            return PartialShard(self, descriptor, name=name, evict=evict, stop=stop, on_claimed=on_claimed)
        os.close(descriptor)
        return None

    def load_index(self, name: str, *, label: str) -> ShardIndex | None:
        path = self._path(f"{name}.{label}.npz")
        try:
            return load_index(path)
        except (FileNotFoundError, ValueError):
            path.unlink(missing_ok=True)
            return None

    def save_index(self, index: ShardIndex, name: str, *, label: str, evict: Evict) -> None:
        """Keep an index beside its cached or partial shard, if there is room."""
        path = self._path(f"{name}.{label}.npz")
        try:
            save_index(index, path)
            with self.locked():
                files = self.files()
                own_bytes = sum(file.num_bytes for file in files if file.stem == name)
                others = [file for file in files if file.stem != name]
                if self.evict_to(self.config.limit_bytes - own_bytes, others, evict=evict):
                    return
        except OSError:
            pass
        path.unlink(missing_ok=True)

    def evict_to(self, most_bytes: int, files: list[_CachedFile], *, evict: Evict) -> bool:
        """Evict shards until `files` have at most `most_bytes`; False if impossible. Needs the folder's lock."""
        total_bytes = sum(file.num_bytes for file in files)
        for victim in _victims(files, evict=evict):
            if total_bytes <= most_bytes:
                break
            total_bytes -= _remove(victim, files)
        return total_bytes <= most_bytes

    def files(self) -> list[_CachedFile]:
        """List our files, after removing those left by dead processes; needs the folder's lock."""
        files: list[_CachedFile] = []
        with os.scandir(self.config.folder) as entries:
            for entry in entries:
                if (match := _OURS.fullmatch(entry.name)) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    kind = {_TAR: "tar", _PART: "part"}.get(match[1]) or entry.name.rpartition(".")[2]
                    stem = entry.name.removesuffix(match[1])
                    file = _CachedFile(Path(entry.path), stem, kind, status.st_size, status.st_mtime)
                    if not _removed_as_stale(file):
                        files.append(file)
        present = {file.stem for file in files if file.kind in ("tar", "part")}
        for orphan in [file for file in files if file.kind == "npz" and file.stem not in present]:
            orphan.path.unlink(missing_ok=True)
            files.remove(orphan)
        return files

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder's lock, which decisions about other processes' files need."""
        return locked(self._path("cache.lock"))

    def _path(self, file: str) -> Path:
        return self.config.folder / file

    def unusable(self, error: OSError) -> UserError:
        return UserError(
            f"the cache folder {self.config.folder} cannot be used ({error.strerror}): "
            "set data.cache.folder to a folder on a local disk that you may write to"
        )


class PartialShard:
    """A shard in progress, locked by this process; a `download.ByteSink`. Exit without `publish` removes it.

    `begin` and `write` raise UserError for a shard larger than the limit or an unusable folder, StoreError for a full
    disk, CacheFull (prefetching) or Transient while there is no room, DownloadStopped if `stop` returned True.
    `begin` calls `on_claimed` once there is room.
    """

    def __init__(
        self, cache: Cache, descriptor: int, *, name: str, evict: Evict, stop: Stop, on_claimed: Callable[[], None]
    ) -> None:
        self._cache, self._descriptor, self._name, self._stop = cache, descriptor, name, stop
        self._evict: Evict = evict
        self._on_claimed = on_claimed
        self._limit_bytes = cache.config.limit_bytes
        self._done = self._reserved = 0
        self._wanted = self._growth = max(1, min(_GROWTH_BYTES, self._limit_bytes // 8))
        self.path = cache.config.folder / (name + _PART)

    def __enter__(self) -> PartialShard:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)  # before releasing the lock, or it might be the next writer's
            os.close(self._descriptor)

    def begin(self, *, num_bytes: int | None) -> None:
        """Start at the first byte, with room for `num_bytes` (None: unknown, as much as was wanted last time)."""
        self._done = self._reserved = 0
        os.ftruncate(self._descriptor, 0)
        self._reserve(self._wanted if num_bytes is None else num_bytes, may_wait=self._evict == "any")
        self._on_claimed()

    def write(self, piece: bytes) -> None:
        if self._done + len(piece) > self._reserved:
            self._wanted = max(self._done + len(piece), min(self._reserved + self._growth, self._limit_bytes))
            try:
                # Do not wait: two writers that hold some room and wait for more would deadlock.
                self._reserve(self._wanted, may_wait=False)
            except CacheFull:
                if self._evict == "idle":
                    raise
                raise Transient("the cache has no room for it at present") from None
        view, relief = memoryview(piece), self._relief(self._reserved)
        while view:
            try:
                written = os.pwrite(self._descriptor, view, self._done)
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._cache.unusable(error) from None
                next(relief)  # this disk cannot reserve space
                continue
            self._done += written
            view = view[written:]

    def finish(self) -> None:
        """Truncate to the bytes received; `path` then holds the whole shard, still invisible to others."""
        os.ftruncate(self._descriptor, self._done)

    def publish(self) -> int:
        """Make it visible to all, durably; the caller must close the returned descriptor."""
        os.fsync(self._descriptor)
        os.utime(self._descriptor)
        if _is_at(self._descriptor, self.path):  # otherwise the folder was cleared, which is like eviction
            os.replace(self.path, self.path.with_name(self._name + _TAR))
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def _reserve(self, upto_bytes: int, *, may_wait: bool) -> None:
        """Grow the file to `upto_bytes`, within the limit and with its space reserved on disk."""
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
                # The disk has less than the limit. Drop the claim while waiting: others may wait for us.
                os.ftruncate(self._descriptor, before)
                next(relief)
            elif not may_wait:
                raise CacheFull
            elif self._stop():
                raise DownloadStopped
            else:
                time.sleep(_POLL_SECONDS)  # for other downloads, which can be evicted when they are done

    def _claim(self, upto_bytes: int) -> bool:
        """Lengthen the file if there is room: other processes count its length."""
        with self._cache.locked():
            if not self._cache.evict_to(self._limit_bytes - upto_bytes, self._others(), evict=self._evict):
                return False
            if os.fstat(self._descriptor).st_size < upto_bytes:
                os.ftruncate(self._descriptor, upto_bytes)
        return True

    def _allocate(self, upto_bytes: int) -> bool:
        """Reserve the space; False if the disk lacks it. A disk that cannot reserve fails only on writing."""
        try:
            os.posix_fallocate(self._descriptor, 0, upto_bytes)
        except OSError as error:
            if error.errno not in _FULL | _CANNOT_RESERVE:
                raise self._cache.unusable(error) from None
            return error.errno in _CANNOT_RESERVE
        return True

    def _relief(self, needed_bytes: int) -> Iterator[None]:
        """Relieve a full disk: each step evicts a shard or waits for one, then the caller retries."""
        has_helped = False
        for steps in count(1):
            if self._stop():
                raise DownloadStopped
            if steps > 1:
                time.sleep(_FULL_POLL_SECONDS)
            with self._cache.locked():
                others = self._others()
                victims = _victims(others, evict=self._evict)[:1]
                for victim in victims:
                    _remove(victim, others)
            if not victims and self._evict == "idle":
                raise CacheFull
            is_busy = bool(victims) or any(file.kind == "part" for file in others)
            has_helped |= is_busy
            # Readers close evicted shards within a few seconds; until then they take up space.
            if (not victims and steps > (_MOST_BUSY_POLLS if is_busy else _MOST_POLLS)) or not has_helped:
                raise StoreError(
                    f"the disk of data.cache.folder, {self._cache.config.folder}, is full: "
                    f"{show_bytes(needed_bytes)} are needed for one shard; free some space, set data.cache.folder to "
                    f"another disk, or data.cache.limit below {show_bytes(self._limit_bytes)}"
                )
            yield

    def _others(self) -> list[_CachedFile]:
        return [file for file in self._cache.files() if file.path != self.path]


def _victims(files: list[_CachedFile], *, evict: Evict) -> list[_CachedFile]:
    """List complete shards, least recently used first."""
    latest = time.time() - IDLE_SECONDS if evict == "idle" else float("inf")
    tars = [file for file in files if file.kind == "tar" and file.modified <= latest]
    return sorted(tars, key=lambda file: file.modified)


def _remove(victim: _CachedFile, files: list[_CachedFile]) -> int:
    to_delete = [file for file in files if file.stem == victim.stem and file.kind in ("tar", "npz")]
    for file in to_delete:
        file.path.unlink(missing_ok=True)
    return sum(file.num_bytes for file in to_delete)


def _removed_as_stale(file: _CachedFile) -> bool:
    """Remove the file if a dead process left it."""
    if file.kind == "tmp" and time.time() - file.modified > IDLE_SECONDS:
        file.path.unlink(missing_ok=True)
        return True
    if file.kind != "part":
        return False
    try:
        descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    with open(descriptor, "rb"):  # closes it
        if is_stale := _try_lock(descriptor) and _is_at(descriptor, file.path):
            file.path.unlink()
        return is_stale


def _try_lock(descriptor: int) -> bool:
    """Take the file's lock, which ends with the descriptor or the process, unless another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
