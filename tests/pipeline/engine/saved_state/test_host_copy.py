"""A snapshot's copy on the host: the same bits, in the same memory at each save, and nothing of them later changed."""

import contextlib
import io
import itertools
import threading
from typing import Any

import pytest
import torch

from shardvit.pipeline.engine.base import Hold
from shardvit.pipeline.engine.saved_state import host_copy
from shardvit.pipeline.engine.saved_state.host_copy import HostBuffer, HostCopy, copy_bytes
from shardvit.pipeline.engine.saved_state.state_files import Abandoned, StateFile, state_file, text_file

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def loaded(file: StateFile) -> Any:
    stream = io.BytesIO()
    file.write_to(stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def snapshot(value: float, *, elements: int = 1000) -> list[StateFile]:
    """Two files that share a flat partition, a tensor of another type, an empty one, and text."""
    flat = torch.arange(elements, dtype=torch.float32) + value
    half = torch.full((7,), value, dtype=torch.bfloat16)
    return [
        state_file("a.pt", {"flat": flat[10:], "half": half, "none": torch.empty(0)}),
        state_file("b.pt", [flat[10:20], torch.tensor(value)]),
        text_file("c.txt", "c"),
    ]


def test_files_share_no_memory_with_the_state_and_are_the_same_to_the_last_bit():
    files = snapshot(0.1)
    copies = HostCopy(files, buffer=HostBuffer(CPU)).run()
    expected = [loaded(file) for file in files[:2]]
    for file in files:
        for tensor in file.tensors or ():
            tensor.fill_(torch.nan)
    found = [loaded(file) for file in copies[:2]]
    assert all(torch.equal(found[0][name], expected[0][name]) for name in ("flat", "half", "none"))
    assert found[0]["half"].dtype is torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert copies[2] is files[2]


def test_the_same_memory_is_filled_again_and_grows_for_a_larger_state():
    buffer, places = HostBuffer(CPU), list[int]()
    for value, elements in ((1.0, 1000), (2.0, 1000), (3.0, 500), (4.0, 3000), (5.0, 3000)):
        files = snapshot(value, elements=elements)
        copies = HostCopy(files, buffer=buffer).run()
        assert copies[0].tensors is not None
        places.append(copies[0].tensors[0].untyped_storage().data_ptr())
        assert loaded(copies[0])["flat"][0] == 10 + value and buffer.num_bytes >= copy_bytes(files)
    assert places[0] == places[1] == places[2] and places[3] == places[4]
    needed = copy_bytes(snapshot(0, elements=3000))
    assert needed <= buffer.num_bytes <= needed * 17 // 16
    buffer.free()
    assert buffer.num_bytes == 0


def test_it_can_be_called_off_between_pieces_and_whoever_waits_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1000)
    copy, abandoned = HostCopy(snapshot(1.0), buffer=HostBuffer(CPU)), threading.Event()
    abandoned.set()
    with pytest.raises(Abandoned):
        copy.run(abandoned=abandoned)
    copy.wait()
    copies = HostCopy(snapshot(1.0), buffer=HostBuffer(CPU)).run(abandoned=threading.Event())  # in pieces
    assert loaded(copies[0])["flat"].tolist() == [number + 1 for number in range(10, 1000)]


def test_what_the_host_has_no_memory_for_is_a_memory_error():
    with pytest.raises(MemoryError, match="memory"):
        HostBuffer(CPU).reserve(1 << 60)


def test_a_hold_is_waited_for_once():
    calls, hold = list[int](), Hold()
    hold.release()
    hold.set(lambda: calls.append(1))
    hold.release()
    hold.release()
    assert calls == [1]
    hold.set(lambda: calls.append(2))
    hold.set(lambda: calls.append(3))
    assert calls == [1, 2]
    hold.release()
    assert calls == [1, 2, 3]


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_copied_beside_it_and_its_next_change_waits():
    weights = torch.arange(1 << 24, dtype=torch.float32, device="cuda")
    buffer = HostBuffer(weights.device)
    for value in (0.0, 1.0):
        weights.copy_(torch.arange(1 << 24, device="cuda") + value)
        copy, found = HostCopy([state_file("x.pt", [weights])], buffer=buffer), list[StateFile]()
        thread = threading.Thread(target=lambda copy=copy, found=found: found.extend(copy.run()))
        thread.start()
        copy.wait()
        weights.fill_(-1)  # ordered after the copy, on the device
        thread.join()
        assert found[0].tensors is not None and found[0].tensors[0].device.type == "cpu"
        assert torch.equal(loaded(found[0])[0], torch.arange(1 << 24) + value)
    buffer.free()


def test_the_copying_thread_works_on_the_engines_device(monkeypatch: pytest.MonkeyPatch):
    """A thread of its own begins on device 0, whatever its rank's is."""
    entered: list[torch.device] = []

    class Entered(contextlib.nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            entered.append(device)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    second = torch.device("cuda", 1)
    with HostBuffer(second).device_of_thread(), HostBuffer(CPU).device_of_thread():
        assert entered == [second]

    def fails() -> Any:
        assert entered == [second, second]
        raise MemoryError("no memory")

    buffer = HostBuffer(CPU)
    copying = HostCopy(snapshot(0.1), buffer=buffer)
    buffer.device = second
    monkeypatch.setattr(copying, "_plan", fails)
    with pytest.raises(MemoryError):
        copying.run()
    copying.wait()


def test_all_copies_share_one_stream_which_waits_for_the_state_to_be_written(monkeypatch: pytest.MonkeyPatch):
    """Torch gives 32 streams in turn, and NCCL has one of them."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            calls.append("made")

        def wait_event(self, event: Any) -> None:
            calls.append("waits for what was written")

    class Event:
        def __init__(self, *, blocking: bool = False) -> None:
            self.blocking = blocking

        def record(self, stream: Any) -> None:
            calls.append("copied" if self.blocking else "written")

    stand_ins = {"Stream": Stream, "Event": Event, "stream": contextlib.nullcontext}
    for name, stand_in in {**stand_ins, "current_stream": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    buffer = HostBuffer(CUDA)
    copying = [HostCopy([], buffer=buffer) for _ in range(2)]
    for each in copying:
        each._order([])
    assert calls == ["written", "written", "made", *["waits for what was written", "copied"] * 2]


class Cudart:
    """Notes what is page-locked: (address, bytes) in order; refuses from the call `refuses` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: int = 10**9) -> None:
        self.locked, self.calls, self.refuses, self.forgotten = dict[int, int](), 0, refuses, 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(host_copy, "_forget_last_error", self._forget)
        monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1 << 16)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls += 1
        if self.calls >= self.refuses:
            return 2
        assert flags == 1 and not any(address < end and begin < address + num_bytes for begin, end in self.pages()), (
            "CUDA refuses to lock a page twice"
        )
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def pages(self) -> list[tuple[int, int]]:
        return [(first // 4096 * 4096, -(-(first + size) // 4096) * 4096) for first, size in self.locked.items()]

    def _forget(self) -> None:
        self.forgotten += 1


def test_memory_is_locked_in_pieces_once_for_all_saves_and_let_go(monkeypatch: pytest.MonkeyPatch):
    cudart, buffer = Cudart(monkeypatch), HostBuffer(CUDA)
    needed = (1 << 20) + 300
    begin = buffer.reserve(needed).data_ptr()
    for _ in range(2):
        assert buffer.reserve(needed).data_ptr() == begin
        assert cudart.calls == 17 and max(cudart.locked.values()) == 1 << 16
        locked = sorted(cudart.locked.items())
        assert locked[0][0] == begin  # and on without a gap
        assert all(one + size == other for (one, size), (other, _) in itertools.pairwise(locked))
        assert locked[-1][0] + locked[-1][1] >= begin + needed
    assert buffer.reserve(needed + (1 << 15)).data_ptr() == begin  # a little more than was foreseen
    assert sum(cudart.locked.values()) >= needed + (1 << 15) and cudart.calls <= 18
    buffer.reserve(2 * needed)
    assert min(cudart.locked) == buffer.reserve(1).data_ptr() and not cudart.forgotten
    buffer.free()
    assert not cudart.locked
    buffer.reserve(needed)
    assert cudart.locked
    del buffer
    assert not cudart.locked


def test_a_refusal_is_forgotten_by_cuda_lets_all_go_and_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    cudart, buffer = Cudart(monkeypatch, refuses=4), HostBuffer(CUDA)
    storage = buffer.reserve(1 << 20)
    assert (cudart.calls, cudart.forgotten, cudart.locked, buffer.is_refused) == (4, 1, {}, True)
    assert storage.nbytes() >= 1 << 20 and buffer.reserve(1 << 20).data_ptr() == storage.data_ptr()
    buffer.reserve(1 << 22)
    assert cudart.calls == 4
    buffer.free()


def test_no_copy_spans_two_locked_pieces(monkeypatch: pytest.MonkeyPatch):
    """CUDA takes a range of one lock only."""
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 4096)
    files, buffer = snapshot(0.5, elements=5000), HostBuffer(CPU)
    copying = HostCopy(files, buffer=buffer)
    parts, _ = copying._plan()
    begin = buffer.reserve(1).data_ptr()
    places = [(target.data_ptr() - begin, target.nbytes()) for _, target in parts if target.nbytes()]
    assert len(places) > 5 and all(first // 4096 == (first + size - 1) // 4096 for first, size in places)
    assert all(source.nbytes() == target.nbytes() for source, target in parts)
    assert loaded(copying.run()[1])[1] == 0.5


@pytest.mark.gpu
def test_cuda_forgets_a_refusal():
    assert int(torch.cuda.cudart().cudaHostRegister(0, 0, 1)) != 0
    host_copy._forget_last_error()
    assert torch.ones(3, device="cuda").add(1).tolist() == [2, 2, 2]
