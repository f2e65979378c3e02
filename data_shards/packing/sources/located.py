"""Images at places that any worker can read by itself: a file of a folder, bytes of a tar, a row of an array.

Columns rather than objects: 10^8 images take 30 bytes each beside their names. `take` gives a worker the few images of
its shard. Opens nothing before the first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.shards.shard_index import Texts

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

    def read(self, row: int) -> bytes:
        raise NotImplementedError


def join_located(path: str, parts: Sequence[LocatedFiles]) -> LocatedFiles:
    """Concatenate files of parts that have containers of their own."""
    raise NotImplementedError
