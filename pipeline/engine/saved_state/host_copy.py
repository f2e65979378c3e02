"""Copy a snapshot to host memory during training, into one buffer that every save reuses.

A thread copies during forward and backward passes, and only the next change of the state (an optimizer step or weight
swap) waits (`Hold`): on a GPU its kernels, not the host, as the copy engine writes to page-locked memory. Costs as much
host memory as the process writes. A CPU copies about 5 GB/s. One snapshot at a time.
"""

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardvit.pipeline.engine.saved_state.state_files import Abandoned, Place, StateFile

_ALIGNMENT = 512  # bytes, of each storage in the buffer: CUDA's own
_PIECE_BYTES = 64 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all of the process's devices


class HostBuffer:
    """Host memory for one snapshot of an engine on `device`; grows as needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unlock: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def device_of_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Select our device: in a new thread CUDA would pick 0, where every rank would pay for a context."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def reserve(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a buffer of at least `num_bytes`. MemoryError if the host has no room."""
        if self._bytes.numel() < num_bytes:
            self.free()
            try:
                self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
            except RuntimeError as error:  # torch's CPU allocator raises no specific type
                raise MemoryError(str(error).splitlines()[0]) from error
            if self.device.type == "cuda":
                self._unlock = _page_lock(self._bytes)
        return self._bytes.untyped_storage()

    def free(self) -> None:
        """Release the memory; nothing may still be using it."""
        if self._unlock is not None:
            self._unlock()
        self._unlock, self._bytes = None, torch.empty(0, dtype=torch.uint8)


def _page_lock(memory: torch.Tensor) -> Callable[[], None] | None:
    """Lock memory in place (pinned memory would round up to a power of two); None: CUDA refused."""
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    if int(cudart.cudaHostRegister(address, memory.numel(), _PORTABLE)) != 0:
        return None
    unlock = weakref.finalize(memory, cudart.cudaHostUnregister, address)
    unlock.atexit = False  # process exit unlocks it anyway, and CUDA may be gone by then
    return unlock


def copy_bytes(files: Sequence[StateFile]) -> int:
    """Host memory needed to copy `files`."""
    return sum(_aligned(storage.nbytes()) for storage in _sources(files).values())


def _sources(files: Sequence[StateFile]) -> dict[Place, torch.UntypedStorage]:
    return {place: storage for file in files for place, storage in file.storages().items()}


_Part = tuple[torch.UntypedStorage, torch.UntypedStorage]  # a snapshot's storage and its target


class HostCopy:
    """One snapshot's copy: created by the training thread, run by another."""

    def __init__(self, files: Sequence[StateFile], *, buffer: HostBuffer) -> None:
        self._files, self._buffer = tuple(files), buffer
        self._ordered = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._written: torch.cuda.Event | None = None  # training's kernels so far are done
        if buffer.device.type == "cuda":
            self._written = torch.cuda.Event()
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
                        _copy_on_host(source, target, abandoned=abandoned)
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
            targets[place] = whole[begin : begin + source.nbytes()]
            parts.append((source, targets[place]))
            begin += _aligned(source.nbytes())
        return parts, tuple(file.moved(targets) for file in self._files)

    def _order(self, parts: Sequence[_Part]) -> None:
        device = self._buffer.device
        stream = torch.cuda.Stream(device)
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


def _copy_on_host(
    source: torch.UntypedStorage, target: torch.UntypedStorage, *, abandoned: threading.Event | None
) -> None:
    """Copy in one thread, without the GIL: training keeps the other cores."""
    for first in range(0, source.nbytes(), _PIECE_BYTES):
        if abandoned is not None and abandoned.is_set():
            raise Abandoned
        length = min(_PIECE_BYTES, source.nbytes() - first)
        ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, length)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
