"""OUT/images.bin: a record of each source image, so that repeating a command notices replaced ones.

24 bytes an image, in source order: an 8-byte hash of name, size and modification time (in an archive: the archive's),
and the 16-byte digest of its bytes, zeros if unread. `Source.fingerprint` compares names and sizes; this file compares
times, and the bytes of images whose time changed, or of all.
"""

from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_writer import DIGEST_BYTES, read_digests
from shardvit.data_shards.packing.sources.base import Int64s, Source
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.text import counted

SEEN_FILE = "images.bin"
_SEEN = np.dtype([("stamp", "V8"), ("digest", f"V{DIGEST_BYTES}")])
_PIECE = 1000  # images a thread reads per task
_ROWS = 1 << 20  # written at a time


def write_seen(path: Path, source: Source, numbers: Int64s, digests: bytes) -> None:
    """Write the file; `digests` are those of the images `numbers`, if known yet."""
    with path.open("wb") as file:
        for start in range(0, source.num_images, _ROWS):
            _seen_now(source, start, start + _ROWS).tofile(file)
    if digests:
        path.write_bytes(add_digests(path.read_bytes(), numbers, digests))


def add_digests(seen: bytes, numbers: Int64s, digests: bytes) -> bytes:
    """Fill in digests, in the order of `numbers`."""
    rows = np.frombuffer(seen, _SEEN).copy()
    rows["digest"][numbers] = np.frombuffer(digests, _SEEN["digest"])
    return rows.tobytes()


def read_digests_of(seen: bytes, numbers: Int64s) -> bytes:
    """Return the digests of images in the order of `numbers`."""
    return np.frombuffer(seen, _SEEN)["digest"][numbers].tobytes()


def known_digests(folder: Folder) -> NDArray[np.uint64]:
    """Read the digests of a packing's images, [images, 2], zeros if unread; UserError without its file."""
    try:
        seen = np.frombuffer(folder.read(SEEN_FILE), _SEEN)
    except (FileNotFoundError, ValueError):
        shown = redacted(join(folder.location, SEEN_FILE))
        raise UserError(f"{shown} is missing or broken, so nothing can be appended; pack into another folder") from None
    return np.frombuffer(seen["digest"].tobytes(), np.uint64).reshape(-1, 2)


def compare_seen(out: str, source: Source, request: PackRequest, *, report: Report) -> str:
    """Compare the source with the packed images; return what was compared. UserError if images differ."""
    now, file, shown = _seen_now(source), join(redacted(out), SEEN_FILE), redacted(out)
    before = now[:0]
    with suppress(FileNotFoundError):
        data = open_folder(out).read(SEEN_FILE)
        before = np.frombuffer(data, _SEEN) if len(data) % _SEEN.itemsize == 0 else before
    if len(before) != len(now):
        if request.reread == "all":
            raise UserError(f"{file} is missing or broken, so nothing can be verified: delete {shown} and pack again")
        return f"names and sizes of {counted(len(now), 'image')}, not times: {SEEN_FILE} is missing or broken"
    differs = before["stamp"] != now["stamp"]
    is_read = (differs | (request.reread == "all")) & (before["digest"] != now["digest"])  # zeros: unread
    with Progress(int(is_read.sum()), report, status="comparing") as progress:
        first = 0
        for images in source.splits.values():
            rows = np.flatnonzero(is_read[first : first + len(images)])
            pieces = [images.take(rows[at : at + _PIECE]) for at in range(0, len(rows), _PIECE)]
            digests = read_digests(pieces, num_threads=num_cores(), progress=progress)
            changed = rows[before["digest"][first + rows] != np.frombuffer(digests, _SEEN["digest"])].tolist()
            if changed:
                which = f"{counted(len(changed), 'image')} of the same size"
                raise UserError(
                    f"{shown}: it was packed from {source.spec}, where {which} changed since "
                    f"(the first: {images.trace(changed[0])}); choose another folder or delete it"
                )
            first += len(images)
    times = f" ({differs.sum():,} with other times)" if differs.any() else ""
    read = f"{is_read.sum():,}" if is_read.any() else "none (--verify reads all)"
    return f"names, sizes and times of {counted(len(now), 'image')}{times}; bytes of {read}"


def _seen_now(source: Source, start: int = 0, end: int | None = None) -> NDArray[np.void]:
    """Make the rows from `start` to `end`, without digests."""
    pieces, first = [np.zeros(0, np.uint64)], 0
    end = source.num_images if end is None else end
    for images in source.splits.values():
        rows = images.rows[max(start - first, 0) : max(end - first, 0)]
        pieces.append(images.files.stamps[rows])
        first += len(images)
    seen = np.zeros(sum(map(len, pieces)), _SEEN)
    seen["stamp"] = np.concatenate(pieces).view("V8")
    return seen
