"""Copy a snapshot to host memory during training, into one buffer that every save reuses.

A thread copies during forward and backward passes, and only the next change of the state (an optimizer step or weight
swap) waits (`Hold`): on a GPU its kernels, not the host, as the copy engine writes to page-locked memory. Costs as much
host memory as the process writes. A CPU copies about 5 GB/s. One snapshot at a time.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardvit.pipeline.engine.saved_state.state_files import Abandoned, Place, StateFile

_ALIGNMENT = 512  # bytes, of each storage in the buffer: CUDA's own
_PIECE_BYTES = 64 << 20  # locked, or copied, at a time
_PAGE_BYTES = 4096
_ROOM = 16  # one part in so many is left free: untouched memory costs nothing
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all of the process's devices


class HostBuffer:
    """Host memory for one snapshot of an engine on `device`; grows as needed. `is_refused`: CUDA would not page-lock
    it, so copies are slower and the next change of the state waits for all of one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_refused = device, False
        # One for all copies: of torch's 32, given in turn, one is NCCL's, whose messages would wait for a whole copy.
        self.stream: torch.cuda.Stream | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._locked: list[int] = []  # addresses of the first pieces
        self._unlock: Callable[[], object] = bool

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def device_of_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Select our device: in a new thread CUDA would pick 0, where every rank would pay for a context."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def reserve(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a buffer of at least `num_bytes`. MemoryError if the host has no room."""
        if self.num_bytes < num_bytes:
            self.free()
            room = num_bytes + num_bytes // _ROOM
            try:
                whole = torch.empty(room + _PAGE_BYTES, dtype=torch.uint8)
            except RuntimeError as error:  # torch's CPU allocator raises no specific type
                raise MemoryError(str(error).splitlines()[0]) from error
            first = -whole.data_ptr() % _PAGE_BYTES  # two locks may not share a page
            self._bytes = whole[first : first + room]
        if self.device.type == "cuda" and not self.is_refused:
            self._page_lock(num_bytes)
        first = self._bytes.storage_offset()
        return self._bytes.untyped_storage()[first : first + self.num_bytes]

    def free(self) -> None:
        """Release the memory; nothing may still be using it."""
        self._unlock()
        self._unlock, self._bytes = bool, torch.empty(0, dtype=torch.uint8)

    def _page_lock(self, num_bytes: int) -> None:
        """Lock memory in place (pinned memory would round up to a power of two), in pieces: CUDA answers no other call
        meanwhile, and takes a third of a second for a GB [estimated]."""
        cudart: Any = torch.cuda.cudart()
        if not self._locked:
            unlock = weakref.finalize(self._bytes, _unlock, cudart, self._locked)
            unlock.atexit = False  # process exit unlocks it anyway, and CUDA may be gone by then
            self._unlock = unlock
        for first in range(len(self._locked) * _PIECE_BYTES, num_bytes, _PIECE_BYTES):
            address, length = self._bytes.data_ptr() + first, min(_PIECE_BYTES, self.num_bytes - first)
            if int(cudart.cudaHostRegister(address, length, _PORTABLE)) != 0:
                _forget_last_error()
                self.is_refused = True
                self._unlock()
                return
            self._locked.append(address)


def _unlock(cudart: Any, addresses: list[int]) -> None:
    while addresses:
        cudart.cudaHostUnregister(addresses.pop())


def _forget_last_error() -> None:
    """Clear this thread's last CUDA error, which torch would report for its next kernel."""
    with contextlib.suppress(OSError):
        library = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD).cudaGetLastError()  # torch's own


def copy_bytes(files: Sequence[StateFile]) -> int:
    """Host memory needed to copy `files`."""
    return sum(_aligned(storage.nbytes()) for storage in _sources(files).values())


def _sources(files: Sequence[StateFile]) -> dict[Place, torch.UntypedStorage]:
    return {place: storage for file in files for place, storage in file.storages().items()}


_Part = tuple[torch.UntypedStorage, torch.UntypedStorage]  # part of a snapshot's storage, and its target


class HostCopy:
    """One snapshot's copy: created by the training thread, run by another."""

    def __init__(self, files: Sequence[StateFile], *, buffer: HostBuffer) -> None:
        self._files, self._buffer = tuple(files), buffer
        self._ordered = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._written: torch.cuda.Event | None = None  # training's kernels so far are done
        if buffer.device.type == "cuda":
            self._written = torch.cuda.Event()  # only streams wait for it
            self._written.record(torch.cuda.current_stream(buffer.device))

    def run(self, *, abandoned: threading.Event | None = None) -> tuple[StateFile, ...]:
        """Copy, and return the files with their tensors in the buffer. Raises Abandoned once `abandoned` is set."""
        with self._buffer.device_of_thread():
            try:
                parts, files = self._plan()
                on_device = [part for part in parts if part[0].device.type != "cpu"]
                if on_device:
                    self._order(on_device)
                for source, target in parts:
                    if source.device.type == "cpu":
                        if abandoned is not None and abandoned.is_set():
                            raise Abandoned
                        # Copies in one thread, without the GIL: training keeps the other cores.
                        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes())
            finally:
                self._ordered.set()
                if self._copied is not None:
                    self._copied.synchronize()  # even on failure: nobody may reuse the buffer mid-copy
                self._files = ()
        return files

    def wait(self) -> None:
        """Return once this thread, or its CUDA stream, may change the copied tensors."""
        self._ordered.wait()
        if self._copied is not None:
            torch.cuda.current_stream(self._buffer.device).wait_event(self._copied)

    def _plan(self) -> tuple[list[_Part], tuple[StateFile, ...]]:
        whole, begin = self._buffer.reserve(copy_bytes(self._files)), 0
        parts, targets = list[_Part](), dict[Place, torch.UntypedStorage]()
        for place, source in _sources(self._files).items():
            end = begin + source.nbytes()
            targets[place] = whole[begin:end]
            cuts = range((begin // _PIECE_BYTES + 1) * _PIECE_BYTES, end, _PIECE_BYTES)  # no copy may span two locks
            parts += [(source[a - begin : b - begin], whole[a:b]) for a, b in pairwise([begin, *cuts, end])]
            begin += _aligned(source.nbytes())
        return parts, tuple(file.moved(targets) for file in self._files)

    def _order(self, parts: Sequence[_Part]) -> None:
        stream = self._buffer.stream = self._buffer.stream or torch.cuda.Stream(self._buffer.device)
        assert self._written is not None
        stream.wait_event(self._written)
        with torch.cuda.stream(stream):
            copied = torch.cuda.Event(blocking=True)  # waiters sleep instead of spinning
            try:
                for source, target in parts:
                    _as_bytes(target).copy_(_as_bytes(source), non_blocking=True)
            finally:
                copied.record(stream)
                self._copied = copied


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
