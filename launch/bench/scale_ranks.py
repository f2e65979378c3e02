"""Measures of `launch.bench.scale`: heartbeats, the death of a rank, exchanges between ranks. Ranks are threads.

Code that asks for the machine gets the thread's simulated host; audit events count file operations. Exchanges use gloo
over TCP here: counts of messages and connections are exact, milliseconds are those of many threads on few cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from shardvit.launch.bench.scale import HOSTS, RANKS, Row
from shardvit.pipeline.ranks import dead_ranks as gone
from shardvit.pipeline.ranks import heartbeat
from shardvit.pipeline.ranks.dead_ranks import report_gone
from shardvit.pipeline.ranks.group import gather_rows, rounds
from shardvit.pipeline.ranks.heartbeat import Heartbeat, read_heartbeat, write_heartbeat
from shardvit.pipeline.ranks.place import Log, Place
from shardvit.pipeline.ranks.process import process_started

_ATTEMPT = "simulated"
_SIMULATED = 64
_GLOO: Any = ProcessGroupGloo  # torch's stub lacks its options and messages
_TIMES = 5
_GATHERS_AT_A_LOG_POINT = 4  # damaged images' lengths and notes; losses; each rank's own seconds
_EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename")
_counts: list[Counter] = []
_of_thread = threading.local()


class Counter:
    """Count of file operations below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.operations = 0

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and str(arguments[0]).startswith(self._folder):
            self.operations += 1  # safe under the GIL: no other Python runs during an audit hook


@contextmanager
def counting(folder: Path) -> Iterator[Counter]:
    """Count this process's file operations below a folder."""
    if not _counts:
        sys.addaudithook(lambda event, arguments: [each.see(event, arguments) for each in _counts] and None)
    counter = Counter(folder)
    _counts.append(counter)
    try:
        yield counter
    finally:
        _counts[_counts.index(counter)] = Counter(Path("/nowhere at all"))  # audit hooks cannot be removed


class _OwnLock:
    """One lock per simulated process, as real processes have."""

    def acquire(self, blocking: bool = True) -> bool:
        first, _of_thread.has_spoken = not getattr(_of_thread, "has_spoken", False), True
        return first


def _machine() -> str:
    return getattr(_of_thread, "machine", "the bench's own")


def beat_of(rank: int, *, per_host: int, **changes: Any) -> Heartbeat:
    """A living rank's heartbeat; its PID is this process's."""
    beat = Heartbeat(
        rank=rank,
        attempt=_ATTEMPT,
        host=f"node{rank // per_host}",
        machine=f"machine {rank // per_host}",
        pid=os.getpid(),
        started=process_started(os.getpid()) or 0.0,
        main_thread=0,
        sequence=1,
        step=412,
        turn=0,
        status="the backward pass",
        idle_seconds=0.0,
        waiting=False,
    )
    return replace(beat, **changes)


@dataclass(frozen=True)
class Death:
    """Consequences of one rank's death."""

    operations: int  # on files of STAGE/ranks, all ranks together
    said: tuple[str, ...]  # by all ranks
    hosts: int


def simulate_death(*, hosts: int, per_host: int, victim: int, log: Log) -> Death:
    """Kill one rank; all others leave their watch and report simultaneously."""
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name), list[str]()
        ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        dead = {"pid": ended.pid, "started": process_started(ended.pid)}
        ended.communicate()
        for rank in range(hosts * per_host):
            write_heartbeat(folder, beat_of(rank, per_host=per_host, **(dead if rank == victim else {})))
        (folder / "news.json").touch()
        begin = threading.Barrier(hosts * per_host - 1)

        def live(rank: int) -> None:
            _of_thread.machine = f"machine {rank // per_host}"
            begin.wait()
            write_heartbeat(folder, beat_of(rank, per_host=per_host, state="left"))  # as its watch would
            place = Place(rank, hosts * per_host, rank % per_host, per_host, log=log)
            report_gone(folder, place=place, say=said.append)

        with (
            patch.object(heartbeat, "this_machine", _machine),
            patch.object(gone, "this_machine", _machine),
            patch.object(gone, "first_word", _OwnLock()),
            counting(folder) as counter,
        ):
            _in_threads(live, [rank for rank in range(hosts * per_host) if rank != victim])
        return Death(counter.operations, tuple(said), hosts)


def _in_threads(call: Callable[[int], None], ranks: Iterable[int]) -> None:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def death() -> list[Row]:
    """Measure the death of one of 1,024 ranks."""
    threading.stack_size(256 * 1024)
    told = simulate_death(hosts=HOSTS, per_host=RANKS // HOSTS, victim=517, log="of the run")
    knowing = sum("rank 517 (host node64" in sentence for sentence in told.said)
    return [
        Row(
            "file operations when one rank dies",
            "> 10^6 (every rank reads 1,024 heartbeats 10 times a second for up to 3 s)",
            f"{told.operations:,}; lines in the log of the run: {len(told.said)}, that name the rank: {knowing}",
            "<= 10,000",
            f"{RANKS - 1:,} threads leave their watch and call report_gone at the same moment, in one folder "
            "(one log for all hosts, as under SLURM).",
        )
    ]


def heartbeats() -> list[Row]:
    """Measure every rank writing, and one reading all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beats = [beat_of(rank, per_host=RANKS // HOSTS) for rank in range(RANKS)]
        for beat in beats:
            write_heartbeat(folder, beat)
        start = time.process_time()
        for beat in beats:  # in place, like every heartbeat but the first
            write_heartbeat(folder, beat)
        written = time.process_time()
        whole = sum(read_heartbeat(folder, rank, attempt=_ATTEMPT) == beats[rank] for rank in range(RANKS))
        read = time.process_time()
    assert whole == RANKS, "a heartbeat was not read as it was written"
    return [
        Row(
            "1,024 heartbeats: write / read all, CPU s",
            "0.11 / 0.07",
            f"{written - start:.2f} / {read - written:.2f}",
            "",
            "One process writes and reads 1,024 files; a rank writes one every 32 s, and reads its host's 7.",
        )
    ]


def exchanges() -> list[Row]:
    """Compare Bruck's exchange with gloo's ring between 64 ranks."""
    now = _measure_exchange("when needed", lambda group, mine: gather_rows(group, mine, tag=1))
    ring = _measure_exchange("at once", _ring)
    hops, before_hops = _GATHERS_AT_A_LOG_POINT * rounds(RANKS), _GATHERS_AT_A_LOG_POINT * (RANKS - 1)
    simulated = f"{_SIMULATED} ranks as threads; for {RANKS:,} ranks calculated from the algorithms."
    return [
        Row(
            "messages one after another at a log point",
            f"{before_hops:,}",
            f"{hops}",
            "",
            f"Four gathers: damaged images (lengths, notes), losses, paces. {simulated} Between {_SIMULATED}: a gather "
            f"takes {rounds(_SIMULATED)} instead of {_SIMULATED - 1}, and {now[1]:.1f} ms of CPU a rank instead of "
            f"{ring[1]:.1f}.",
        ),
        Row(
            "connections of a rank in the host's group",
            f"{RANKS - 1:,}",
            f"{2 * rounds(RANKS)}",
            "",
            f"{simulated} Between {_SIMULATED} after a gather: {now[0]:.0f} descriptors a rank instead of "
            f"{ring[0]:.0f}.",
        ),
    ]


def _ring(group: Any, mine: torch.Tensor) -> torch.Tensor:
    everyone = [[torch.empty_like(mine) for _ in range(_SIMULATED)]]
    group.allgather(everyone, [mine]).wait()
    return torch.stack(everyone[0])


def _measure_exchange(connects: str, gather: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """File descriptors per rank, and CPU milliseconds per rank and gather."""
    store, groups = HashStore(), dict[int, Any]()
    before = len(os.listdir("/proc/self/fd"))

    def join(rank: int) -> None:
        options = _GLOO._Options()
        options._devices = [_GLOO.create_default_device(lazy_init=connects == "when needed")]
        options._timeout = timedelta(seconds=300)
        options._threads = 1
        groups[rank] = _GLOO(PrefixStore(connects, store), rank, _SIMULATED, options)

    def exchange(rank: int) -> None:
        for _ in range(_TIMES):
            rows = gather(groups[rank], torch.tensor([float(rank)], dtype=torch.float64))
            assert rows.flatten().tolist() == list(range(_SIMULATED)), "a value was lost"

    _in_threads(join, range(_SIMULATED))
    _in_threads(exchange, range(_SIMULATED))  # connect before timing
    descriptors = (len(os.listdir("/proc/self/fd")) - before) / _SIMULATED
    start = time.process_time()
    _in_threads(exchange, range(_SIMULATED))
    return descriptors, (time.process_time() - start) * 1000 / _TIMES / _SIMULATED
