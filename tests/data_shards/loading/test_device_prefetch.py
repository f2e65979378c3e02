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

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading import device_prefetch
from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.data_shards.loading.device_prefetch import CudaCopies, DevicePrefetch, prefetch_to_device
from shardvit.data_shards.loading.memory import STAGES, staged_bytes

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


class Gpu:
    """Its calls in order; a copy is done when its event is waited for. `allocated`: bytes of page-locked memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.allocated: list[int] = []
        self.devices: list[torch.device] = []  # that were set
        self.copies: list[Callable[[], object]] = []  # begun since the last event
        gpu = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Any) -> None:
                self.copies, gpu.copies = gpu.copies, []
                gpu.calls.append(f"record on {stream}")

            def synchronize(self, who: str = "host") -> None:
                gpu.calls.append(f"{who} waits")
                while self.copies:
                    self.copies.pop()()

        class Current:
            def wait_event(self, event: Event) -> None:
                event.synchronize("current")

        @contextlib.contextmanager
        def on(stream: str) -> Iterator[None]:
            self.calls.append(f"{stream} begins")
            yield
            self.calls.append(f"{stream} ends")

        cuda = device_prefetch.torch.cuda
        stand_ins = {"Stream": lambda device: "side", "Event": Event, "stream": on}
        stand_ins |= {
            "current_stream": lambda device: Current(),
            "set_device": lambda device: self._called("set device", device),
            "current_device": lambda: 3,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(cuda, name, stand_in)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._called("marked"))
        monkeypatch.setattr(device_prefetch, "_page_locked", self._page_locked)
        monkeypatch.setattr(device_prefetch, "_sent", self._sent)

    def _called(self, name: str, *devices: torch.device) -> None:
        self.calls.append(name)
        self.devices += devices

    def _page_locked(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(num_bytes)
        return torch.full((num_bytes,), 99, dtype=torch.uint8)

    def _sent(self, staged: torch.Tensor, *, device: torch.device) -> torch.Tensor:
        on_device = torch.zeros_like(staged)
        self.copies.append(lambda: on_device.copy_(staged))
        return on_device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


@MINE
def test_the_same_batches_come_in_order_and_buffers_are_used_again(gpu: Gpu):
    prefetch = DevicePrefetch(Stream(50), copies=CudaCopies(CPU))
    taken = list(prefetch)  # all are kept, so that a buffer used too early would show
    assert len(taken) == 50
    for one, other in zip(taken, Stream(50), strict=True):
        assert_same(one, other)
    assert len(gpu.allocated) <= 8  # two buffers of three tensors, each grown to the widest labels
    with pytest.raises(StopIteration):
        next(prefetch)


def test_a_buffer_is_not_filled_before_its_copy_is_done(gpu: Gpu):
    copies = CudaCopies(CPU)
    takes = [copies.start(batch(number)) for number in range(7)]  # none is taken meanwhile
    for number, take in enumerate(takes):
        assert_same(take(), batch(number))


@MINE
def test_exactly_one_batch_is_ahead_and_what_is_ahead_is_no_one_s(gpu: Gpu):
    stream = Stream(50)
    prefetch = DevicePrefetch(stream, copies=CudaCopies(CPU))
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
def test_an_error_comes_when_its_batch_is_asked_for_and_stays(gpu: Gpu):
    stream = Stream(3, error=UserError("sample 7 is damaged"))
    prefetch = DevicePrefetch(stream, copies=CudaCopies(CPU))
    assert [next(prefetch).keys[0] for _ in range(3)] == ["0/0", "1/0", "2/0"]
    for _ in range(2):
        with pytest.raises(UserError, match="sample 7"):
            next(prefetch)
    prefetch.close()
    assert stream.closed == 1


def test_one_that_was_never_used_is_closed_and_starts_no_thread(gpu: Gpu):
    before, stream = threading.active_count(), Stream(3)
    DevicePrefetch(stream, copies=CudaCopies(CPU)).close()
    assert stream.closed == 1 and stream.given == 0 and threading.active_count() == before


def test_on_a_cpu_it_is_the_stream_itself():
    stream = Stream(3)
    assert prefetch_to_device(stream, device=CPU) is stream


def test_the_calls_to_a_gpu_are_in_the_order_that_makes_them_safe(gpu: Gpu):
    """Copied on the side stream, waited for by the batch's user, whose stream the memory is then marked with."""
    copies = CudaCopies(CPU)
    copies.prepare()
    take = copies.start(batch(0))
    assert gpu.calls == ["set device", "side begins", "record on side", "side ends"]
    assert_same(take(), batch(0))
    assert gpu.calls[4:] == ["current waits", *["marked"] * 3]
    copies.start(batch(1))
    assert "host waits" not in gpu.calls
    copies.start(batch(2))  # in the first one's buffer
    assert gpu.calls.count("host waits") == 1


def test_the_thread_selects_the_gpu_of_whoever_made_it(gpu: Gpu):
    """By its number: a command says "cuda", which torch does not select, and a new thread is on the first."""
    for device in (torch.device("cuda"), torch.device("cuda", 1)):
        CudaCopies(device).prepare()
    assert gpu.devices == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_the_stated_page_locked_memory_is_enough(gpu: Gpu):
    copies = CudaCopies(CPU)
    for number in range(5):
        copies.start(batch(number, count=200))
    rounded = sum(2 ** (num_bytes - 1).bit_length() for num_bytes in gpu.allocated)
    assert len(gpu.allocated) == 3 * STAGES and rounded <= staged_bytes(200, image_size=5)
    assert 128 * 2**20 <= staged_bytes(256, image_size=224) < 128.01 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("named", ["cuda", "cuda:0"])
def test_batches_come_to_a_gpu(named: str):
    device = torch.device("cuda", 0)
    prefetch = prefetch_to_device(Stream(20), device=torch.device(named))
    for number, (one, other) in enumerate(zip(prefetch, Stream(20), strict=True)):
        assert one.images.device == one.labels.device == one.mirrored.device == device, number
        for name in ("images", "mirrored", "labels"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name))
