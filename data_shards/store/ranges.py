"""Read byte ranges of files anywhere, and list folders anywhere: what workers need that pack from a bucket.

A range costs one request (two in stores without S3's protocol), at most 32 at a time in a process, retried as downloads
are. Listing a bucket takes a request for each 1,000 names, several at a time where there are folders, and the memory of
a folder's names. Web servers have no listing.
"""

import errno
import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import merge
from itertools import chain
from typing import IO, Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import is_local, join, local_path, protocol, redacted
from shardvit.data_shards.store.bucket import Listed, is_bucket, page, read_stamped
from shardvit.data_shards.store.download import Downloads, MissingObject, RetryPolicy
from shardvit.data_shards.store.remote import REQUESTS_IN_FLIGHT, fingerprint_of
from shardvit.data_shards.store.remote_errors import Missing, Transient

SHARED = Downloads(RetryPolicy())  # a process has one file system, and its connections, for each store
_IN_FLIGHT = threading.BoundedSemaphore(REQUESTS_IN_FLIGHT)
_LISTERS = 8
_MOST_LOOSE = 10_000  # files beside folders; with more, listing by folder does not pay
_LEVELS = 3


def read_range(location: str, offset: int, size: int, *, stamp: str = "") -> bytes:
    """Read `size` bytes of a path or URL; errors as in `read_stamped_range`, OSError for another stamp (unless "")."""
    data, found = read_stamped_range(location, offset, size)
    if stamp and found != stamp:
        raise _changed(location)
    return data


def read_whole(location: str) -> bytes:
    """Read a small file whole; FileNotFoundError, and errors as in `read_range`."""
    file = RangedFile(location)
    return read_range(location, 0, file.num_bytes, stamp=file.stamp)


def read_stamped_range(location: str, offset: int, size: int) -> tuple[bytes, str]:
    """Read `size` bytes and the file's stamp, as `stat_url` and `list_url` tell it.

    OSError if it is not there, or shorter; StoreError if the store fails for ten minutes or refuses.
    """
    if is_local(location):
        with open(local_path(location), "rb") as file:
            file.seek(offset)
            data, stamp = file.read(size), _local_stamp(os.fstat(file.fileno()))
        if len(data) < size:
            raise _changed(location)
        return data, stamp
    if size == 0:  # HTTP has no empty ranges
        return b"", stat_url(location)[1]
    end = offset + size

    def attempt(remote: Any) -> tuple[bytes, str]:
        with _IN_FLIGHT:
            data, stamp = read_stamped(remote, offset, end) if is_bucket(remote) else remote.stamped(offset, end)
        if len(data) != size:
            num_bytes = remote.about().num_bytes
            is_short = num_bytes is not None and num_bytes < end
            raise (Missing if is_short else Transient)(f"{len(data)} bytes came where {size} were asked for")
        return data, stamp

    try:
        return SHARED.retried(location, attempt, num_bytes=size)
    except MissingObject:
        raise _changed(location) from None


def stat_url(location: str) -> tuple[int | None, str]:
    """Size in bytes (None: unknown) and stamp of a file; FileNotFoundError if there is none."""
    if is_local(location):
        status = os.stat(local_path(location))
        return status.st_size, _local_stamp(status)
    try:
        return SHARED.about(location)
    except MissingObject as error:
        raise FileNotFoundError(errno.ENOENT, str(error), redacted(location)) from None


class RangedFile(io.RawIOBase):
    """A file anywhere, opened for reading by ranges, as pyarrow reads the parts of parquet that it needs.

    OSError if it changes meanwhile; FileNotFoundError if there is none.
    """

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location
        size, self.stamp = stat_url(location)
        if size is None:
            raise UserError(f"{redacted(location)}: the server does not tell its size: copy it to a folder first")
        self.num_bytes, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.num_bytes - self._at))
        if size:
            buffer[:size] = read_range(self.location, self._at, size, stamp=self.stamp)
        self._at += size
        return size


def open_file(location: str, *, ahead_bytes: int) -> IO[bytes]:
    """Open a path or URL for reading, of a URL `ahead_bytes` at a time; errors as of `RangedFile`."""
    if is_local(location):
        return open(local_path(location), "rb")
    return io.BufferedReader(RangedFile(location), ahead_bytes)


def list_url(location: str) -> Iterator[Listed]:
    """List all files below a folder: name relative to it, bytes, stamp; in the order of the names' UTF-8 bytes."""
    if protocol(location) in ("http", "https"):
        raise UserError(f"{redacted(location)}: a web server lists no folder: name the tars, .../{{00000..00099}}.tar")
    with ThreadPoolExecutor(_LISTERS) as pool:
        yield from _spread(location, pool, "", levels=_LEVELS)


def _spread(url: str, pool: ThreadPoolExecutor, below: str, *, levels: int) -> Iterator[Listed]:
    """List a folder, several of the folders in it at a time."""
    files, folders = list[Listed](), list[str]()
    for found_files, found_folders in _pages(url, below, delimiter="/"):
        files += found_files
        folders += found_folders
        if len(files) > _MOST_LOOSE:
            yield from _below(url, below)
            return
    is_few = levels and len(folders) < _LISTERS
    listed = (_spread(url, pool, each, levels=levels - 1) for each in folders) if is_few else _ahead(url, pool, folders)
    yield from merge(files, chain.from_iterable(listed), key=_place)


def _ahead(url: str, pool: ThreadPoolExecutor, folders: list[str]) -> Iterator[list[Listed]]:
    """List folders in order, a few of them ahead."""
    waiting = deque[Future[list[Listed]]]()
    for folder in folders:
        waiting.append(pool.submit(lambda each: [*_below(url, each)], folder))
        if len(waiting) > 2 * _LISTERS:
            yield waiting.popleft().result()
    yield from (each.result() for each in waiting)


def _below(url: str, below: str) -> Iterator[Listed]:
    for files, folders in _pages(url, below, delimiter=""):
        yield from merge(files, chain.from_iterable(_below(url, folder) for folder in folders), key=_place)


def _place(listed: Listed) -> bytes:
    return listed[0].encode()


def _pages(url: str, below: str, *, delimiter: str) -> Iterator[tuple[list[Listed], list[str]]]:
    """List files and folders below `url` in order; a bucket has no folders without `delimiter`, other stores always.

    Folders' names end with "/", so the order of all files is that of files and folders.
    """

    def attempt(remote: Any) -> tuple[list[Listed], list[str], str]:
        return page(remote, after=after, delimiter=delimiter) if is_bucket(remote) else _level(remote)

    after, is_done = "", False
    while not is_done:
        files, folders, after = SHARED.retried(join(url, below) if below else url, attempt)
        is_done = not after
        named = ((below + name, size, stamp) for name, size, stamp in files)
        yield sorted(named, key=_place), sorted((below + name for name in folders), key=str.encode)


def _level(remote: Any) -> tuple[list[Listed], list[str], str]:
    entries = [
        (each["name"].rstrip("/").rpartition("/")[2], each)
        for each in remote.call("ls", remote.path, detail=True)
        if each["name"].rstrip("/") != remote.path.rstrip("/")  # the folder itself
    ]
    folders = [f"{name}/" for name, entry in entries if entry["type"] == "directory"]
    files = [(name, entry["size"], fingerprint_of(entry)) for name, entry in entries if entry["type"] != "directory"]
    return files, folders, ""


def _local_stamp(status: os.stat_result) -> str:
    return fingerprint_of({"mtime": status.st_mtime})  # as fsspec has it


def _changed(location: str) -> OSError:
    return OSError(errno.ESTALE, "it has changed since it was listed", redacted(location))
