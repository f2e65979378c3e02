"""Many short texts in one piece of memory, which workers can share; a list takes 60 bytes more for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Texts(Sequence[str]):
    """Texts end to end in UTF-8 (`blob`, uint8), text i before `ends[i]` (int64); names that are not UTF-8 are kept."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        import numpy as np

        parts = [text.encode("utf-8", "surrogateescape") for text in texts]
        return cls(np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        import numpy as np

        lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in parts] or [np.zeros(0, np.int64)])
        return cls(np.concatenate([part.blob for part in parts] or [np.zeros(0, np.uint8)]), np.cumsum(lengths))

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

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])
