"""A manifest's shards as columns: 100 bytes a shard, a tenth of an object each, shared by workers as a whole.

NumPy is imported with the first columns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, overload

from data_shards.shards.texts import Texts

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


class PackedShards(Sequence[Shard]):
    """A manifest's shards; the counts are int64 [shards]."""

    def __init__(
        self, files: Texts, num_samples: NDArray[np.int64], num_bytes: NDArray[np.int64], sha256: Texts
    ) -> None:
        self.files, self.num_samples, self.num_bytes, self.sha256 = files, num_samples, num_bytes, sha256

    @classmethod
    def of(
        cls, files: Sequence[str], num_samples: Sequence[int], num_bytes: Sequence[int], sha256: Sequence[str]
    ) -> PackedShards:
        import numpy as np

        return cls(Texts.of(files), np.array(num_samples, np.int64), np.array(num_bytes, np.int64), Texts.of(sha256))

    @classmethod
    def of_shards(cls, shards: Sequence[Shard]) -> PackedShards:
        """Return columns unchanged."""
        if isinstance(shards, PackedShards):
            return shards
        return cls.of(*zip(*map(astuple, shards), strict=True)) if shards else cls.of((), (), (), ())

    @classmethod
    def join(cls, parts: Sequence[PackedShards]) -> PackedShards:
        import numpy as np

        return cls(
            Texts.join([part.files for part in parts]),
            np.concatenate([part.num_samples for part in parts]),
            np.concatenate([part.num_bytes for part in parts]),
            Texts.join([part.sha256 for part in parts]),
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
        number = range(len(self))[number]
        return self[number : number + 1][0]

    def __iter__(self) -> Iterator[Shard]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        """Equal any sequence of the same shards: a manifest that was written equals the one that is read."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))
