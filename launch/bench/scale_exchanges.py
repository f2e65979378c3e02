"""Measures of `launch.bench.scale`: exchanges of small values between ranks over gloo, and the connections they need.

Ranks are threads of one process, each with a gloo group of its own that meets the others in a store in memory; messages
go over TCP on this machine. Their number and that of connections are exact; milliseconds are those of so many threads
on few cores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from launch.bench.scale_rows import RANKS, Row
from pipeline.ranks.group import gather_rows, rounds

_SIMULATED = 64
_GLOO: Any = ProcessGroupGloo  # torch's stub knows neither its options nor its messages
_TIMES = 5
_GATHERS_AT_A_LOG_POINT = 4  # lengths and notes of damaged images; losses; each rank's own seconds


def exchanges() -> list[Row]:
    """Bruck's exchange beside gloo's ring, between 64 ranks."""
    now = _measure("when needed", lambda group, mine: gather_rows(group, mine, tag=1))
    ring = _measure("at once", _ring)
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


def _measure(connects: str, gather: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """Descriptors a rank, and milliseconds of CPU that a gather takes a rank."""
    store, groups = HashStore(), dict[int, Any]()
    before = _descriptors()

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

    _all(join)
    _all(exchange)  # the first time connects
    descriptors = (_descriptors() - before) / _SIMULATED
    start = time.process_time()
    _all(exchange)
    return descriptors, (time.process_time() - start) * 1000 / _TIMES / _SIMULATED


def _all(call: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(_SIMULATED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
