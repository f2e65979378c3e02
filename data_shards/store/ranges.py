"""Read byte ranges of files anywhere, and list folders anywhere: what workers need that pack from a bucket.

A range costs a request (in stores without S3's protocol two), at most 32 at a time in a process, retried as downloads
are. Listing a bucket takes a request for each 1,000 names, several at a time where there are folders; memory is that
of a folder's names. Web servers have no listing.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import is_local, join, local_path, protocol, redacted
from shardvit.data_shards.store.bucket import Listed, is_bucket, page, read_stamped
from shardvit.data_shards.store.download import Downloads, MissingObject, RetryPolicy
from shardvit.data_shards.store.remote import REQUESTS_IN_FLIGHT, fingerprint_of
from shardvit.data_shards.store.remote_errors import Missing, Refused, Transient

SHARED = Downloads(RetryPolicy())  # a process has one file system, and its connections, for each store
_IN_FLIGHT = threading.BoundedSemaphore(REQUESTS_IN_FLIGHT)
_LISTERS = 8
_MOST_LOOSE = 10_000  # files beside folders; with more, listing by folder does not pay
_LEVELS = 3


def read_range(location: str, offset: int, size: int, *, stamp: str = "") -> bytes:
    """Read `size` bytes of a path or URL; see `read_stamped_range`. OSError if it has another stamp (unless "")."""
    data, found = read_stamped_range(location, offset, size)
    if stamp and found != stamp:
        raise _changed(location)
    return data


def read_whole(location: str, *, stamp: str = "") -> bytes:
    """Read a small file whole; errors as in `read_range`."""
    size, found = stat_url(location)
    if size is None:
        raise UserError(f"{redacted(location)}: the server does not tell its size: copy it to a folder first")
    return read_range(location, 0, size, stamp=stamp or found)


def read_stamped_range(location: str, offset: int, size: int) -> tuple[bytes, str]:
    """Read `size` bytes and the file's stamp, as `stat_url` and `list_url` tell it.

    OSError if it is not there, or shorter; StoreError if the store fails for ten minutes or refuses.
    """
    if is_local(location):
        with open(local_path(location), "rb", buffering=0) as file:
            data, stamp = os.pread(file.fileno(), size, offset), _local_stamp(os.fstat(file.fileno()))
            while len(data) < size and (more := os.pread(file.fileno(), size - len(data), offset + len(data))):
                data += more
        if len(data) < size:
            raise _changed(location)
        return data, stamp
    if size == 0:  # HTTP has no empty ranges
        return b"", stat_url(location)[1]

    def attempt(remote: Any) -> tuple[bytes, str]:
        with _IN_FLIGHT:
            data, stamp = (
                read_stamped(remote, offset, offset + size)
                if is_bucket(remote)
                else remote.stamped(offset, offset + size)
            )
        if len(data) != size:
            about = remote.about()
            is_short = about.num_bytes is not None and about.num_bytes < offset + size
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
        with _IN_FLIGHT:
            return SHARED.about(location)
    except MissingObject as error:
        raise FileNotFoundError(errno.ENOENT, str(error), redacted(location)) from None


def list_url(location: str) -> Iterator[Listed]:
    """List all files below a folder: name relative to it, bytes, stamp; in the order of the names' UTF-8 bytes."""
    if protocol(location) in ("http", "https"):
        raise UserError(f"{redacted(location)}: a web server lists no folder: name the tars, .../{{00000..00099}}.tar")
    waiting = deque[Listed | Future[list[Listed]]]()
    with ThreadPoolExecutor(_LISTERS) as pool:
        try:
            for each in _spread(location, "", levels=_LEVELS):
                if each == "":
                    yield from _below(location, "")
                else:
                    waiting.append(
                        pool.submit(lambda name: list(_below(location, name)), each) if isinstance(each, str) else each
                    )
                while len(waiting) > 2 * _LISTERS:
                    yield from _taken(waiting.popleft())
            while waiting:
                yield from _taken(waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _taken(entry: Listed | Future[list[Listed]]) -> list[Listed]:
    return entry.result() if isinstance(entry, Future) else [entry]


def _spread(url: str, below: str, *, levels: int) -> Iterator[Listed | str]:
    """Yield, in order, the files of a folder and the folders ("" for itself) that are to be listed whole."""
    files, folders = list[Listed](), list[str]()
    for found_files, found_folders in _pages(url, below, delimiter="/"):
        files += found_files
        folders += found_folders
        if len(files) > _MOST_LOOSE:
            yield below
            return
    for each in sorted([*files, *folders], key=_in_order):
        if isinstance(each, str) and levels and len(folders) < _LISTERS:
            yield from _spread(url, each, levels=levels - 1)
        else:
            yield each


def _in_order(entry: Listed | str) -> bytes:
    return (entry if isinstance(entry, str) else entry[0]).encode(errors="surrogateescape")


def _below(url: str, below: str) -> Iterator[Listed]:
    for files, folders in _pages(url, below, delimiter=""):
        for each in sorted([*files, *folders], key=_in_order):
            if isinstance(each, str):
                yield from _below(url, each)
            else:
                yield each


def _pages(url: str, below: str, *, delimiter: str) -> Iterator[tuple[list[Listed], list[str]]]:
    """List files and folders by name below `url`; without delimiter a bucket has no folders."""
    if is_local(url):
        yield _local_level(url, below)
        return
    after = ""
    while True:
        files, folders, after = SHARED.retried(
            join(url, below) if below else url,
            lambda remote, after=after: (
                page(remote, after=after, delimiter=delimiter) if is_bucket(remote) else _level(remote)
            ),
        )
        yield [(below + name, size, stamp) for name, size, stamp in files], [below + name for name in folders]
        if not after:
            return


def _level(remote: Any) -> tuple[list[Listed], list[str], str]:
    if not hasattr(remote, "fs"):
        raise Refused("a program's output is no folder")
    files, folders = list[Listed](), list[str]()
    for entry in remote.call("ls", remote.path, detail=True):
        name = entry["name"].rstrip("/").rpartition("/")[2]
        if entry["name"].rstrip("/") == remote.path.rstrip("/"):
            continue  # the folder itself
        if entry["type"] == "directory":
            folders.append(name + "/")
        else:
            files.append((name, entry["size"], fingerprint_of(entry)))
    return files, folders, ""


def _local_level(url: str, below: str) -> tuple[list[Listed], list[str]]:
    files, folders = list[Listed](), list[str]()
    with os.scandir(os.path.join(local_path(url), below)) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(f"{below}{entry.name}/")
            else:
                status = entry.stat()
                files.append((below + entry.name, status.st_size, _local_stamp(status)))
    return files, folders


def _local_stamp(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _changed(location: str) -> OSError:
    return OSError(errno.ESTALE, "it has changed since it was listed", redacted(location))
