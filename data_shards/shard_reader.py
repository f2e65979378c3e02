"""A sample by its number: one read at a known offset of a tar shard, no streaming through it.

The offsets come from the index beside the tar (see `tar_index`), read when the shard is first touched. A read of an
image costs about 20 microseconds from a warm cache, in any order. A limited number of shards is kept open, the least
recently used is closed first, so descriptors and memory do not grow with the data set.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from data_shards.errors import SampleError, UserError
from data_shards.manifest import Manifest
from data_shards.tar_index import ShardIndex, open_index


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in its shard."""

    key: str
    image: bytes
    label: int


class ShardReader:
    """Random access to the samples of a data set of local shards.

    Args:
        manifest: the data set.
        max_open_shards: shards kept open at the same time.
    """

    def __init__(self, manifest: Manifest, *, max_open_shards: int = 128) -> None:
        self.manifest = manifest
        self._max_open_shards = max_open_shards
        self._open: OrderedDict[int, tuple[int, ShardIndex]] = OrderedDict()

    def read(self, shard: int, *, row: int) -> RawSample:
        """The sample in row `row` of shard `shard`.

        Raises:
            SampleError: the shard is not what its index or manifest says; names the file and the key.
        """
        descriptor, index = self._open_shard(shard)
        image = os.pread(descriptor, int(index.image_size[row]), int(index.image_offset[row]))
        label = os.pread(descriptor, int(index.label_size[row]), int(index.label_offset[row]))
        key = index.keys[row]
        if len(image) != index.image_size[row] or not label.strip().isdigit():
            raise SampleError(
                f"sample {key!r} of {self._path(shard)} is cut short or its .cls is no class number: "
                "pack the shards again"
            )
        if int(label) >= self.manifest.num_classes:
            raise SampleError(
                f"sample {key!r} of {self._path(shard)} has label {int(label)}, but manifest.json names "
                f"{self.manifest.num_classes} classes: pack the shards again"
            )
        return RawSample(key=key, image=image, label=int(label))

    def describe(self, shard: int, *, row: int) -> str:
        """The sample's shard and key, for messages."""
        return f"{self._open_shard(shard)[1].keys[row]!r} of {self._path(shard)}"

    def _path(self, shard: int) -> Path:
        return self.manifest.root / self.manifest.shards[shard].file

    def _open_shard(self, shard: int) -> tuple[int, ShardIndex]:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        path = self._path(shard)
        try:
            index = open_index(path)
        except UserError as error:  # this process alone may have come upon it
            raise SampleError(str(error)) from error
        if len(index.keys) != self.manifest.shards[shard].num_samples:
            raise SampleError(
                f"{path}: its index lists {len(index.keys)} samples, manifest.json "
                f"{self.manifest.shards[shard].num_samples}: pack the shards again"
            )
        if len(self._open) == self._max_open_shards:
            _, (oldest, _) = self._open.popitem(last=False)
            os.close(oldest)
        self._open[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), index
        return self._open[shard]

    def close(self) -> None:
        """Close every shard that is open; the reader can be used again."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def __getstate__(self) -> dict[str, object]:
        """Workers get the reader without descriptors: those belong to the process that opened them."""
        return {"manifest": self.manifest, "_max_open_shards": self._max_open_shards, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()
