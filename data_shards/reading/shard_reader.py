"""Read a sample by number: one `pread` at a known offset of a tar if it is small, else three.

A shard's index (see `tar_index`) is read when the shard is first touched, and checked against the tar's headers at
every read: 4 to 5 µs from a warm cache, 18 µs a photograph, most of that the kernel's copy. The least recently used
shards are closed first. A shard that the cache evicts stays open while in use, and is closed seconds after its last
read.
"""

import os
import time
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import CorruptSample, SampleError, UserError
from shardvit.data_shards.shards.holdout import index_of
from shardvit.data_shards.shards.labels import LabelSpec, parse_label
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.shard_index import ShardIndex
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet
from shardvit.data_shards.shards.tar_index import ReadableIndex, index_path, read_index, readable_index, readable_open
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES, stated_member
from shardvit.data_shards.store.cache import TOUCH_SECONDS, is_evicted, touch
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.store import Store

# Members up to this size are read with their headers; of larger ones a second copy takes longer than a second call.
_READ_AT_ONCE_BYTES = 16_384
_MOST_KNOWN = 65_536  # parsed labels kept
_NAME_BYTES = 100  # of a tar's header
_PREFIX_AT = 345  # where the rest of a long name would start
UNKNOWN = -1  # the class of a damaged sample


class RawSample(NamedTuple):  # 0.5 µs faster to make than a frozen dataclass
    """One sample as stored; `labels` are class numbers, exactly one unless the set is multi-label."""

    key: str
    image: bytes
    labels: tuple[int, ...]


class _Opened:
    """An open shard, with its index as memoryviews: they yield Python integers in a fifth of numpy's time."""

    def __init__(self, entry: ShardEntry, descriptor: int, index: ShardIndex) -> None:
        self.entry, self.descriptor = entry, descriptor
        self._index, self.num_samples = index, len(index)
        self._walked: ReadableIndex | None = None
        self._keys, self._key_ends = index.keys.blob.tobytes(), index.keys.ends.data
        self._extensions, self._extension_ends = index.image_extension.blob.tobytes(), index.image_extension.ends.data
        self._label_end = b".%s\0" % entry.labels.part.encode()
        self.image_offset, self.image_size = index.image_offset.data, index.image_size.data
        self.label_offset, self.label_size = index.label_offset.data, index.label_size.data
        self.has_classes = entry.labels == LabelSpec()  # one an image, few distinct values
        self.is_cached = not is_local(entry.url)
        self.read_at = 0.0  # for shards in the cache

    def key(self, row: int) -> str:
        return self._key(row).decode("utf-8", "surrogateescape") if row < self.num_samples else f"row {row}"

    def image(self, row: int, *, most_bytes: int | None = None) -> bytes:
        """Read the image, or its first bytes; raises as `ShardReader.read`."""
        name = b"%s.%s\0" % (self._key(row), self._extension(row))
        return self._member(row, name, self.image_offset[row], self.image_size[row], most_bytes=most_bytes)

    def sample(self, row: int) -> tuple[str, bytes, bytes]:
        """Read key, image and label: small neighbours, as most are, by one `pread`. What is odd is left to the others.

        Written out, since calls would be a third of its time.
        """
        image_at, image_size = self.image_offset[row], self.image_size[row]
        label_at, label_size = self.label_offset[row], self.label_size[row]
        key = self._keys[self._key_ends[row - 1] if row else 0 : self._key_ends[row]]
        first = (image_at if image_at < label_at else label_at) - BLOCK_BYTES
        wanted = max(image_at + image_size, label_at + label_size) - first
        if first >= 0 and wanted <= _READ_AT_ONCE_BYTES:
            found = self._pread(wanted, first)
            image_at, label_at = image_at - first, label_at - first
            if (
                len(found) == wanted
                and _is_plain(
                    found[image_at - BLOCK_BYTES : image_at], b"%s.%s\0" % (key, self._extension(row)), image_size
                )
                and _is_plain(found[label_at - BLOCK_BYTES : label_at], key + self._label_end, label_size)
            ):
                image, label = found[image_at : image_at + image_size], found[label_at : label_at + label_size]
                return key.decode("utf-8", "surrogateescape"), image, label
        return key.decode("utf-8", "surrogateescape"), self.image(row), self.label(row)

    def label(self, row: int) -> bytes:
        name = self._key(row) + self._label_end
        return self._member(row, name, self.label_offset[row], self.label_size[row])

    def _key(self, row: int) -> bytes:
        return self._keys[self._key_ends[row - 1] if row else 0 : self._key_ends[row]]

    def _extension(self, row: int) -> bytes:
        return self._extensions[self._extension_ends[row - 1] if row else 0 : self._extension_ends[row]]

    def _member(self, row: int, name: bytes, offset: int, size: int, *, most_bytes: int | None = None) -> bytes:
        """Read a member's data and the header before it, which must state its name (with a final zero) and size."""
        wanted = size if most_bytes is None else min(size, most_bytes)
        header_bytes = min(BLOCK_BYTES, offset)
        if header_bytes + wanted <= _READ_AT_ONCE_BYTES:
            found = self._pread(header_bytes + wanted, offset - header_bytes)
            header, data = found[:header_bytes], found[header_bytes:]
        else:
            header, data = self._pread(header_bytes, offset - header_bytes), self._pread(wanted, offset)
        if len(data) != wanted:
            reason = f"it is cut short: {len(data)} of {wanted} bytes are there"
            raise CorruptSample(self.entry.name, key=self.key(row), reason=reason)
        if not _is_plain(header, name, size) and not _states(header, name[:-1], size):
            self._check_by_walk(row)
        return data

    def _pread(self, count: int, offset: int) -> bytes:
        try:
            return os.pread(self.descriptor, count, offset)
        except OSError as error:
            raise SampleError(f"{self.entry.name}: cannot be read ({error.strerror})") from error

    def _check_by_walk(self, row: int) -> None:
        """Tell a long name, a damaged header and a wrong index apart by walking all headers."""
        key = self._index.keys[row]
        if self._walked is None:
            try:
                self._walked = readable_open(self.descriptor, label=self.entry.labels.part)
            except OSError as error:
                raise SampleError(f"{self.entry.name}: cannot be read ({error.strerror})") from error
            self._rows_of_walk = {start: number for number, start in enumerate(self._walked.index.image_offset.data)}
        walked, there = self._walked, self._rows_of_walk.get(self.image_offset[row])
        if there is None and walked.damage:
            raise CorruptSample(self.entry.name, key=key, reason=f"its tar headers cannot be read: {walked.damage}")
        if there is None or (walked.index.keys[there], walked.index.places(there)) != (key, self._index.places(row)):
            kept = f"{self.entry.name} in the cache" if self.is_cached else index_path(self.entry.name)
            raise SampleError(
                f"{self.entry.index or kept}: this index is not that of {self.entry.name}, it leads elsewhere for "
                f"{key!r}: delete it, and it is rebuilt"
            )


def _is_plain(header: bytes, name: bytes, size: int) -> bool:
    """True if a header states this name (with its final zero) and size in the usual form, as nearly all do."""
    return (
        len(header) == BLOCK_BYTES
        and header.startswith(name)
        and len(name) <= _NAME_BYTES
        and not header[_PREFIX_AT]
        and header[124:136] == b"%011o\0" % size
    )


def _states(header: bytes, name: bytes, size: int) -> bool:
    """True if a header states this name (its extension in any case) and size in any form."""
    try:
        found, found_size = stated_member(header)
    except ValueError:
        return False
    stem, _, extension = name.decode("utf-8", "surrogateescape").rpartition(".")
    cut = len(stem) + 1
    return found_size == size and found[:cut] == f"{stem}." and found[cut:].lower() == extension


class ShardReader:
    """Random access to the samples of a data set; `store` is for shards that are not local files."""

    def __init__(self, shards: ShardSet, *, store: Store | None = None, max_open_shards: int = 128) -> None:
        self._open: OrderedDict[int, _Opened] = OrderedDict()
        self.shards = shards
        self._store = store or Store()
        self._max_open_shards = max_open_shards
        self._label_map = shards.label_map
        self._num_classes = shards.num_classes
        self._known_labels: dict[bytes, tuple[int, ...]] = {}  # for shards with classes
        self._touched_at = 0.0
        self._opening_seconds = 0.0  # spent so far

    def read(self, shard: int, *, row: int) -> RawSample:
        """Read a sample; CorruptSample if only it is damaged, SampleError if its shard cannot be read."""
        opened = self._with_row(shard, row)
        key, image, label = opened.sample(row)
        return RawSample(key, image, self._parsed(opened, row, label))

    def labels(self, shard: int, *, row: int) -> tuple[int, ...]:
        """Read a sample's labels without its image; raises as `read`, but misses damage to the image."""
        opened = self._with_row(shard, row)
        return self._parsed(opened, row, opened.label(row))

    def head(self, shard: int, *, row: int, most_bytes: int) -> bytes:
        """Read the first bytes of a sample's image, or all; raises as `read`."""
        return self._with_row(shard, row).image(row, most_bytes=most_bytes)

    def image_bytes(self, shard: int, *, row: int) -> int:
        """Size of a sample's encoded image, from the index; raises as `read`."""
        return self._with_row(shard, row).image_size[row]

    def key(self, shard: int, *, row: int) -> str:
        return self._opened(shard).key(row)

    def describe(self, shard: int, *, row: int) -> str:
        return f"{self._opened(shard).key(row)!r} of {self.shards.shards[shard].name}"

    def _with_row(self, shard: int, row: int) -> _Opened:
        opened = self._opened(shard)
        if row >= opened.num_samples:
            reason = "it is not in the shard, which is damaged or missing"
            raise CorruptSample(opened.entry.name, key=opened.key(row), reason=reason)
        return opened

    def _parsed(self, opened: _Opened, row: int, label: bytes) -> tuple[int, ...]:
        labels = self._known_labels.get(label) if opened.has_classes else None
        if labels is None:
            spec = opened.entry.labels
            try:
                labels = parse_label(label, spec=spec, label_map=self._label_map, num_classes=self._num_classes)
            except ValueError as error:
                raise CorruptSample(opened.entry.name, key=opened.key(row), reason=str(error)) from None
            if opened.has_classes and len(self._known_labels) < _MOST_KNOWN:
                self._known_labels[label] = labels
        return labels

    def _opened(self, shard: int) -> _Opened:
        opened = self._open.get(shard)
        if opened is None:
            opened = self._open_now(shard)
        else:
            self._open.move_to_end(shard)
        if opened.is_cached:
            opened.read_at = self._now()
            if opened.read_at - self._touched_at > TOUCH_SECONDS:
                self._touch()
        return opened

    def _open_now(self, shard: int) -> _Opened:
        before = time.monotonic()
        entry = self.shards.shards[shard]
        try:
            opened = self._open_entry(entry)
        except StoreError:  # perhaps the disk is full of evicted shards that are still open
            if not self._close_evicted(idle_seconds=0.0):
                raise
            opened = self._open_entry(entry)
        while len(self._open) >= self._max_open_shards:
            self._close(next(iter(self._open)))
        descriptor, index = opened
        self._open[shard] = _Opened(entry, descriptor, index_of(entry.subset, index))
        self._opening_seconds += time.monotonic() - before
        return self._open[shard]

    def _now(self) -> float:
        """Return a clock that stops while a shard is opened, so that no other becomes idle during a long download."""
        return time.monotonic() - self._opening_seconds

    def _touch(self) -> None:
        """Tell the cache which shards are in use, and close evicted ones that have been idle for a while."""
        last, self._touched_at = self._touched_at, self._now()
        for opened in self._open.values():
            if opened.is_cached and opened.read_at >= last:
                touch(opened.descriptor)
        self._close_evicted(idle_seconds=TOUCH_SECONDS)

    def _open_entry(self, entry: ShardEntry) -> tuple[int, ShardIndex]:
        try:
            if entry.state == "damaged" and is_local(entry.url):
                return _open_damaged(entry)
            opened = self._store.open(entry)
        except SampleError:
            raise
        except UserError as error:  # perhaps only in this process
            raise SampleError(str(error)) from error
        except OSError as error:
            raise SampleError(f"{entry.name}: cannot be opened ({error.strerror})") from error
        if len(opened.index) != entry.stored_samples:
            os.close(opened.descriptor)
            raise SampleError(
                f"{entry.name}: its index lists {len(opened.index)} samples, manifest.json {entry.stored_samples}: "
                "pack the shards again"
            )
        return opened.descriptor, opened.index

    def _close_evicted(self, *, idle_seconds: float) -> bool:
        latest = self._now() - idle_seconds
        cached = [(shard, opened) for shard, opened in self._open.items() if opened.is_cached]
        idle = [shard for shard, opened in cached if opened.read_at <= latest and is_evicted(opened.descriptor)]
        for shard in idle:
            self._close(shard)
        return bool(idle)

    def _close(self, shard: int) -> None:
        os.close(self._open.pop(shard).descriptor)

    def close(self) -> None:
        """Close every open shard; the reader can be used again."""
        while self._open:
            self._close(next(iter(self._open)))

    def __getstate__(self) -> dict[str, object]:
        """Leave out descriptors: they belong to the process that opened them."""
        return {**vars(self), "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()


def _open_damaged(entry: ShardEntry) -> tuple[int, ShardIndex]:
    """Open the rest of a shard that was damaged when the set was opened: its index may list more."""
    path = local_path(entry.url)
    try:
        index = read_index(index_path(path), label=entry.labels.part)
        if len(index) != entry.stored_samples or index.end > (entry.num_bytes or index.end):
            index = None  # another tar's
    except UserError:
        index = None
    if not path.is_file():
        path = local_path(os.devnull)
    if index is None:
        index = readable_index(path, label=entry.labels.part, name=entry.name).index
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), index


def label_column(
    shards: ShardSet, *, store: Store | None = None, first: int = 0, stop: int | None = None
) -> NDArray[np.int64]:
    """Read the classes of samples `first` to `stop` (exclusive): int64 [n], `UNKNOWN` for damaged ones.

    For sets with one label an image; 5 µs each from a warm cache, remote shards are fetched whole. Raises SampleError.
    """
    assert not shards.is_multi_label, "a sample may have several labels"
    ends = np.cumsum([0, *shards.shard_sizes], dtype=np.int64)
    stop = int(ends[-1]) if stop is None else min(stop, int(ends[-1]))
    found = np.full(max(0, stop - first), UNKNOWN, dtype=np.int64)
    reader = ShardReader(shards, store=store)
    for shard in range(len(ends) - 1):
        for sample in range(max(first, int(ends[shard])), min(stop, int(ends[shard + 1]))):
            try:
                (found[sample - first],) = reader.labels(shard, row=sample - int(ends[shard]))
            except CorruptSample:
                continue
    return found
