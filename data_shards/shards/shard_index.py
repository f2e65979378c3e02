"""The table of one tar's samples, 40 bytes and a key each, and its binary form on disk (.npz without pickle).

That form loads in a millisecond and holds any key; `tar_index` has the text form that other tools read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.durable import replaced

MOST_TAR_BYTES = 1 << 62  # twice this still fits into 64 bits

_ARRAYS = ("image_offset", "image_size", "label_offset", "label_size")


class Texts(Sequence[str]):
    """Many short texts in memory that workers can share; a list takes 60 bytes more for each.

    `blob` (uint8) concatenates them in UTF-8; text i ends at `ends[i]` (int64). Names that are not UTF-8 are kept.
    """

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        parts = [text.encode("utf-8", "surrogateescape") for text in texts]
        return cls(np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in parts] or [np.zeros(0, np.int64)])
        return cls(np.concatenate([part.blob for part in parts] or [np.zeros(0, np.uint8)]), np.cumsum(lengths))

    def take(self, rows: NDArray[np.int64]) -> Texts:
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
        return Texts(self.blob[places], ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if not isinstance(number, slice):
            number = range(len(self))[number]
            start = self.ends[number - 1] if number else 0
            return self.blob[start : self.ends[number]].tobytes().decode("utf-8", "surrogateescape")
        start, stop, step = number.indices(len(self))
        if step != 1:
            return [self[each] for each in range(start, stop, step)]
        begin = int(self.ends[start - 1]) if start else 0
        ends = [begin, *self.ends[start:stop].tolist()]
        content = self.blob[begin : ends[-1]].tobytes()
        return [content[a - begin : b - begin].decode("utf-8", "surrogateescape") for a, b in pairwise(ends)]

    def encoded(self) -> list[bytes]:
        content, ends = self.blob.tobytes(), [0, *self.ends.tolist()]
        return [content[a:b] for a, b in pairwise(ends)]

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])


@dataclass(frozen=True)
class ShardIndex:
    """One tar's samples in order; all arrays are int64 [num_samples], in bytes from the tar's start."""

    keys: Texts
    image_extension: Texts
    image_offset: NDArray[np.int64]
    image_size: NDArray[np.int64]
    label_offset: NDArray[np.int64]
    label_size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def end(self) -> int:
        """End of the last byte that any sample needs; 0 without samples."""
        ends = (self.image_offset + self.image_size, self.label_offset + self.label_size)
        return max((int(end.max()) for end in ends if len(end)), default=0)

    def places(self, row: int) -> tuple[int, ...]:
        """Offsets and sizes of a sample's image and label."""
        return tuple(int(getattr(self, name)[row]) for name in _ARRAYS)

    def take(self, rows: Sequence[int]) -> ShardIndex:
        if len(rows) == len(self):
            return self
        keys, extensions = list(self.keys), list(self.image_extension)
        return ShardIndex(
            Texts.of(keys[row] for row in rows),
            Texts.of(extensions[row] for row in rows),
            *(getattr(self, name)[np.array(rows, dtype=int)] for name in _ARRAYS),
        )

    @property
    def is_ascending(self) -> bool:
        return bool((np.diff(np.minimum(self.image_offset, self.label_offset)) > 0).all())


def default_index_folder() -> Path:
    """`indexes` in the user's cache folder (freedesktop.org's base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardvit" / "indexes"


def save_index(index: ShardIndex, path: Path, *, note: str = "") -> None:
    """Write the binary form atomically, with any text as `note`."""
    with replaced(path, sync="none", writers="several") as beside, beside.open("wb") as stream:
        np.savez(
            stream,
            note=np.frombuffer(note.encode(), dtype=np.uint8),
            keys=index.keys.blob,
            key_ends=index.keys.ends,
            extensions=index.image_extension.blob,
            extension_ends=index.image_extension.ends,
            **{name: getattr(index, name) for name in _ARRAYS},
        )


def load_index(path: Path) -> ShardIndex:
    """Read the binary form; FileNotFoundError if it is missing, ValueError if broken."""
    content = read_arrays(path, ["keys", "key_ends", "extensions", "extension_ends", *_ARRAYS])
    sizes = {content[name].shape for name in ("key_ends", "extension_ends", *_ARRAYS)}
    if len(sizes) != 1 or any(content[name].dtype != np.int64 for name in ("key_ends", "extension_ends", *_ARRAYS)):
        raise ValueError("its arrays do not fit together")
    if any(((content[name] < 0) | (content[name] >= MOST_TAR_BYTES)).any() for name in _ARRAYS):
        raise ValueError("an offset or size that no tar has")
    for name in ("key", "extension"):
        ends = content[f"{name}_ends"]
        if (np.diff(ends, prepend=0) < 0).any() or (len(ends) and ends[-1] != len(content[f"{name}s"])):
            raise ValueError(f"its {name}s do not fit together")
    return ShardIndex(
        Texts(np.frombuffer(content["keys"].tobytes(), np.uint8), content["key_ends"]),
        Texts(np.frombuffer(content["extensions"].tobytes(), np.uint8), content["extension_ends"]),
        *(content[name] for name in _ARRAYS),
    )


def load_note(path: Path) -> str:
    """Read the note of an index; raises as `load_index` does."""
    return read_arrays(path, ["note"])["note"].tobytes().decode()


def read_arrays(path: Path, names: list[str]) -> dict[str, NDArray[np.int64]]:
    """Read arrays of a .npz file; ValueError if it is broken or lacks one."""
    with open(path, "rb") as stream:  # np.load() would leave a broken file open
        try:
            arrays = np.load(stream, allow_pickle=False)
            return {name: arrays[name] for name in names}
        except Exception as error:  # noqa: BLE001 - zipfile and numpy raise a dozen kinds for broken files
            raise ValueError(f"not a readable index ({error})") from None
