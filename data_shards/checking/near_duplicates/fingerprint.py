"""Collections to compare, and the fingerprints of their images, cached on disk.

A row has 40 bytes: 16 of the SHA-256 of the encoded image, two words, and their kind. The words are the perceptual hash
of the whole image (see `perceptual_hash`), or 16 bytes of its pixels' SHA-256: images with hardly any contrast (the
hash of a plain colour is noise) or below 16 pixels a side match by equal pixels alone. All windows are hashed from a
grey thumbnail of 1,024 bytes.

`shardvit/fingerprints` in the user's cache has a file per part, named by its digest, so a second check decodes nothing;
it can be deleted at any time. 10^6 images take 1.1 GB, a photograph 1.2 ms on one core, mostly in libjpeg-turbo, a 32 x
32 image 0.05. Memory: one part's rows per process.
"""

import hashlib
import os
import threading
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates.perceptual_hash import (
    NUM_WORDS,
    THUMBNAIL_PIXELS,
    WHOLE,
    hash_windows,
    thumbnail,
)
from shardvit.data_shards.durable import replaced
from shardvit.data_shards.errors import CorruptSample, SampleError, UnreadableImage
from shardvit.data_shards.images.decode import PixelLimit, read_image, read_reduced
from shardvit.data_shards.processes import run_parts, run_threads
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import Damaged, ShardSet
from shardvit.data_shards.store.store import Store

_VERSION = 2  # raised when the format changes
_LEAST_PIXELS = 2 * THUMBNAIL_PIXELS  # per side, kept by reduced decoding
LEAST_SIDE = 16  # pixels; a smaller image has no hash
LEAST_CONTRAST = 3.0  # standard deviation of the thumbnail's greys, 0 to 255

ROW = np.dtype([("bytes_digest", np.uint64, 2), ("words", np.uint64, NUM_WORDS), ("kind", np.uint64)])


class Kind(IntEnum):
    """Meaning of a row's words."""

    HASH = 0
    PIXELS = 1  # a digest of the pixels
    NOTHING = 2  # undecodable: only its bytes are known
    UNREAD = 3  # not even those


class Fingerprints(NamedTuple):
    """One part: `rows` of `ROW`, [images], and `thumbnails`, uint8 [images, 32, 32]."""

    rows: NDArray[Any]
    thumbnails: NDArray[np.uint8]


class UnreadNow(UnreadableImage):
    """An image that cannot be read now. A retry may help, so its part is not cached."""


class UnreadablePart(UnreadNow):
    """A whole part that cannot be read, where tolerated."""


class ImagePlace(NamedTuple):
    """Name of an image's part, as messages show it, and its key there."""

    part: str
    key: str


class Collection(Protocol):
    """Images in parts of `sizes`; `name` is for messages. Pickled if read by processes.

    `digest` identifies the images and their location, `part_digest` a part's images ("": unknown). `read` returns the
    encoded image; UnreadableImage if damaged, UnreadablePart or UserError if its part is missing.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def read_by(self) -> Literal["processes", "threads"]: ...
    def part_digest(self, part: int) -> str: ...
    def read(self, part: int, row: int) -> bytes: ...
    def place(self, part: int, row: int) -> ImagePlace: ...


class ShardImages:
    """The images of an open set; unreadable shards are refused (UserError) or tolerated."""

    read_by: Literal["processes", "threads"] = "processes"

    def __init__(self, shards: ShardSet, store: Store, *, damaged: Damaged = "refuse") -> None:
        self.shards, self._damaged = shards, damaged
        self.name, self.sizes = shards.source, shards.shard_sizes
        places = [shards.digest, *(entry.url for entry in shards.shards)]  # a copy elsewhere is not the set itself
        self.digest = hashlib.sha256("\0".join(places).encode("utf-8", "surrogateescape")).hexdigest()
        self._reader = ShardReader(shards, store=store)
        self._lock = threading.Lock()  # of the reader

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def part_digest(self, part: int) -> str:
        entry = self.shards.shards[part]
        if entry.state == "damaged":
            return ""
        if entry.sha256:  # with the stamp: the file may have been damaged, then mended, under the manifest's digest
            return hashlib.sha256(repr((entry.sha256, entry.stamp, entry.subset)).encode()).hexdigest()
        known = (entry.url, entry.index_digest, entry.pixels_digest, entry.stamp)
        return hashlib.sha256(repr((*known, entry.subset)).encode()).hexdigest() if all(known) else ""

    def read(self, part: int, row: int) -> bytes:
        try:
            with self._lock:
                return self._reader.read(part, row=row).image
        except CorruptSample as error:
            raise UnreadableImage(error.reason) from None
        except SampleError as error:
            if self._damaged == "refuse":
                raise
            raise UnreadablePart(str(error)) from None

    def place(self, part: int, row: int) -> ImagePlace:
        with self._lock:
            key = self._reader.key(part, row=row)
        return ImagePlace(self.shards.shards[part].name, key)


@dataclass(frozen=True)
class FingerprintRequest:
    """Options that all parts share."""

    collection: Collection
    kept: Path  # folder for parts with a digest
    scratch: Path  # for other parts
    pixel_limit: PixelLimit

    def kept_path(self, part: int) -> Path | None:
        digest = self.collection.part_digest(part)
        key = repr((_VERSION, digest, self.pixel_limit.pixels))
        return self.kept / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.npz" if digest else None

    def scratch_path(self, part: int) -> Path:
        return self.scratch / f"{self.collection.digest}-{part}.npz"

    def load(self, part: int) -> Fingerprints:
        """Load a part; if its process crashed, all rows are `UNREAD`."""
        return _read(self, part) or _nothing(self.collection.sizes[part])


def default_fingerprint_folder() -> Path:
    """Locate the folder in the user's cache (freedesktop.org's base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardvit" / "fingerprints"


def make_fingerprints(request: FingerprintRequest, *, processes: int, done: Callable[[int], None]) -> None:
    """Write the files of parts that lack one; UserError if a part cannot be read."""
    missing: list[int] = []
    for part, size in enumerate(request.collection.sizes):
        if _read(request, part) is None:
            missing.append(part)
        else:
            done(size)
    if request.collection.read_by == "processes":
        run_parts(_make_part, request, missing, processes=processes, done=done)
        return
    stop = threading.Event()
    # Silence Pillow on large photographs and odd metadata. The filter is process-wide, so it is set around all threads.
    with warnings.catch_warnings(action="ignore"):
        for size in run_threads(_make_part, [(request, part, stop) for part in missing], threads=processes, stop=stop):
            done(size)


def _make_part(request: FingerprintRequest, part: int, stop: threading.Event | None = None) -> int:
    size = request.collection.sizes[part]
    path = request.kept_path(part)
    found = _nothing(size)
    with warnings.catch_warnings(action="ignore"):
        for row in range(size):
            if stop is not None and stop.is_set():
                return 0
            try:
                data = request.collection.read(part, row)
            except UnreadablePart:
                path = None
                break
            except UnreadNow:
                path = None
                continue
            except UnreadableImage:
                continue
            _fill(found.rows[row], found.thumbnails[row], data, limit=request.pixel_limit)
    hashed = np.flatnonzero(found.rows["kind"] == Kind.HASH)
    found.rows["words"][hashed] = hash_windows(found.thumbnails[hashed], WHOLE[:1])[:, 0]
    path = path or request.scratch_path(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, sync="none", writers="several") as beside, open(beside, "wb") as stream:
        np.savez(stream, allow_pickle=False, **found._asdict())
    return size


def _fill(row: Any, small: NDArray[np.uint8], data: bytes, *, limit: PixelLimit) -> None:
    row["bytes_digest"] = np.frombuffer(hashlib.sha256(data).digest()[:16], np.uint64)
    row["kind"] = Kind.NOTHING
    try:
        height, width, greys = read_reduced(data, least_pixels=_LEAST_PIXELS, colours="GRAY", limit=limit)
        small[:] = thumbnail(greys)
        if min(height, width) >= LEAST_SIDE and small.std() >= LEAST_CONTRAST:
            row["kind"] = Kind.HASH
            return
        pixels = read_image(data, limit=limit).pixels()
    except UnreadableImage:
        return
    digest = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
    row["words"], row["kind"] = np.frombuffer(digest[:16], np.uint64), Kind.PIXELS


def _nothing(size: int) -> Fingerprints:
    rows = np.zeros(size, ROW)
    rows["kind"] = Kind.UNREAD
    return Fingerprints(rows, np.zeros((size, THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), np.uint8))


def _read(request: FingerprintRequest, part: int) -> Fingerprints | None:
    """None if the file is missing or incomplete."""
    for path in (request.kept_path(part), request.scratch_path(part)):
        if path is None or not path.is_file():
            continue
        try:
            # opened here: numpy does not close an incomplete file
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as content:
                found = Fingerprints(content["rows"], content["thumbnails"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue
        empty = _nothing(request.collection.sizes[part])
        if all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(found, empty, strict=True)):
            return found
    return None
