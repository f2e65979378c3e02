"""Collections to compare, and the fingerprints of their images, cached on disk.

A row has 1,064 bytes: 16 of the SHA-256 of the encoded image, two words, their kind, and a grey thumbnail, from which
all windows are hashed. The words are the perceptual hash of the whole image (see `perceptual_hash`), or 16 bytes of its
pixels' SHA-256: images with hardly any contrast (the hash of a plain colour is noise) or below 16 pixels a side match
by equal pixels alone.

`shardvit/fingerprints` in the user's cache has a file per part, named by its digest, so a second check decodes nothing;
it can be deleted at any time. 10^6 images take 1.1 GB, a photograph 1.2 ms on one core, mostly in libjpeg-turbo, a 32 x
32 image 0.05. Parts are hashed by an engine's workers, which must all see that folder. Memory: one part per worker.
"""

import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
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
from shardvit.data_shards.engines.engine import PartsEngine, local_engine
from shardvit.data_shards.engines.threads import ThreadEngine, give_up_if_stopped
from shardvit.data_shards.errors import CorruptSample, SampleError, UnreadableImage, UserError
from shardvit.data_shards.images.decode import PixelLimit, read_image, read_reduced
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import Damaged, ShardSet
from shardvit.data_shards.store.store import Store

_FEW = 1 << 17  # images whose kept files are looked at without starting workers: 0.2 s
_VERSION = 3  # raised when the format changes
_LEAST_PIXELS = 2 * THUMBNAIL_PIXELS  # per side, kept by reduced decoding
LEAST_SIDE = 16  # pixels; a smaller image has no hash
LEAST_CONTRAST = 3.0  # standard deviation of the thumbnail's greys, 0 to 255

ROW = np.dtype(
    [
        ("bytes_digest", np.uint64, 2),
        ("words", np.uint64, NUM_WORDS),
        ("kind", np.uint64),
        ("thumbnail", np.uint8, (THUMBNAIL_PIXELS, THUMBNAIL_PIXELS)),
    ]
)
Fingerprints = NDArray[Any]  # of ROW: a part's images


class Kind(IntEnum):
    """Meaning of a row's words."""

    HASH = 0
    PIXELS = 1  # a digest of the pixels
    NOTHING = 2  # undecodable: only its bytes are known
    UNREAD = 3  # not even those


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

    def files(self, part: int) -> tuple[Path, ...]:
        """Files that may have a part, in order; one with images that cannot be read now is the last."""
        digest = self.collection.part_digest(part)
        key = repr((_VERSION, digest, self.pixel_limit.pixels))
        kept = [self.kept / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.npy"] if digest else []
        return (*kept, self.scratch / f"{self.collection.digest}-{part}.npy")


@dataclass(frozen=True)
class KeptFingerprints:
    """Fingerprints on disk, as workers get them; `files` of each part: the first good one counts."""

    name: str
    digest: str
    sizes: tuple[int, ...]
    files: tuple[tuple[Path, ...], ...]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Number of each part's first image, and of all images."""
        return np.cumsum([0, *self.sizes])

    def load(self, part: int) -> Fingerprints:
        """Load a part; if its process crashed, all rows are `UNREAD`."""
        found = _read(self.files[part], self.sizes[part])
        return _nothing(self.sizes[part]) if found is None else found

    def thumbnails(self, images: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read those of `images`, numbered across parts, uint8 [images, 32, 32]; opens each file once."""
        found = np.empty((len(images), THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), np.uint8)
        parts = np.searchsorted(self.starts, images, side="right") - 1
        for part in np.unique(parts):
            rows = np.flatnonzero(parts == part)
            kept = _read(self.files[part], self.sizes[part], mmap_mode="r")
            assert kept is not None
            found[rows] = kept["thumbnail"][images[rows] - self.starts[part]]
        return found


def default_fingerprint_folder() -> Path:
    """Locate the folder in the user's cache (freedesktop.org's base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardvit" / "fingerprints"


def kept_places(compared: Sequence[str] | None) -> list[str]:
    """List what comparing with these sets needs on all nodes: them, and the folder of fingerprints, which is made."""
    if not compared:
        return []
    default_fingerprint_folder().mkdir(parents=True, exist_ok=True)
    return [*compared, str(default_fingerprint_folder())]


def make_fingerprints(
    request: FingerprintRequest, *, engine: PartsEngine, done: Callable[[int], None]
) -> tuple[KeptFingerprints, int]:
    """Write the files of parts that lack a good one; also count undecodable images. UserError if a part is unreadable.

    Workers elsewhere must see the folder.
    """
    collection = request.collection
    parts = range(len(collection.sizes))
    files = tuple(request.files(part) for part in parts)
    if sum(collection.sizes) <= _FEW and all(any(map(Path.is_file, each)) for each in files):
        engine = local_engine(1)
    elif collection.read_by == "threads":
        engine = ThreadEngine(min(engine.workers, num_cores()))
    # Silence Pillow on large photographs and odd metadata. The filter is process-wide, so it is set around threads.
    with warnings.catch_warnings(action="ignore"):
        made = engine.run(_make_part, request, parts, done=lambda part: done(part[0]))
    undecoded = sum(bad for _, bad in made.values())
    for part in parts:
        if part not in made:
            undecoded += collection.sizes[part]  # its worker crashed
        elif not any(map(Path.is_file, files[part])):
            raise UserError(f"{request.kept}: workers do not write into this machine's folder: name a shared one")
    return KeptFingerprints(collection.name, collection.digest, tuple(collection.sizes), files), undecoded


def _make_part(request: FingerprintRequest, part: int) -> tuple[int, int]:
    """Return the part's number of images, and of undecodable ones."""
    size = request.collection.sizes[part]
    found = _read(request.files(part), size)
    if found is None:
        found = _made(request, part)
    return size, int((found["kind"] >= Kind.NOTHING).sum())


def _made(request: FingerprintRequest, part: int) -> Fingerprints:
    size = request.collection.sizes[part]
    files = request.files(part)
    path, passing = files[0], files[-1]
    found = _nothing(size)
    with warnings.catch_warnings(action="ignore"):
        for row in range(size):
            give_up_if_stopped()
            try:
                data = request.collection.read(part, row)
            except UnreadableImage as error:
                if isinstance(error, UnreadNow):
                    path = passing
                if isinstance(error, UnreadablePart):
                    break
                continue
            _fill(found[row], data, limit=request.pixel_limit)
    hashed = np.flatnonzero(found["kind"] == Kind.HASH)
    found["words"][hashed] = hash_windows(found["thumbnail"][hashed], WHOLE[:1])[:, 0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, writers="several") as beside, open(beside, "wb") as stream:
        np.save(stream, found)
    return found


def _fill(row: Any, data: bytes, *, limit: PixelLimit) -> None:
    row["bytes_digest"] = np.frombuffer(hashlib.sha256(data).digest()[:16], np.uint64)
    row["kind"] = Kind.NOTHING
    try:
        height, width, greys = read_reduced(data, least_pixels=_LEAST_PIXELS, colours="GRAY", limit=limit)
        row["thumbnail"] = thumbnail(greys)
        if min(height, width) >= LEAST_SIDE and row["thumbnail"].std() >= LEAST_CONTRAST:
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
    return rows


def _read(files: Sequence[Path], size: int, *, mmap_mode: Literal["r"] | None = None) -> Fingerprints | None:
    """None if the file is missing or incomplete."""
    for path in files:
        try:
            found = np.load(path, allow_pickle=False, mmap_mode=mmap_mode)
        except (OSError, ValueError, EOFError):
            continue
        if found.dtype == ROW and found.shape == (size,):
            return found
    return None
