"""One batch ahead on the device: the same batches, not overwritten on their way, and what is not taken did not happen.

The GPU is a stand-in: a copy is done as late as it may be, when its buffer is wanted again or its batch is taken.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from data_shards.errors import UserError
from data_shards.loading import device_prefetch
from data_shards.loading.batch import Batch, Fault
from data_shards.loading.device_prefetch import CudaCopies, DevicePrefetch, _Buffer, prefetch_to_device, unpacked
from data_shards.loading.memory import STAGES, staged_bytes

MINE = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
CPU = torch.device("cpu")


def batch(number: int, *, count: int = 3, classes: int | None = None) -> Batch:
    draw = torch.Generator().manual_seed(number)
    return Batch(
        images=torch.randint(0, 256, (count, 5, 5, 3), dtype=torch.uint8, generator=draw),
        mirrored=torch.rand(count, generator=draw) < 0.5,
        labels=torch.randint(-1, 9, (count,) if classes is None else (count, classes), generator=draw),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count) + number,
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=tuple(f"{number}/{row}" for row in range(count)),
        faults=(Fault("a.tar", key=str(number), reason="truncated"),),
    )


class Stream:
    """Batches 0, 1, ... and where it stands."""

    def __init__(self, stop: int, *, error: Exception | None = None) -> None:
        self.stop, self.error = stop, error
        self.given, self.closed, self.asked = 0, 0, threading.Semaphore(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.given == self.stop:
            raise self.error or StopIteration
        self.given += 1
        self.asked.release()
        # Several sizes: a batch of several labels an image is as wide as its widest.
        return batch(self.given - 1, classes=(None, 4, 1, 7)[self.given % 4])

    def close(self) -> None:
        self.closed += 1


class LateCopies:
    """Through the same buffers as on a GPU; `allocated` has the bytes of each piece of page-locked memory."""

    def __init__(self) -> None:
        self.buffers, self.started, self.allocated = [_Buffer() for _ in range(STAGES)], 0, list[int]()

    def prepare(self) -> None: ...

    def start(self, batch: Batch) -> Callable[[], Batch]:
        buffer = self.buffers[self.started % STAGES]
        self.started += 1
        staged, places = buffer.pack(batch, empty=self._empty)
        on_device = torch.full_like(staged, 77)
        pending = [staged]

        def copy() -> None:
            if pending:
                on_device.copy_(pending.pop())

        def take() -> Batch:
            copy()
            return unpacked(batch, on_device, places)

        buffer.in_use_until(copy)
        return take

    def _empty(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(num_bytes)
        return torch.full((num_bytes,), 99, dtype=torch.uint8)


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


@MINE
def test_the_same_batches_come_in_order_and_buffers_are_used_again():
    copies = LateCopies()
    prefetch = DevicePrefetch(Stream(50), copies=copies)
    taken = list(prefetch)  # all are kept, so that a buffer used too early would show
    assert len(taken) == 50
    for one, other in zip(taken, Stream(50), strict=True):
        assert_same(one, other)
    assert copies.started == 50 and len(copies.allocated) <= 4  # two buffers, each grown to the widest labels
    with pytest.raises(StopIteration):
        next(prefetch)


def test_a_buffer_is_not_filled_before_its_copy_is_done():
    copies = LateCopies()
    takes = [copies.start(batch(number)) for number in range(7)]  # none is taken meanwhile
    for number, take in enumerate(takes):
        assert_same(take(), batch(number))


@MINE
def test_exactly_one_batch_is_ahead_and_what_is_ahead_is_no_one_s():
    stream, copies = Stream(50), LateCopies()
    prefetch = DevicePrefetch(stream, copies=copies)
    assert stream.given == 0  # nothing is read before it is asked for
    for number in range(5):
        assert next(prefetch).keys[0] == f"{number}/0"
        for _ in range(1 if number else 2):  # this one and the next have been read
            stream.asked.acquire()
        assert stream.given == number + 2
    prefetch.close()
    assert stream.given == 6 and stream.closed == 1
    with pytest.raises(StopIteration):
        next(prefetch)


@MINE
def test_an_error_comes_when_its_batch_is_asked_for_and_stays():
    stream = Stream(3, error=UserError("sample 7 is damaged"))
    prefetch = DevicePrefetch(stream, copies=LateCopies())
    assert [next(prefetch).keys[0] for _ in range(3)] == ["0/0", "1/0", "2/0"]
    for _ in range(2):
        with pytest.raises(UserError, match="sample 7"):
            next(prefetch)
    prefetch.close()
    assert stream.closed == 1


def test_one_that_was_never_used_is_closed_and_starts_no_thread():
    before, stream = threading.active_count(), Stream(3)
    DevicePrefetch(stream, copies=LateCopies()).close()
    assert stream.closed == 1 and stream.given == 0 and threading.active_count() == before


def test_on_a_cpu_it_is_the_stream_itself():
    stream = Stream(3)
    assert prefetch_to_device(stream, device=CPU) is stream


def test_the_calls_to_a_gpu_are_in_the_order_that_makes_them_safe(monkeypatch: pytest.MonkeyPatch):
    """Copied on the side stream, waited for by the batch's user, whose stream the memory is then marked with."""
    calls: list[str] = []

    class Side:
        def __init__(self, device: torch.device) -> None: ...

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            calls.append(f"record on {type(stream).__name__}")

        def synchronize(self) -> None:
            calls.append("host waits")

    class Current:
        def wait_event(self, event: Event) -> None:
            calls.append("current waits")

    @contextlib.contextmanager
    def on(stream: Side) -> Iterator[None]:
        calls.append("side begins")
        yield
        calls.append("side ends")

    cuda = device_prefetch.torch.cuda
    for name, stand_in in {"Stream": Side, "Event": Event, "stream": on}.items():
        monkeypatch.setattr(cuda, name, stand_in)
    monkeypatch.setattr(cuda, "current_stream", lambda device: Current())
    monkeypatch.setattr(cuda, "set_device", lambda device: calls.append("set device"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: calls.append("marked"))
    monkeypatch.setattr(device_prefetch, "_page_locked", lambda count: torch.empty(count, dtype=torch.uint8))
    copies = CudaCopies(CPU)
    copies.prepare()
    take = copies.start(batch(0))
    assert calls == ["set device", "side begins", "record on Side", "side ends"]
    assert_same(take(), batch(0))
    assert calls[4:] == ["current waits", "marked"]
    copies.start(batch(1))
    assert "host waits" not in calls
    copies.start(batch(2))  # in the first one's buffer
    assert calls.count("host waits") == 1


def test_the_stated_page_locked_memory_is_enough():
    copies = LateCopies()
    for number in range(5):
        copies.start(batch(number, count=200))
    rounded = sum(2 ** (num_bytes - 1).bit_length() for num_bytes in copies.allocated)
    assert len(copies.allocated) == STAGES and rounded <= staged_bytes(200, image_size=5)
    assert staged_bytes(256, image_size=224) == 128 * 2**20


@pytest.mark.gpu
def test_batches_come_to_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    prefetch = prefetch_to_device(Stream(20), device=device)
    for number, (one, other) in enumerate(zip(prefetch, Stream(20), strict=True)):
        assert one.images.device == one.labels.device == one.mirrored.device == device, number
        for name in ("images", "mirrored", "labels"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name))
