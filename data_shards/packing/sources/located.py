"""Images at places that any worker can read by itself: a file of a folder, bytes of a tar, a row of an array.

Columns rather than objects: 10^8 images take 30 bytes each beside their names. `take` gives a worker the few images of
its shard. A read is one `pread`, or one range request; a .tar.gz, which cannot seek, is decompressed before its first.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardvit.data_shards.packing.sources.decompress import decompressed
from shardvit.data_shards.shards.location import is_local, join
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES, stated_member
from shardvit.data_shards.store.ranges import read_range, read_stamped_range, read_whole

if TYPE_CHECKING:
    from shardvit.data_shards.store.folders import Folder

ContainerKind = Literal["folder", "tar", "array"]
ABSENT = -1  # size of a missing file
_COLUMNS = ("container", "offsets", "sizes", "stamps")
_STAT_PIECE = 2000  # files that a thread looks at
_STAT_THREADS = 16  # they wait for a network disk


@dataclass(frozen=True)
class Container:
    """What holds images: a folder, a plain tar, or the .npy file of an array; a local path or a URL.

    `stamp` changes with it, as far as can be told without reading it: size and time, or an ETag ("": unknown).
    `compressed`: the .tar.gz of which `location` is the tar. `pixels`: uint8 [images, height, width(, 3)] in memory.
    """

    kind: ContainerKind
    location: str
    stamp: str = ""
    compressed: str = ""
    pixels: NDArray[np.uint8] | None = field(default=None, repr=False, compare=False)

    def plain(self, report: Report) -> str:
        """Return the location, decompressed if need be; UserError if that fails."""
        if self.compressed:
            decompressed(self.compressed, Path(self.location), report=report)
        return self.location


@dataclass(frozen=True)
class LocatedFiles:
    """Files by container; all arrays are [files]."""

    path: str  # the source, for messages
    containers: tuple[Container, ...]
    names: Texts  # traces: unique in the source, with forward slashes; in a folder, the path below it
    container: NDArray[np.int32]
    offsets: NDArray[np.int64]  # of the data in a tar; row of an array; 0 in a folder
    sizes: NDArray[np.int64]  # bytes; of arrays, of the pixels; `ABSENT` for what is not a plain file
    stamps: NDArray[np.uint64]  # hash of what changes with the file: its name, size, time

    @classmethod
    def of(
        cls,
        path: str,
        container: Container,
        names: Sequence[str] | Texts,
        *,
        sizes: ArrayLike,
        stamps: ArrayLike,
        offsets: ArrayLike = 0,
    ) -> LocatedFiles:
        """Locate files of one container."""
        texts = names if isinstance(names, Texts) else Texts.of(names)
        places, numbers = np.broadcast_to(np.asarray(offsets, np.int64), len(texts)), np.zeros(len(texts), np.int32)
        return cls(
            path, (container,), texts, numbers, places, np.asarray(sizes, np.int64), np.asarray(stamps, np.uint64)
        )

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: NDArray[np.int64]) -> LocatedFiles:
        """Take some files, as a worker needs them."""
        return replace(
            self, names=self.names.take(rows), **{column: getattr(self, column)[rows] for column in _COLUMNS}
        )

    def read(self, row: int) -> bytes:
        """Read one image, of an array as PNG; OSError if that fails, or it changed since it was listed."""
        container = self.containers[self.container[row]]
        offset, size = int(self.offsets[row]), int(self.sizes[row])
        match container.kind:
            case "folder":
                if size == ABSENT:  # reading a pipe or a device could block forever
                    raise OSError("there is no such file, or it is not a plain file")
                return _read_file(container.location, self.names[row], size, int(self.stamps[row]))
            case "tar":
                return _read_member(container, offset, size)
            case _:
                return _png((_array(container.location) if container.pixels is None else container.pixels)[offset])

    def prepare(self, report: Report) -> None:
        """Decompress what has to be, once, before workers ask for it."""
        for container in self.containers:
            container.plain(report)

    def saved(self, folder: Folder) -> LocatedFiles:
        """Write arrays in memory into a folder that other processes see, named by their content."""
        kept = list(self.containers)
        for number, container in enumerate(kept):
            if (pixels := container.pixels) is not None:
                np.save(stream := io.BytesIO(), pixels)
                name = f"{hashlib.sha256(stream.getbuffer()).hexdigest()[:32]}.npy"
                if folder.size(name) != stream.tell():
                    folder.write(name, stream.getvalue())
                kept[number] = Container("array", folder.at(name).location)
        return replace(self, containers=tuple(kept))


def join_located(path: str, parts: Sequence[LocatedFiles]) -> LocatedFiles:
    """Concatenate files of parts that have containers of their own."""
    first = np.cumsum([0, *(len(part.containers) for part in parts)], dtype=np.int32)
    parts = [replace(part, container=part.container + first[number]) for number, part in enumerate(parts)]
    columns = {column: np.concatenate([getattr(part, column) for part in parts]) for column in _COLUMNS}
    containers = tuple(container for part in parts for container in part.containers)
    return LocatedFiles(path, containers, Texts.join([part.names for part in parts]), **columns)


def stamp_of(*facts: object) -> int:
    """Hash a file's name and what changes with it, for `stamps`."""
    text = "\0".join(map(str, facts)).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def folder_files(root: Path, names: Sequence[str], *, path: Path | None = None) -> LocatedFiles:
    """Locate files below a folder, with a `stat` each, 16 at a time; missing ones are `ABSENT`."""
    pieces = [names[at : at + _STAT_PIECE] for at in range(0, len(names), _STAT_PIECE)]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        looks = [*pool.map(_look, [str(root)] * len(pieces), pieces)] if len(pieces) > 1 else [_look(str(root), names)]
    sizes, stamps = (np.concatenate(each) for each in zip(*looks, strict=True))
    container = Container("folder", os.path.abspath(root))
    return LocatedFiles.of(str(path or root), container, names, sizes=sizes, stamps=stamps)


def array_files(origin: str, pixels: NDArray[np.uint8]) -> LocatedFiles:
    """Locate the images of an array in memory, [num_images, height, width] or [..., 3]; `origin` starts their names."""
    names, count = [f"{origin}/{row}" for row in range(len(pixels))], len(pixels)
    images = (f"{name}\0".encode() + row.tobytes() for name, row in zip(names, pixels, strict=True))
    stamps = np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in images), np.uint64)
    container, sizes = Container("array", origin, pixels=pixels), np.full(count, pixels[0].nbytes)
    return LocatedFiles.of(origin, container, names, sizes=sizes, stamps=stamps, offsets=np.arange(count))


def _look(root: str, names: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    sizes, stamps = list[int](), list[int]()
    for name in names:
        size = modified_ns = ABSENT
        try:
            found = os.stat(f"{root}/{name}")
            if stat.S_ISREG(found.st_mode):
                size, modified_ns = found.st_size, found.st_mtime_ns
        except OSError:
            pass
        sizes.append(size)
        stamps.append(stamp_of(name, size, modified_ns))
    return np.array(sizes, np.int64), np.array(stamps, np.uint64)


def _read_file(folder: str, name: str, size: int, stamp: int) -> bytes:
    if not is_local(folder):
        data, found = read_stamped_range(join(folder, name), 0, size)
        # Of other stores, listings may write times in another way.
        if found.startswith("ETag=") and stamp_of(name, size, found) != stamp:
            raise OSError("it has changed since it was listed")
        return data
    with open(f"{folder}/{name}", "rb", buffering=0) as stream:
        return stream.read()


def _read_member(container: Container, offset: int, size: int) -> bytes:
    location = container.plain(lambda line: None)
    stamp = "" if is_local(location) else container.stamp
    data = read_range(location, offset - BLOCK_BYTES, BLOCK_BYTES + size, stamp=stamp)
    try:
        stated = stated_member(data[:BLOCK_BYTES])[1]
    except ValueError:
        stated = -1
    if stated != size or len(data) != BLOCK_BYTES + size:
        raise OSError("the archive has changed since it was listed")
    return data[BLOCK_BYTES:]


@lru_cache(maxsize=8)
def _array(location: str) -> NDArray[np.uint8]:
    if is_local(location):
        return np.load(location, mmap_mode="r", allow_pickle=False)
    return np.load(io.BytesIO(read_whole(location)), allow_pickle=False)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
