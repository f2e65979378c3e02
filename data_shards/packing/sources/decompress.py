"""Decompress a .tar.gz once, into a file that is kept until the shards are complete: gzip cannot seek.

Costs the tar's size on disk and 4 s a GB. Processes that want the same file wait for the one that makes it.
"""

import fcntl
import gzip
import os
import shutil
import threading
import time
import zlib
from pathlib import Path

from shardvit.data_shards.durable import replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.progress_line import LINE_SECONDS
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.text import show_bytes

_COPY_BYTES = 1 << 20
_SAID_BYTES = 50_000_000  # smaller archives are decompressed silently
_DECOMPRESSING = threading.Lock()


def decompressed(archive: Path, plain: Path, *, report: Report) -> None:
    """Make `plain` unless it is there; UserError if the archive is damaged, or there is no room."""
    if plain.exists():
        return
    folder = plain.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, num_bytes = shutil.disk_usage(folder).free, archive.stat().st_size
        if free < num_bytes:
            raise UserError(
                f"{archive}: decompressing it takes more than {show_bytes(num_bytes)} in {folder}, and "
                f"{show_bytes(free)} are free; make room or choose an OUT on another disk"
            )
        if num_bytes >= _SAID_BYTES:
            report(
                f"{archive}: a gzipped tar can only be read from its start, so it is decompressed once into "
                f"{folder} (more than {show_bytes(num_bytes)}, removed when the shards are complete)"
            )
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:  # one thread and process at a time, which overwrites what a dead one left
            with _DECOMPRESSING:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if not plain.exists():  # another may have made it meanwhile
                    with replaced(plain) as beside:
                        _decompress(archive, beside, report)
        finally:
            os.close(handle)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{archive}: it cannot be decompressed ({error}); fetch it again") from None
    except OSError as error:
        raise UserError(
            f"{archive}: it cannot be decompressed into {folder} ({error.strerror}); make room or choose an OUT "
            "on another disk"
        ) from None


def _decompress(archive: Path, target: Path, report: Report) -> None:
    last_line = time.monotonic()
    with open(archive, "rb") as raw, gzip.GzipFile(fileobj=raw) as stream, open(target, "wb") as plain:
        num_bytes = max(os.fstat(raw.fileno()).st_size, 1)
        while data := stream.read(_COPY_BYTES):
            plain.write(data)
            if time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                report(f"decompressing {archive.name}: {raw.tell() / num_bytes:.0%}")
