"""The shards that a manifest lists, as columns: about 100 bytes a shard, where an object each takes ten times as much.

A set of 10^5 shards is opened by every run, sent to every rank and given to every worker process; columns are copied
and shared as a whole. A `Shard` is made when somebody asks for one. NumPy is imported when the first columns are made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Shard:
    """One tar: `file` is relative to the manifest's folder, `sha256` the digest of all its bytes, or "" if unknown."""

    file: str
    num_samples: int
    num_bytes: int
    sha256: str


class TextColumn(Sequence[str]):
    """Texts end to end in UTF-8: `blob` is uint8, and text i ends before `ends[i + 1]`; int64, `ends[0]` is 0."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._blob, self._ends = blob, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextColumn:
        import numpy as np

        joined = "".join(texts)
        lengths = map(len, texts) if joined.isascii() else (len(text.encode()) for text in texts)
        ends = np.cumsum(np.fromiter((0, *lengths), np.int64, count=len(texts) + 1))
        return cls(np.frombuffer(joined.encode(), np.uint8), ends)

    @classmethod
    def join(cls, parts: Sequence[TextColumn]) -> TextColumn:
        import numpy as np

        lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(part._ends) for part in parts)])
        return cls(np.concatenate([part._blob for part in parts]), np.cumsum(lengths))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            start, stop, step = number.indices(len(self))
            if step != 1:
                return [self[each] for each in range(start, stop, step)]
            ends = self._ends[start : max(start, stop) + 1].tolist()
            content = self._blob[ends[0] : ends[-1]].tobytes()
            return [content[begin - ends[0] : end - ends[0]].decode() for begin, end in pairwise(ends)]
        number = in_range(number, len(self))
        return self._blob[self._ends[number] : self._ends[number + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])


class PackedShards(Sequence[Shard]):
    """A manifest's shards; the counts are int64 [shards]."""

    def __init__(
        self, files: TextColumn, *, num_samples: NDArray[np.int64], num_bytes: NDArray[np.int64], sha256: TextColumn
    ) -> None:
        self.files, self.num_samples, self.num_bytes, self.sha256 = files, num_samples, num_bytes, sha256

    @classmethod
    def of(
        cls, files: Sequence[str], *, num_samples: Sequence[int], num_bytes: Sequence[int], sha256: Sequence[str]
    ) -> PackedShards:
        import numpy as np

        return cls(
            TextColumn.of(files),
            num_samples=np.array(num_samples, np.int64),
            num_bytes=np.array(num_bytes, np.int64),
            sha256=TextColumn.of(sha256),
        )

    @classmethod
    def of_shards(cls, shards: Sequence[Shard]) -> PackedShards:
        """Unchanged if they are columns already."""
        if isinstance(shards, PackedShards):
            return shards
        return cls.of(
            [shard.file for shard in shards],
            num_samples=[shard.num_samples for shard in shards],
            num_bytes=[shard.num_bytes for shard in shards],
            sha256=[shard.sha256 for shard in shards],
        )

    @classmethod
    def join(cls, parts: Sequence[PackedShards]) -> PackedShards:
        import numpy as np

        return cls(
            TextColumn.join([part.files for part in parts]),
            num_samples=np.concatenate([part.num_samples for part in parts]),
            num_bytes=np.concatenate([part.num_bytes for part in parts]),
            sha256=TextColumn.join([part.sha256 for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.num_samples)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, number: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(number, slice):
            counts = self.num_samples[number].tolist(), self.num_bytes[number].tolist()
            return tuple(map(Shard, self.files[number], *counts, self.sha256[number]))
        number = in_range(number, len(self))
        return self[number : number + 1][0]

    def __iter__(self) -> Iterator[Shard]:
        counts = self.num_samples.tolist(), self.num_bytes.tolist()
        return map(Shard, self.files, *counts, self.sha256)

    def __eq__(self, other: object) -> bool:
        """To any sequence of the same shards: a manifest that was written equals the one that is read."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))


def in_range(number: int, length: int) -> int:
    """An index as of a tuple: negative ones count from the end; IndexError beyond it."""
    if not -length <= number < length:
        raise IndexError(number)
    return number % length
