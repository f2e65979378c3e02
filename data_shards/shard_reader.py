"""A sample by its number: one read at a known offset of a tar shard, no streaming through it.

The offsets come from the shard's index (see `tar_index`), read when the shard is first touched; a shard that is no
local file comes from the store. A read of an image costs about 20 microseconds from a warm cache, in any order. A
limited number of shards is kept open, the least recently used is closed first, so descriptors and memory do not grow
with the data set. What the store's cache has evicted is closed within
seconds, or the disk would not get its bytes back.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import dataclass

from data_shards.errors import CorruptSample, SampleError, UserError
from data_shards.labels import parse_label
from data_shards.shard_set import ShardEntry, ShardSet
from data_shards.store.cache_folder import TOUCH_SECONDS, is_evicted, touch
from data_shards.store.location import is_local, local_path
from data_shards.store.store import Store
from data_shards.tars.shard_index import ShardIndex
from data_shards.tars.tar_index import index_path, open_index, read_index, readable_index


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in its shard; `labels` are class numbers, exactly one unless the set is multi-label."""

    key: str
    image: bytes
    labels: tuple[int, ...]


class ShardReader:
    """Random access to the samples of a data set.

    Args:
        shards: the data set.
        store: for shards that are no local files.
        max_open_shards: shards kept open at the same time.
    """

    def __init__(self, shards: ShardSet, *, store: Store | None = None, max_open_shards: int = 128) -> None:
        self._open: OrderedDict[int, tuple[int, ShardIndex]] = OrderedDict()
        self.shards = shards
        self._store = store
        self._max_open_shards = max_open_shards
        self._label_map = shards.label_map
        self._touched_at: dict[int, float] = {}  # of open shards in the store's cache, by number

    def read(self, shard: int, *, row: int) -> RawSample:
        """The sample in row `row` of shard `shard`.

        Raises:
            CorruptSample: this sample is damaged; the others may be whole.
            SampleError: the shard is not there, or not what its index or manifest says; names the file.
        """
        descriptor, index = self._open_shard(shard)
        entry = self.shards.shards[shard]
        key = self._key(index, row)
        if row >= len(index):
            raise CorruptSample(entry.name, key=key, reason="it is not in the shard, which is damaged or missing")
        image = _pread(descriptor, index.image_offset[row], index.image_size[row], entry=entry, key=key)
        label = _pread(descriptor, index.label_offset[row], index.label_size[row], entry=entry, key=key)
        try:
            labels = parse_label(
                label, spec=entry.labels, label_map=self._label_map, num_classes=self.shards.num_classes
            )
        except ValueError as error:
            raise CorruptSample(entry.name, key=key, reason=str(error)) from None
        return RawSample(key, image, labels)

    def describe(self, shard: int, *, row: int) -> str:
        """The sample's shard and key, for messages."""
        return f"{self._key(self._open_shard(shard)[1], row)!r} of {self.shards.shards[shard].name}"

    def _key(self, index: ShardIndex, row: int) -> str:
        return index.keys[row] if row < len(index) else f"row {row}"

    def _open_shard(self, shard: int) -> tuple[int, ShardIndex]:
        if shard not in self._open:
            self._close_evicted()
            opened = self._open_entry(self.shards.shards[shard])
            if len(self._open) == self._max_open_shards:
                self._close(next(iter(self._open)))
            self._open[shard] = opened
            if not is_local(self.shards.shards[shard].url):
                self._touched_at[shard] = time.monotonic()
            return opened
        self._open.move_to_end(shard)
        if shard in self._touched_at and time.monotonic() - self._touched_at[shard] > TOUCH_SECONDS:
            self._touched_at[shard] = time.monotonic()
            touch(self._open[shard][0])
            self._close_evicted(but=shard)
        return self._open[shard]

    def _open_entry(self, entry: ShardEntry) -> tuple[int, ShardIndex]:
        try:
            if not is_local(entry.url):
                assert self._store is not None, f"{entry.name} is no local file, and there is no store"
                opened = self._store.open(entry)
                descriptor, index = opened.descriptor, opened.index
            elif entry.state == "damaged":
                return _open_damaged(entry)
            else:
                path = local_path(entry.url)
                index = open_index(path, label=entry.labels.part, index=entry.index, name=entry.name)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except SampleError:
            raise
        except UserError as error:  # this process alone may have come upon it
            raise SampleError(str(error)) from error
        except OSError as error:
            raise SampleError(f"{entry.name}: cannot be opened ({error.strerror})") from error
        if len(index) != entry.num_samples:
            os.close(descriptor)
            raise SampleError(
                f"{entry.name}: its index lists {len(index)} samples, manifest.json {entry.num_samples}: "
                "pack the shards again"
            )
        return descriptor, index

    def _close_evicted(self, *, but: int | None = None) -> None:
        for shard in [shard for shard in self._touched_at if shard != but and is_evicted(self._open[shard][0])]:
            self._close(shard)

    def _close(self, shard: int) -> None:
        self._touched_at.pop(shard, None)
        os.close(self._open.pop(shard)[0])

    def close(self) -> None:
        """Close every shard that is open; the reader can be used again."""
        while self._open:
            self._close(next(iter(self._open)))

    def __getstate__(self) -> dict[str, object]:
        """Workers get the reader without descriptors: those belong to the process that opened them."""
        return {**vars(self), "_open": OrderedDict(), "_touched_at": {}}

    def __del__(self) -> None:
        self.close()


def _open_damaged(entry: ShardEntry) -> tuple[int, ShardIndex]:
    """What can be read of a shard that was damaged when the set was opened: its index may say more than there is."""
    path = local_path(entry.url)
    try:
        index = read_index(index_path(path), label=entry.labels.part)
        if len(index) != entry.num_samples:
            raise UserError(f"{index_path(path)}: the index of another tar")
    except UserError:
        index = None
    if not path.is_file():
        path = local_path(os.devnull)
    if index is None:
        index = readable_index(path, label=entry.labels.part, name=entry.name).index
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), index


def _pread(descriptor: int, offset: int, size: int, *, entry: ShardEntry, key: str) -> bytes:
    try:
        data = os.pread(descriptor, int(size), int(offset))
    except OSError as error:
        raise SampleError(f"{entry.name}: cannot be read ({error.strerror})") from error
    if len(data) != size:
        raise CorruptSample(entry.name, key=key, reason=f"it is cut short: {len(data)} of {int(size)} bytes are there")
    return data
