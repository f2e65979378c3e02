"""Decompress a .tar.gz once, into a file that is kept until the shards are complete: gzip cannot seek.

Costs the tar's size on disk and 4 s a GB. Processes that want the same file wait for the one that makes it.
"""

import gzip
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, cast

from shardvit.data_shards.durable import locked, replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.progress_line import LINE_SECONDS
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.shards.tar_walk import Pread
from shardvit.data_shards.store.ranges import open_file, read_range, stat_url
from shardvit.data_shards.text import show_bytes

_COPY_BYTES = 1 << 20
_SAID_BYTES = 50_000_000  # smaller archives are decompressed silently
_AHEAD_BYTES = 1 << 22
_HEADER_BYTES = 1 << 16  # read after a skip of more than `_AHEAD_BYTES`


def decompressed(archive: str, plain: Path, *, report: Report) -> None:
    """Make `plain` of a path or URL, unless it is there; UserError if that is damaged, or there is no room."""
    if plain.exists():
        return
    folder, shown = plain.parent, redacted(archive)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, num_bytes = shutil.disk_usage(folder).free, stat_url(archive)[0] or 0
        if free < num_bytes:
            raise UserError(
                f"{shown}: decompressing it takes more than {show_bytes(num_bytes)} in {folder}, and "
                f"{show_bytes(free)} are free; make room or choose an OUT on another disk"
            )
        if num_bytes >= _SAID_BYTES:
            report(
                f"{shown}: a gzipped tar can only be read from its start, so it is decompressed once into "
                f"{folder} (more than {show_bytes(num_bytes)}, removed when the shards are complete)"
            )
        # One thread and process at a time, which overwrites what a dead one left.
        with locked(lock := plain.with_suffix(".lock")):
            try:
                if not plain.exists():  # another may have made it meanwhile
                    _decompress(archive, plain, report)
            finally:
                lock.unlink(missing_ok=True)  # who waits for it has it open
    except OSError as error:
        raise UserError(
            f"{shown}: it cannot be decompressed into {folder} ({error.strerror}); make room or choose an OUT "
            "on another disk"
        ) from None


def _decompress(archive: str, target: Path, report: Report) -> None:
    last_line = time.monotonic()
    with replaced(target) as beside, open(beside, "wb") as plain, gunzipped(archive) as stream:
        while data := stream.read(_COPY_BYTES):
            plain.write(data)
            if time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                report(f"decompressing {redacted(archive)}: {show_bytes(plain.tell())} so far")


@contextmanager
def gunzipped(location: str) -> Iterator[IO[bytes]]:
    """Decompress a path or URL while reading; UserError if that fails."""
    try:
        with open_file(location, ahead_bytes=_AHEAD_BYTES) as packed, gzip.GzipFile(fileobj=packed) as stream:
            yield cast(IO[bytes], stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{redacted(location)}: it cannot be decompressed ({error}); fetch it again") from None


@contextmanager
def open_bytes(location: str, num_bytes: int, *, stamp: str = "") -> Iterator[Pread]:
    """Open a file here or in a store for reading by offset, in ascending order."""
    if is_local(location):
        with open(local_path(location), "rb", buffering=0) as file:
            yield partial(os.pread, file.fileno())
    else:
        yield _Ahead(location, num_bytes, stamp)


class _Ahead:
    """Read a remote file in order by large ranges, or by small ones after a skip beyond them."""

    def __init__(self, location: str, num_bytes: int, stamp: str) -> None:
        self._location, self._num_bytes, self._stamp = location, num_bytes, stamp
        self._chunk, self._start = b"", 0

    def __call__(self, size: int, offset: int) -> bytes:
        size, end = min(size, max(self._num_bytes - offset, 0)), self._start + len(self._chunk)
        if size and not self._start <= offset <= offset + size <= end:
            ahead = _AHEAD_BYTES if offset - end < _AHEAD_BYTES else _HEADER_BYTES
            most = min(max(size, ahead), self._num_bytes - offset)
            self._chunk, self._start = read_range(self._location, offset, most, stamp=self._stamp), offset
        return self._chunk[offset - self._start : offset - self._start + size]
