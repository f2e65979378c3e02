"""Copy the next batch to the GPU before it is asked for, by a thread, on a stream of its own; nothing on a CPU.

A copy overlaps the GPU's work only from page-locked memory, so each batch is first copied into one of `STAGES` reused
buffers. Taking a batch makes the GPU's stream wait for its copy, never the processor. Costs, for 256 images of 224 px:
a copy in host memory, 5 to 10 ms of a core [estimated from its bandwidth], two batches of GPU memory, 128 MiB of
page-locked memory (`memory.staged_bytes`). Faults and steps count only in batches that are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

import torch

from data_shards.loading.batch import Batch
from data_shards.loading.memory import STAGES

_ON_DEVICE = ("images", "mirrored", "labels")  # the host uses the other fields
_CLOSE_SECONDS = 5.0  # for the thread to finish its batch


class Batches(Protocol):
    """A stream of batches that may hold workers."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...


def prefetch_to_device(batches: Batches, *, device: torch.device) -> Batches:
    """Iterate one batch ahead on a GPU; elsewhere return `batches` itself. `close` closes both."""
    return DevicePrefetch(batches, copies=CudaCopies(device)) if device.type == "cuda" else batches


class DevicePrefetch:
    """Iterates over `batches` in a thread, one batch ahead; its exceptions are raised to the batch's user."""

    def __init__(self, batches: Batches, *, copies: CudaCopies) -> None:
        self._batches, self._copies = batches, copies
        self._may_begin = threading.Semaphore(1)  # to bring another batch
        self._ready: SimpleQueue[Callable[[], Batch] | BaseException] = SimpleQueue()
        self._closed = threading.Event()
        self._end: BaseException | None = None  # what ended the stream
        self._thread: threading.Thread | None = None

    def __iter__(self) -> DevicePrefetch:
        return self

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="device-prefetch", daemon=True)
            self._thread.start()
        copied = self._ready.get()
        if isinstance(copied, BaseException):
            self._end = copied
            raise copied
        batch = copied()
        self._may_begin.release()
        return batch

    def close(self) -> None:
        """Stop reading. A thread that waits for a store is left behind, and closes the batches when it is done."""
        self._end = StopIteration()
        self._closed.set()
        self._may_begin.release()
        if self._thread is None:
            self._batches.close()
        else:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._copies.prepare()
            while self._may_begin.acquire() and not self._closed.is_set():
                self._ready.put(self._copies.start(next(self._batches)))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the next batch gets it, the stream's end too
            self._ready.put(error)
        finally:
            self._batches.close()  # here: a generator cannot be closed while another thread is in it


class CudaCopies:
    """Copies through page-locked buffers that are used in turns, by a stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(STAGES)]  # uint8 [bytes], by field
        self._waits: list[Callable[[], object]] = [bool] * STAGES  # until the last copy out of each is done
        self._turn = 0

    def prepare(self) -> None:
        """Select the GPU, or the thread's page-locked memory would belong to, and cost memory on, the first."""
        torch.cuda.set_device(self._device)

    def start(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to copy; call the result for the batch on the device."""
        turn, self._turn = self._turn, (self._turn + 1) % STAGES
        self._waits[turn]()
        copied = torch.cuda.Event(blocking=True)  # to wait for it takes no core
        on_device: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name in _ON_DEVICE:
                on_device[name] = _sent(self._staged(turn, name, getattr(batch, name)), device=self._device)
            copied.record(self._stream)
        self._waits[turn] = copied.synchronize

        def take() -> Batch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in on_device.values():
                tensor.record_stream(current)  # its memory is another's only after this stream's work on it
            return replace(batch, **on_device)

        return take

    def _staged(self, turn: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to page-locked memory, which grows to the largest batch."""
        buffers = self._buffers[turn]
        if name not in buffers or buffers[name].nbytes < tensor.nbytes:
            buffers.pop(name, None)  # first gives back what it has
            buffers[name] = _page_locked(tensor.nbytes)
        return buffers[name][: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _page_locked(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _sent(staged: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    return torch.empty_like(staged, device=device).copy_(staged, non_blocking=True)
