"""Image files below a folder, with their labels: what class folders and lists of labels come down to.

Costs one `stat` for each file, once; no file is opened before it is read.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ABSENT = -1  # in place of a size


@dataclass(frozen=True)
class FileImages:
    """Image files below `root`; `files` are paths relative to it, with forward slashes."""

    root: Path
    files: list[str]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        # A pipe or a device would be waited for without end.
        if self.num_bytes[index] == ABSENT:
            raise OSError("there is no such file, or it is none that can be read")
        with open(f"{self.root}/{self.files[index]}", "rb", buffering=0) as stream:
            return stream.read()

    def trace(self, index: int) -> str:
        return self.files[index]

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        """Sizes of the files; `ABSENT` for what is not there or is no plain file."""
        return self._stats[:, 0]

    def stamp(self, index: int) -> bytes:
        size, modified_ns = self._stats[index].tolist()
        return f"{self.files[index]}\0{size}\0{modified_ns}".encode(errors="surrogateescape")

    def update_digest(self, digest: "hashlib._Hash") -> None:
        for file, size in zip(self.files, self.num_bytes.tolist(), strict=True):
            digest.update(f"{file}\0{size}\0".encode(errors="surrogateescape"))

    @cached_property
    def _stats(self) -> NDArray[np.int64]:
        """Shape (num_images, 2): size in bytes, time of the last change in ns."""
        stats = np.full((len(self.files), 2), ABSENT, dtype=np.int64)
        for i, file in enumerate(self.files):
            try:
                found = os.stat(f"{self.root}/{file}")
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                stats[i] = found.st_size, found.st_mtime_ns
        return stats
