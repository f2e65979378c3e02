"""Snapshot an engine's state as one process's checkpoint files; write, flush and verify them.

A snapshot takes milliseconds, since its tensors share training's memory. Writing digests in the same pass (blake2b, 0.3
to 0.9 GiB/s a core), flushes the file, drops it from the page cache, reads it back and compares.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from shardvit.data_shards.durable import make_folders

_FILE_OVERHEAD_BYTES = 4096
_TENSOR_OVERHEAD_BYTES = 256  # header and alignment of one record in torch's zip format
_BUFFER_BYTES = 1 << 20
# Bytes per digest, so that several ranks can verify one file; part of the checkpoint format.
_PIECE_BYTES = 16 << 20


Place = tuple[int, int]
"""A storage's address and size in bytes."""


@dataclass(frozen=True)
class Seal:
    """A file's size and digests, as in the manifest."""

    num_bytes: int
    blake2b: str  # of each 16 MiB in turn, separated by spaces


class Abandoned(Exception):
    """Writing was cancelled."""


@dataclass(frozen=True)
class StateFile:
    """A file to write: a structure with tensors, or text."""

    path: str  # relative to the checkpoint folder
    structure: bytes  # pickled content without its tensors; for text, its bytes
    tensors: tuple[torch.Tensor, ...] | None = None  # None for text

    @property
    def num_bytes(self) -> int:
        """Bound the file's size from above, to a few KB."""
        tensors = sum(storage.nbytes() + _TENSOR_OVERHEAD_BYTES for storage in self.storages().values())
        return _FILE_OVERHEAD_BYTES + len(self.structure) + tensors

    def storages(self) -> dict[Place, torch.UntypedStorage]:
        """Return the tensors' distinct, nonempty storages."""
        found = {_place(tensor): tensor.untyped_storage() for tensor in self.tensors or ()}
        return {place: storage for place, storage in found.items() if storage.nbytes()}

    def moved(self, copies: Mapping[Place, torch.UntypedStorage]) -> StateFile:
        if self.tensors is None:
            return self
        tensors = (
            _view(copies[place], like=tensor, offset=int(tensor.storage_offset()))
            if (place := _place(tensor)) in copies
            else tensor
            for tensor in self.tensors
        )
        return StateFile(self.path, self.structure, tuple(tensors))

    def write_to(self, stream: IO[bytes]) -> None:
        if self.tensors is None:
            stream.write(self.structure)
        else:
            torch.save(put_back(self.structure, self.tensors), stream)


def text_file(path: str, text: str) -> StateFile:
    """Make a text file."""
    return StateFile(path, text.encode())


def state_file(path: str, content: Any) -> StateFile:
    """Make a `torch.save` file of any picklable structure; tensors share memory, without unused parts of storages."""
    structure, tensors = left_out(content)
    return StateFile(path, structure, tuple(_trimmed(tensors)))


def left_out(content: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle a structure without its tensors; return both."""
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(content)
    return structure.getvalue(), pickler.tensors


def put_back(structure: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo `left_out`, within the same run."""
    return _Unpickler(io.BytesIO(structure), tensors).load()


def write_file(
    folder: Path,
    file: StateFile,
    *,
    abandoned: threading.Event | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Seal:
    """Write a file below an existing `folder`, flush it and read it back; `on_bytes` gets each piece's size. OSError if
    the disk is full, fails, or reads back different bytes; Abandoned once `abandoned` is set."""
    path = folder / file.path
    make_folders(path.parent, below=folder)
    with path.open("wb", buffering=0) as raw, io.BufferedWriter(raw, _BUFFER_BYTES) as buffered:
        tee = _Tee(buffered, abandoned=abandoned, on_bytes=on_bytes)
        file.write_to(tee)  # pyright: ignore[reportArgumentType]
        if tee.failure is not None:
            with contextlib.suppress(OSError):
                raw.close()  # or closing would flush the buffer into a full disk again
            raise tee.failure
        buffered.flush()
        os.fsync(raw.fileno())
        if hasattr(os, "posix_fadvise"):  # read back from the disk, not the cache
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seal = tee.seal()
    if digest_of(path) != seal.blake2b:
        raise OSError(errno.EIO, f"{file.path} reads back different from what was written")
    return seal


def digest_of(path: Path) -> str:
    """Compute `Seal.blake2b` of a file on disk."""
    count = max(1, -(-path.stat().st_size // _PIECE_BYTES))
    return " ".join(piece_digests(path, first=0, count=count))


def piece_digests(path: Path, *, first: int, count: int) -> list[str]:
    """Digest `count` pieces of a file, starting at piece `first`."""
    digests: list[str] = []
    with path.open("rb", buffering=0) as file:
        file.seek(first * _PIECE_BYTES)
        for _ in range(count):
            digest, left = _hasher(), _PIECE_BYTES
            while left and (content := file.read(min(left, _BUFFER_BYTES))):
                digest.update(content)
                left -= len(content)
            digests.append(digest.hexdigest())
    return digests


def whole_digest(path: Path) -> str:
    """Digest a file in one piece, as older manifests do."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hasher).hexdigest()


def piece_sizes(num_bytes: int) -> list[int]:
    """Bytes in each digested piece of a file."""
    full, rest = divmod(num_bytes, _PIECE_BYTES)
    return [_PIECE_BYTES] * full + ([rest] if rest or not full else [])


class _Tee:
    """Writes and digests in one pass. Keeps the first failure and drops later writes instead of raising into
    `torch.save`, whose C++ writer would print and throw again in its cleanup."""

    def __init__(
        self, stream: IO[bytes], *, abandoned: threading.Event | None, on_bytes: Callable[[int], None] | None
    ) -> None:
        self.failure: Exception | None = None
        self._stream, self._abandoned, self._on_bytes = stream, abandoned, on_bytes
        self._digests = [_hasher()]
        self._num_bytes = 0

    def write(self, content: bytes | memoryview) -> int:
        view = memoryview(content).cast("B")
        if self.failure is None:
            try:
                start = 0
                while start < len(view):
                    end = start + _PIECE_BYTES - self._num_bytes % _PIECE_BYTES
                    self._write_piece(view[start:end])
                    start = end
            except Exception as error:  # noqa: BLE001 - raised again by `write_file`
                self.failure = error
        return len(view)

    def _write_piece(self, piece: memoryview) -> None:
        if self._abandoned is not None and self._abandoned.is_set():
            raise Abandoned
        self._stream.write(piece)
        if self._num_bytes and self._num_bytes % _PIECE_BYTES == 0:
            self._digests.append(_hasher())
        self._digests[-1].update(piece)
        self._num_bytes += len(piece)
        if self._on_bytes is not None:
            self._on_bytes(len(piece))

    def flush(self) -> None:
        """Do nothing: `write_file` flushes at the end."""

    def seal(self) -> Seal:
        return Seal(self._num_bytes, " ".join(digest.hexdigest() for digest in self._digests))


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back; reads only what this run's `_Pickler` wrote."""

    def __init__(self, file: IO[bytes], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _trimmed(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Move the tensors to storages without unused bytes, not copying."""
    spans: dict[tuple[int, torch.dtype], list[tuple[int, int]]] = {}
    for tensor in tensors:
        if tensor.numel():
            spans.setdefault(_home(tensor), []).append(_reach(tensor))
    merged = {home: _merged(those) for home, those in spans.items()}
    parts: dict[tuple[int, int], torch.UntypedStorage] = {}
    for tensor in tensors:
        if not tensor.numel():  # such as ZeRO 3's placeholders
            yield torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            continue
        first, end = _reach(tensor)
        begin, stop = next(span for span in merged[_home(tensor)] if span[0] <= first and end <= span[1])
        whole = tensor.untyped_storage()
        part = parts.setdefault((whole.data_ptr(), begin), whole[begin:stop])
        yield _view(part, like=tensor, offset=(first - begin) // tensor.element_size())


def _place(tensor: torch.Tensor) -> Place:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _home(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and end byte a tensor spans in its storage."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _view(storage: torch.UntypedStorage, *, like: torch.Tensor, offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, offset, like.shape, like.stride())


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=16)
