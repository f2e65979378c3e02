"""Prefetching: ahead but not too far, never at the expense of what is nearer, quiet about errors, gone at once."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet, ShardTable
from shardvit.data_shards.store import cache as cache_module
from shardvit.data_shards.store import prefetch as prefetch_module
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.prefetch import Prefetcher, start_prefetch
from shardvit.data_shards.store.store import MissingObject, Store
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK, make_entry, make_tar, wait_until

COUNT = 10
SIZE = 115_000  # of a shard, roughly; with its index


@pytest.fixture
def entries(server: FaultServer) -> list[ShardEntry]:
    for number in range(COUNT):
        server.files[f"/{number}.tar"] = make_tar(number)
    return [make_entry(f"{server.url}/{number}.tar", content=make_tar(number)) for number in range(COUNT)]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for a busy machine: threads may end late, and what was just used stays in use."""
    monkeypatch.setattr(prefetch_module, "_CLOSE_SECONDS", 240.0)
    monkeypatch.setattr(cache_module, "IDLE_SECONDS", 3600.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def one_shard_a_step() -> Iterator[tuple[int, list[int]]]:
    step = 0
    while True:
        yield step, [step % COUNT]
        step += 1


@contextlib.contextmanager
def prefetching(
    folder: Path, entries: list[ShardEntry], *, lookahead_bytes: int, limit_bytes: int = 20 * SIZE, **options: Any
) -> Iterator[Prefetcher]:
    store = Store(CacheConfig(folder=folder, limit_bytes=limit_bytes), **options)
    prefetcher = Prefetcher(store, entries, upcoming=one_shard_a_step(), lookahead_bytes=lookahead_bytes)
    try:
        yield prefetcher
    finally:
        prefetcher.close()


def is_here(folder: Path, number: int) -> bool:
    return any(folder.glob(f"{number}-*.tar"))


def test_it_stays_so_far_ahead_and_follows(server: FaultServer, folder: Path, entries: list[ShardEntry]):
    size = entries[0].num_bytes or 0
    with prefetching(folder, entries, lookahead_bytes=3 * size, retry=QUICK) as prefetcher:
        wait_until(lambda: is_here(folder, 2))
        time.sleep(0.3)
        assert not is_here(folder, 3)
        prefetcher.reached(2)  # steps 0 and 1 have their samples
        wait_until(lambda: is_here(folder, 4))
        time.sleep(0.3)
        assert not is_here(folder, 5)
        prefetcher.reached(8)
        wait_until(lambda: is_here(folder, 9))
    assert prefetcher.error is None
    assert not any(thread.is_alive() for thread in prefetcher._threads)
    assert not is_here(folder, 6)  # training came past it first
    assert max(server.totals().values()) == 1


def test_a_shard_larger_than_the_lookahead_is_fetched_alone(folder: Path, entries: list[ShardEntry]):
    with prefetching(folder, entries, lookahead_bytes=1):
        wait_until(lambda: is_here(folder, 0))
        time.sleep(0.2)
        assert not is_here(folder, 1)


def test_what_is_nearer_is_not_evicted_for_what_is_further(
    folder: Path, entries: list[ShardEntry], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefetch_module, "_NO_ROOM_SECONDS", 0.05)

    def is_here_once_idle(number: int, *, idle: int) -> bool:
        for path in folder.glob(f"{idle}-*.tar"):
            with contextlib.suppress(FileNotFoundError):  # evicted
                os.utime(path, (1, 1))  # again and again: it may have been about to mark it as wanted
        return is_here(folder, number)

    limit_bytes = 4 * SIZE + SIZE // 2
    with prefetching(folder, entries, lookahead_bytes=10 * SIZE, limit_bytes=limit_bytes) as prefetcher:
        wait_until(lambda: is_here(folder, 3))
        time.sleep(0.3)
        assert [is_here(folder, number) for number in range(6)] == [True] * 4 + [False] * 2
        prefetcher.reached(2)  # past the first two, which nobody has used for a while
        wait_until(lambda: is_here_once_idle(4, idle=0))  # each room goes to the nearest
        assert [is_here(folder, number) for number in range(6)] == [False] + [True] * 4 + [False]
        wait_until(lambda: is_here_once_idle(5, idle=1))
        assert [is_here(folder, number) for number in range(7)] == [False] * 2 + [True] * 4 + [False]


def test_what_is_ahead_stays_marked_as_wanted(folder: Path, entries: list[ShardEntry], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefetch_module, "TOUCH_SECONDS", 0.05)
    with prefetching(folder, entries, lookahead_bytes=2 * SIZE):
        wait_until(lambda: is_here(folder, 1))
        for path in folder.glob("*.tar"):
            os.utime(path, (1, 1))
        wait_until(lambda: all(path.stat().st_mtime > 1 for path in folder.glob("*.tar")))


def test_errors_are_left_to_the_reader_and_tried_again(
    server: FaultServer, folder: Path, entries: list[ShardEntry], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefetch_module, "_FIRST_DELAY_SECONDS", 0.01)
    server.faults["/0.tar"] = deque(["503", "cut:500"])
    missing = server.files.pop("/1.tar")
    with prefetching(folder, entries, lookahead_bytes=10 * SIZE, retry=QUICK) as prefetcher:
        wait_until(lambda: is_here(folder, 0) and isinstance(prefetcher.error, MissingObject))
        with pytest.raises(MissingObject, match=r"/1\.tar is not there"):
            Store(CacheConfig(folder=folder), retry=QUICK).open(entries[1])
        wait_until(lambda: is_here(folder, 2))  # it holds up no other
        server.files["/1.tar"] = missing
        wait_until(lambda: is_here(folder, 1))


def test_a_slow_shard_does_not_hold_up_the_next(server: FaultServer, folder: Path, entries: list[ShardEntry]):
    server.always["/0.tar"] = "stall:70000"
    with prefetching(folder, entries, lookahead_bytes=10 * SIZE):
        wait_until(lambda: is_here(folder, 3))
        assert not is_here(folder, 0)


def test_a_shard_that_another_process_is_fetching_does_not_hold_up_the_next(
    server: FaultServer, folder: Path, entries: list[ShardEntry]
):
    server.always["/0.tar"] = "stall:70000"
    with prefetching(folder, entries, lookahead_bytes=1):
        wait_until(lambda: server.count("/0.tar") >= 1)
        with prefetching(folder, entries, lookahead_bytes=10 * SIZE):
            wait_until(lambda: is_here(folder, 3))
            assert not is_here(folder, 0)


def test_close_ends_planning_that_finds_nothing_to_fetch(
    folder: Path, entries: list[ShardEntry], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefetch_module, "_MOST_STEPS_AHEAD", 10**12)
    prefetcher = Prefetcher(
        Store(CacheConfig(folder=folder)), entries, upcoming=((step, ()) for step in count()), lookahead_bytes=SIZE
    )
    monkeypatch.setattr(prefetch_module, "_CLOSE_SECONDS", 60.0)
    prefetcher.close()
    assert not any(thread.is_alive() for thread in prefetcher._threads)


def test_close_ends_a_transfer_that_is_under_way(server: FaultServer, folder: Path, entries: list[ShardEntry]):
    server.always["/0.tar"] = "stall:70000"  # which it would wait out for a minute
    with prefetching(folder, entries, lookahead_bytes=10 * SIZE) as prefetcher:
        wait_until(lambda: server.count("/0.tar") >= 1)
    assert not any(thread.is_alive() for thread in prefetcher._threads)
    assert list(folder.glob("shard*")) == list(folder.glob("*.part")) == []


def test_a_reader_waits_for_the_transfer_that_is_under_way(
    server: FaultServer, folder: Path, entries: list[ShardEntry]
):
    server.pause_seconds = 0.2
    with prefetching(folder, entries, lookahead_bytes=1):
        wait_until(lambda: server.count("/0.tar") >= 1)
        shard = Store(CacheConfig(folder=folder)).open(entries[0])
    assert os.pread(shard.descriptor, 10**6, 0) == server.files["/0.tar"]
    os.close(shard.descriptor)
    assert server.count("/0.tar") == 1


def test_an_error_while_planning_ends_only_the_prefetching(folder: Path, entries: list[ShardEntry]):
    def upcoming() -> Iterator[tuple[int, list[int]]]:
        yield 0, [0]
        raise RuntimeError("a mistake of ours")

    prefetcher = Prefetcher(
        Store(CacheConfig(folder=folder, limit_bytes=20 * SIZE)), entries, upcoming=upcoming(), lookahead_bytes=SIZE
    )
    wait_until(lambda: isinstance(prefetcher.error, RuntimeError) and is_here(folder, 0))
    prefetcher.reached(1)
    prefetcher.close()


def test_local_sets_need_none(tmp_path: Path):
    def upcoming() -> Iterator[tuple[int, list[int]]]:
        raise AssertionError("planned for nothing")
        yield 0, [0]

    entry, far = make_entry(str(tmp_path / "a.tar")), make_entry("http://127.0.0.1:1/a.tar")
    local = ShardSet("n", source="s", split="train", classes=("a",), shards=ShardTable.of_entries([entry]), digest="d")
    before = set(threading.enumerate())
    store = Store(CacheConfig(folder=tmp_path, limit_bytes=10**6))
    assert start_prefetch(store, local, upcoming=upcoming()) is None
    assert start_prefetch(None, local, upcoming=upcoming()) is None
    assert not {thread for thread in threading.enumerate() if thread.name == "shard-prefetch"} - before
    running = start_prefetch(
        store, replace(local, shards=ShardTable.of_entries([entry, far])), upcoming=one_shard_a_step()
    )
    assert running is not None
    running.close()
