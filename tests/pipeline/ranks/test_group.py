"""The process group, exchanges in log2(n) rounds, and waiting for rank 0."""

import math
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.ranks import group
from shardvit.pipeline.ranks.group import (
    ADDRESS_FILE,
    PeerGone,
    Ranks,
    gather_bytes,
    gather_rows,
    join_group,
    rounds,
    while_others_wait,
)
from shardvit.pipeline.ranks.place import Place
from tests.saving import ThreadRanks

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import sys, time
from pathlib import Path
import torch
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.group import Ranks
rank, world_size, folder, delay = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
time.sleep(delay)
place = Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=folder)
ranks = Ranks(place, timeout_seconds=240)
print(ranks.gather(torch.tensor([rank + 0.5])).flatten().tolist(), flush=True)
ranks.leave()
"""


def outputs_of(code: str, runs: list[list[list[str]]]) -> list[list[str]]:
    """What `python -c code` prints with each rank's arguments, for runs of several ranks at the same time."""
    started = [
        [
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for arguments in run
        ]
        for run in runs
    ]
    try:
        return [[process.communicate(timeout=240)[0] for process in run] for run in started]
    finally:
        for process in (process for run in started for process in run):
            process.kill()


def test_two_runs_that_begin_at_the_same_moment_do_not_meet(tmp_path: Path):
    """Of one of them the first rank comes late."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [
        [[str(rank), str(ranks), str(tmp_path / name), str(int(name == "a" and rank == 0))] for rank in range(ranks)]
        for name, ranks in (("a", 2), ("b", 3))
    ]
    outputs = outputs_of(RANK, runs)
    assert outputs == [["[0.5, 1.5]\n"] * 2, ["[0.5, 1.5, 2.5]\n"] * 3]


def meets(network: str, folder: Path, *, ranks: int) -> str:
    """What the ranks say in a network of their own, set up by `network`, a shell command."""
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", f'{network} && exec "$@"', "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here, or no ip")
    both = " & ".join(f'"$0" -c "$1" {rank} {ranks} "$2" 0' for rank in range(ranks))
    command += ["sh", "-c", f"{both}; wait", sys.executable, RANK, str(folder)]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
    ).stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_that_has_ipv6_alone_trains(tmp_path: Path, ranks: int):
    said = meets("ip link set lo up && ip address del 127.0.0.1/8 dev lo", tmp_path, ranks=ranks)
    assert said.count(str([0.5, 1.5][:ranks])) == ranks, said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_without_a_loopback_interface_is_told_so_at_once(tmp_path: Path, ranks: int):
    said = meets("true", tmp_path, ranks=ranks)
    assert said.count("UserError: this machine cannot connect to itself") == ranks and "frame #" not in said, said


def test_without_any_address_of_its_own_a_machine_is_told_what_to_set_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "_LOOPBACKS", (("192.0.2.1", socket.AF_INET),))
    with pytest.raises(UserError, match="ip link set lo up"):
        Ranks(Place(), timeout_seconds=240)


def test_one_process_alone_needs_no_port_at_all(tmp_path: Path):
    """Its launcher's port may even be taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ranks = Ranks(Place(master_port=taken.getsockname()[1], rendezvous=tmp_path), timeout_seconds=60)
        try:
            assert ranks.gather(torch.tensor([1.5, 2.5])).tolist() == [[1.5, 2.5]]
        finally:
            ranks.leave()
    assert not list(tmp_path.iterdir())


def test_a_first_rank_that_never_comes_is_missed_in_words(tmp_path: Path):
    place = Place(rank=1, world_size=2, local_rank=1, local_world_size=2, rendezvous=tmp_path)
    with pytest.raises(PeerGone, match=r"rank 0 did not start within 0 seconds \(engine.collective_timeout"):
        Ranks(place, timeout_seconds=0.1)
    assert not torch.distributed.is_initialized()


def test_nobody_reads_half_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def replace(source: Path, target: Path) -> None:
        seen.append([source.read_text(), target.name])
        os.rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        Ranks(Place(world_size=2, local_world_size=2, rendezvous=tmp_path), timeout_seconds=240)
    (text, name) = seen[0]
    assert name == ADDRESS_FILE and text.split()[0] == "127.0.0.1" and int(text.split()[1]) > 0


def test_a_named_host_where_nobody_listens_is_told_with_what_to_change():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody answers
        place = Place(rank=1, world_size=2, master_addr="127.0.0.1", master_port=taken.getsockname()[1])
        with pytest.raises(
            PeerGone, match=rf"127\.0\.0\.1:{place.master_port} \(MASTER_ADDR, MASTER_PORT\) within 1 s"
        ):
            Ranks(place, timeout_seconds=1)


@pytest.mark.parametrize(
    ("place", "gpu"), [(Place(local_rank=3), 3), (Place(local_rank=3, gpu=0), 0)], ids=["sees all", "sees its own"]
)
def test_the_gpu_of_a_process_is_its_local_rank_or_the_one_that_it_sees(
    place: Place, gpu: int, monkeypatch: pytest.MonkeyPatch
):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        group,
        "join_group",
        lambda place, backend, timeout_seconds, gpu: join_group(place, backend="gloo", timeout_seconds=30),
    )
    Ranks(place, timeout_seconds=30).leave()
    assert chosen == [gpu] and os.environ["LOCAL_RANK"] == str(gpu)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nccl_is_told_the_gpu_when_the_ranks_meet(has_gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """So that it connects them there and then. gloo's group is told none."""
    met: list[tuple[str, object]] = []

    class Met(Exception):
        pass

    def init_process_group(backend: str, *arguments: object, device_id: object, **more: object) -> None:
        met.append((backend, device_id))
        raise Met

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    with pytest.raises(Met):
        Ranks(Place(local_rank=3), timeout_seconds=30)
    assert met == [("nccl", torch.device("cuda", 3)) if has_gpu else ("gloo", None)]


def test_on_a_cpu_processes_of_a_machine_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Ranks(Place(local_rank=1, gpu=0), timeout_seconds=30).leave()
    assert os.environ["LOCAL_RANK"] == "1"


GREETING = """
import os, sys
from pathlib import Path
import torch
from shardvit.data_shards.errors import UserError
from shardvit.pipeline.ranks import group
from shardvit.pipeline.ranks.place import Place
rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
group._MOST_MESHED = 2
place = Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=folder)
ranks = group.Ranks(place, timeout_seconds=240)
assert "TORCH_GLOO_LAZY_INIT" not in os.environ
rows = ranks.gather(torch.tensor([rank, 0.5]))
assert rows.tolist() == [[float(each), 0.5] for each in range(world_size)], rows
everyone = ranks.gather_objects({"rank": rank, "text": "x" * 1000 * rank})
assert everyone == [{"rank": each, "text": "x" * 1000 * each} for each in range(world_size)]
assert ranks.from_main(("of", rank)) == ("of", 0)
assert ranks.from_main(b"" if rank else bytes(10**6)) == bytes(10**6)
ranks.barrier()
print("well", flush=True)
ranks.leave()
"""


def test_ranks_that_connect_when_they_first_talk_exchange_the_same(tmp_path: Path):
    assert outputs_of(GREETING, [[[str(rank), "3", str(tmp_path)] for rank in range(3)]]) == [["well\n"] * 3]


class Board:
    """Point-to-point messages between threads; counts those of each rank, and whom it talks to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Counter[int] = Counter()
        self.partners: dict[int, set[int]] = defaultdict(set)
        self.boxes: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        with self.lock:
            return self.boxes[source, target, tag]


class Done:
    def wait(self) -> None:
        return


class Receipt:
    def __init__(self, box: queue.Queue[torch.Tensor], into: torch.Tensor) -> None:
        self._box, self._into = box, into

    def wait(self) -> None:
        found = self._box.get(timeout=240)
        assert found.shape == self._into.shape, "a message of another length"
        self._into.copy_(found)


class Member:
    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._board.size

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Done:
        self._board.sent[self._rank] += 1
        self._board.partners[self._rank].add(dst)
        self._board.box(self._rank, dst, tag).put(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Receipt:
        return Receipt(self._board.box(src, self._rank, tag), tensors[0])


def on_all(size: int, call) -> tuple[list, Board]:
    board, found = Board(size), [None] * size

    def work(rank: int) -> None:
        found[rank] = call(Member(board, rank), rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, board


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 33, 64])
def test_everyone_has_all_rows_in_rank_order_after_log2_messages(size: int):
    expected = torch.stack([torch.arange(3, dtype=torch.float64) + 10 * rank for rank in range(size)])
    found, board = on_all(size, lambda group, rank: gather_rows(group, expected[rank], tag=1))
    assert all(torch.equal(rows, expected) for rows in found)
    assert rounds(size) == math.ceil(math.log2(size))
    assert all(board.sent[rank] == rounds(size) for rank in range(size))
    assert all(len(board.partners[rank]) == rounds(size) for rank in range(size))


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [5, 0, 1, 700, 3], [0, 0, 9, 0], [1] * 17])
def test_bytes_of_any_length_arrive_whole(lengths: list[int]):
    values = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    found, board = on_all(len(lengths), lambda group, rank: gather_bytes(group, values[rank], tag=3))
    assert found == [values] * len(lengths)
    assert max(board.sent.values(), default=0) <= 2 * rounds(len(lengths))


def test_values_of_a_later_exchange_are_not_taken_for_those_of_an_earlier_one():
    """A rank may be an exchange ahead of another."""

    def twice(group: Member, rank: int) -> list[list[float]]:
        return [gather_rows(group, torch.tensor([float(rank + tag)]), tag=tag).flatten().tolist() for tag in (1, 2)]

    found, _ = on_all(6, twice)
    assert found == [[[float(rank + tag) for rank in range(6)] for tag in (1, 2)]] * 6


def test_at_1024_ranks_ten_messages_follow_each_other():
    assert rounds(1024) == 10 and rounds(1025) == 11 and rounds(1) == 0


PATIENCE_SECONDS = 240.0


def two_ranks() -> list[Any]:
    barrier, board = threading.Barrier(2), [None, None]
    return [ThreadRanks(Place(rank=rank, world_size=2), barrier=barrier, board=board) for rank in range(2)]


def other(ranks: Any, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=while_others_wait, args=(ranks, work), daemon=True)
    thread.start()
    return thread


def test_the_others_wait_in_turns_until_it_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "_TURN_SECONDS", 0.001)
    main, second = two_ranks()
    turns, enough = [0], threading.Event()
    exchange = second.gather_objects

    def counted(value: object) -> list[object]:
        turns[0] += 1
        if turns[0] == 3:
            enough.set()
        return exchange(value)

    second.gather_objects = counted
    thread = other(second, lambda: pytest.fail("rank 0 alone works"))
    done: list[bool] = []

    def work() -> None:
        assert enough.wait(PATIENCE_SECONDS) and thread.is_alive()  # several turns have passed in one piece of work
        done.append(True)

    while_others_wait(main, work)
    thread.join(PATIENCE_SECONDS)
    assert done == [True] and not thread.is_alive() and turns[0] >= 3


def test_an_error_ends_the_others_wait_too():
    main, second = two_ranks()
    thread = other(second, lambda: None)
    with pytest.raises(ValueError, match="no such model"):
        while_others_wait(main, lambda: (_ for _ in ()).throw(ValueError("no such model")))
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_death_is_raised_when_the_work_is_done():
    def broken(value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    main = two_ranks()[0]
    main.gather_objects = broken
    done: list[bool] = []
    with pytest.raises(RuntimeError, match="closed by peer"):
        while_others_wait(main, lambda: done.append(True))
    assert done == [True]


def test_alone_it_is_a_call():
    ranks: Any = ThreadRanks(Place(), barrier=threading.Barrier(2), board=[None])
    while_others_wait(ranks, (done := list[bool]([True])).clear)
    assert not done
