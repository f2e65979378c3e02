"""The ranks meet without anybody choosing a port, a missing one is named; which GPU a process takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_shards.errors import UserError
from pipeline.ranks import group
from pipeline.ranks.group import ADDRESS_FILE, PeerGone, Ranks, join_group
from pipeline.ranks.place import Place

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import sys, time
from pathlib import Path
import torch
from pipeline.ranks.place import Place
from pipeline.ranks.group import Ranks
rank, world_size, folder, delay = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
time.sleep(delay)
place = Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=folder)
ranks = Ranks(place, timeout_seconds=240)
print(ranks.gather(torch.tensor([rank + 0.5])).flatten().tolist(), flush=True)
ranks.leave()
"""


def start(folder: Path, *, ranks: int, first_is_late: bool) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(ranks), str(folder), str(int(first_is_late and rank == 0))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("first_is_late", [False, True])
def test_two_runs_that_begin_at_the_same_moment_do_not_meet(tmp_path: Path, first_is_late: bool):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [start(tmp_path / name, ranks=ranks, first_is_late=first_is_late) for name, ranks in (("a", 2), ("b", 3))]
    try:
        outputs = [[process.communicate(timeout=240)[0] for process in run] for run in runs]
    finally:
        for process in (process for run in runs for process in run):
            process.kill()
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
from data_shards.errors import UserError
from pipeline.ranks import group
from pipeline.ranks.place import Place
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
assert ranks.start_any(rank == 1, False).result() == (True, False)
ranks.barrier()
print("well", flush=True)
ranks.leave()
"""


def test_ranks_that_connect_when_they_first_talk_exchange_the_same(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GREETING, str(rank), "5", str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(5)
    ]
    try:
        assert [rank.communicate(timeout=240)[0] for rank in ranks] == ["well\n"] * 5
    finally:
        for rank in ranks:
            rank.kill()
