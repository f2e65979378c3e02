"""Collections to compare: images in parts (the tars of a set, planned shards), read by their numbers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from data_shards.errors import CorruptSample, SampleError, UnreadableImage
from data_shards.reading.shard_reader import ShardReader
from data_shards.shards.shard_set import Damaged, ShardSet
from data_shards.store.store import Store


class UnreadNow(UnreadableImage):
    """An image that cannot be read now; a retry may help, so nothing is kept of its part."""


class UnreadablePart(UnreadNow):
    """A whole part that cannot be read, where that is tolerated."""


class ImagePlace(NamedTuple):
    """An image: the name of its part as messages show it, and its key in it."""

    part: str
    key: str


class Collection(Protocol):
    """Images in parts of `sizes`; `name` is for messages. A collection that is read by processes is pickled.

    `digest` changes with the images and with where they are: collections with the same one are the same.
    `part_digest` changes with a part's images, "" where that is not known. `read` returns an image as stored, or
    raises UnreadableImage; for a part that is missing UnreadablePart or UserError.
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
    """The images of an open set of shards; whether shards that cannot be read are refused (UserError), or tolerated."""

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
        if entry.sha256:  # with the stamp: the digest is the manifest's, and the file may be damaged, and then mended
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
