"""Images at places that any worker can read by itself: a file of a folder, bytes of a tar, a row of an array.

Columns rather than objects: 10^8 images take 30 bytes each beside their names. `take` gives a worker the few images of
its shard. Opens nothing before the first read.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.shards.location import is_local, join
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES, stated_member
from shardvit.data_shards.store.ranges import read_range, read_whole

ABSENT = -1  # size of a missing file

ContainerKind = Literal["folder", "tar", "array"]


@dataclass(frozen=True)
class Container:
    """What holds images: a folder, a plain tar, or the .npy file of an array; a local path or a URL.

    `stamp` changes with it, as far as can be told without reading it: size and time, or an ETag ("": unknown).
    """

    kind: ContainerKind
    location: str
    stamp: str = ""


@dataclass(frozen=True)
class LocatedFiles:
    """Files by container; all arrays are [files]."""

    path: str  # the source, for messages
    containers: tuple[Container, ...]
    names: Texts  # traces: unique in the source, with forward slashes
    container: NDArray[np.int32]
    offsets: NDArray[np.int64]  # of the data in a tar; row of an array; 0 in a folder, where the name is the path
    sizes: NDArray[np.int64]  # bytes
    stamps: NDArray[np.uint64]  # hash of what changes with the file: its name, size, time

    def take(self, rows: NDArray[np.int64]) -> LocatedFiles:
        """Take some files, as a worker needs them, with only their containers."""
        used, container = np.unique(self.container[rows], return_inverse=True)
        return LocatedFiles(
            self.path,
            tuple(self.containers[number] for number in used.tolist()),
            Texts.of(self.names[row] for row in rows.tolist()),
            container.astype(np.int32),
            self.offsets[rows],
            self.sizes[rows],
            self.stamps[rows],
        )

    def __len__(self) -> int:
        return len(self.names)

    def stamp(self, row: int) -> bytes:
        return self.stamps[row].tobytes()

    def read(self, row: int) -> bytes:
        """Read one file; OSError if that fails, or its container changed since it was listed."""
        container, offset, size = (
            self.containers[int(self.container[row])],
            int(self.offsets[row]),
            int(self.sizes[row]),
        )
        match container.kind:
            case "folder":
                return _read_file(container.location, self.names[row], size)
            case "tar":
                return _read_member(container, offset, size)
            case "array":
                return _read_array(container.location, offset)


def join_located(path: str, parts: Sequence[LocatedFiles]) -> LocatedFiles:
    """Concatenate files of parts, each with containers of its own."""
    first = np.cumsum([0, *(len(part.containers) for part in parts)])
    empty = np.empty(0, np.int64)
    return LocatedFiles(
        path,
        tuple(container for part in parts for container in part.containers),
        Texts.join([part.names for part in parts]),
        np.concatenate([empty, *(part.container + start for part, start in zip(parts, first, strict=False))]).astype(
            np.int32
        ),
        np.concatenate([empty, *(part.offsets for part in parts)]),
        np.concatenate([empty, *(part.sizes for part in parts)]),
        np.concatenate([empty, *(part.stamps for part in parts)]).astype(np.uint64),
    )


def stamp_of(*facts: object) -> int:
    """Hash what changes with a file, to a number for `LocatedFiles.stamps`."""
    text = repr(facts).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _read_file(folder: str, name: str, size: int) -> bytes:
    if size == ABSENT:  # reading a pipe or a device could block forever
        raise OSError("there is no such file, or it is not a plain file")
    if not is_local(folder):
        return read_range(join(folder, name), 0, size)
    with open(join(folder, name), "rb", buffering=0) as stream:
        return stream.read()


def _read_member(tar: Container, offset: int, size: int) -> bytes:
    data = read_range(tar.location, offset - BLOCK_BYTES, BLOCK_BYTES + size)
    try:
        stated = stated_member(data[:BLOCK_BYTES])[1]
    except ValueError:
        stated = -1
    if stated != size:
        raise OSError("the archive has changed since it was listed")
    return data[BLOCK_BYTES:]


def _read_array(location: str, row: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(_array(location)[row]).save(buffer, format="PNG")
    return buffer.getvalue()


@lru_cache(maxsize=8)
def _array(location: str) -> NDArray[np.uint8]:
    if is_local(location):
        return np.load(location, mmap_mode="r", allow_pickle=False)
    return np.load(io.BytesIO(read_whole(location)), allow_pickle=False)
