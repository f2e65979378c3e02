"""The cache's laws: never more than the limit, never a partial shard, right bytes for who has it open, first come."""

import errno
import multiprocessing
import os
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_index import ShardIndex, Texts
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.store import cache as cache_module
from shardvit.data_shards.store.cache import Cache, CacheConfig, CacheFull, is_evicted, touch
from shardvit.data_shards.store.store import Store, StoreError
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK, make_entry, make_tar

NAMES = [f"shard{number}-{number:032x}" for number in range(20)]


def put(cache: Cache, name: str, *, num_bytes: int, is_known: bool = True, evict: str = "any") -> int:
    """A shard of `num_bytes`; its descriptor."""
    part = cache.begin(name, evict=evict)  # type: ignore[arg-type]
    assert part is not None
    with part:
        part.begin(num_bytes=num_bytes if is_known else None)
        for start in range(0, num_bytes, 1000):
            part.write(b"x" * min(1000, num_bytes - start))
        part.finish()
        return part.publish()


def present(cache: Cache) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in cache.config.folder.glob("*.tar"))


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def age(cache: Cache, name: str, *, seconds: float) -> None:
    os.utime(cache.config.folder / f"{name}.tar", (time.time() - seconds,) * 2)


def test_the_least_recently_used_goes_first_and_a_touch_saves(tmp_path: Path):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=3500))
    descriptors = [put(cache, NAMES[number], num_bytes=1000) for number in range(3)]
    for number in range(3):
        age(cache, NAMES[number], seconds=30 - number)
    touch(descriptors[0])
    opened = cache.open(NAMES[1], num_bytes=1000)
    descriptors.append(put(cache, NAMES[3], num_bytes=1000))
    assert present(cache) == ["shard0", "shard1", "shard3"]
    assert [is_evicted(descriptor) for descriptor in descriptors] == [False, False, True, False]
    assert opened is not None and not is_evicted(opened)
    assert os.pread(descriptors[2], 2000, 0) == b"x" * 1000
    assert cache.open(NAMES[2], num_bytes=1000) is None
    for descriptor in [*descriptors, opened]:
        os.close(descriptor)


@pytest.mark.parametrize("is_known", [True, False], ids=["size known", "size unknown"])
def test_the_limit_holds_for_any_sizes_with_parts_and_indexes(tmp_path: Path, is_known: bool):
    limit = 50_000
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=limit))
    draw = random.Random(0)
    zeros = np.zeros(4, dtype=np.int64)
    tars: set[str] = set()
    index = ShardIndex(Texts.of("abcd"), Texts.of(["jpg"] * 4), zeros, zeros, zeros, zeros)
    for _ in range(60):
        name = draw.choice(NAMES)
        descriptor = cache.open(name, num_bytes=None)
        if descriptor is None:
            descriptor = put(cache, name, num_bytes=draw.randrange(1, 12_000), is_known=is_known)
            assert total_bytes(tmp_path / "cache") <= limit
            cache.save_index(index, name, label="cls", evict="any")
        os.close(descriptor)
        assert total_bytes(tmp_path / "cache") <= limit
        tars = {path.stem for path in (tmp_path / "cache").glob("*.tar")}
        assert {path.name.removesuffix(".cls.npz") for path in (tmp_path / "cache").glob("*.npz")} <= tars
    assert len(tars) > 1
    kept = [name for name in sorted(tars) if cache.load_index(name, label="cls") is not None]
    assert kept and list(cache.load_index(kept[0], label="cls").keys) == list(index.keys)


def test_a_shard_larger_than_the_limit_is_the_users_mistake(tmp_path: Path):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=3000))
    for is_known in (True, False):
        with pytest.raises(UserError, match=r"data\.cache\.limit is 3 kB, but one shard alone needs [45] kB"):
            put(cache, NAMES[0], num_bytes=5000, is_known=is_known)
    assert list((tmp_path / "cache").glob("shard*")) == []


def test_what_waits_for_room_evicts_nothing_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_module, "IDLE_SECONDS", 3600.0)  # a slow disk may take 30 s for the next two lines
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=2500))
    for number in range(2):
        os.close(put(cache, NAMES[number], num_bytes=1000))
    with pytest.raises(CacheFull):
        put(cache, NAMES[2], num_bytes=1000, evict="idle")
    assert present(cache) == ["shard0", "shard1"]
    age(cache, NAMES[1], seconds=3601)
    os.close(put(cache, NAMES[2], num_bytes=1000, evict="idle"))
    assert present(cache) == ["shard0", "shard2"]


def test_a_reservation_counts_and_who_finds_no_room_waits_for_it(tmp_path: Path):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=2500))
    first = cache.begin(NAMES[0], evict="any")
    assert first is not None
    assert cache.begin(NAMES[0], evict="any") is None  # one writer
    first.begin(num_bytes=2000)
    second: list[int] = []
    thread = threading.Thread(target=lambda: second.append(put(cache, NAMES[1], num_bytes=1000)))
    thread.start()
    time.sleep(0.2)
    assert second == [] and total_bytes(tmp_path / "cache") == 2000
    with first:
        first.write(b"x" * 2000)
        first.finish()
        descriptor = first.publish()
    thread.join(timeout=240)
    assert present(cache) == ["shard1"] and is_evicted(descriptor)
    os.close(descriptor)
    os.close(second[0])


def test_parts_that_nobody_writes_and_indexes_without_a_shard_are_removed_and_nothing_else(tmp_path: Path):
    folder = tmp_path / "cache"
    cache = Cache(CacheConfig(folder=folder, limit_bytes=2500))
    folder.mkdir()
    mine = [f"{NAMES[0]}.tar.part", f"{NAMES[1]}.cls.npz", f".{NAMES[1]}.cls.npz.123.tmp"]
    others = ["thesis.tar", "thesis.tar.part", "x.npz", f"{NAMES[0]}.tar.part.bak"]
    for name in mine + others:
        (folder / name).write_bytes(b"x" * 5000)
        os.utime(folder / name, (0, 0))
    held = cache.begin(NAMES[3], evict="any")
    assert held is not None
    with held:
        os.close(put(cache, NAMES[2], num_bytes=1000))
        assert (folder / f"{NAMES[3]}.tar.part").exists()
    assert {path.name for path in folder.iterdir()} == {*others, f"{NAMES[2]}.tar", "cache.lock"}


def test_a_shard_of_the_wrong_size_is_no_shard(tmp_path: Path):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=2500))
    os.close(put(cache, NAMES[0], num_bytes=1000))
    os.truncate(tmp_path / "cache" / f"{NAMES[0]}.tar", 999)
    assert cache.open(NAMES[0], num_bytes=1000) is None
    assert present(cache) == []


def test_a_broken_index_is_built_anew(tmp_path: Path, server: FaultServer):
    server.files["/a.tar"] = make_tar(0)
    store = Store(CacheConfig(folder=tmp_path / "cache", limit_bytes=10**7))
    entry = make_entry(f"{server.url}/a.tar", content=make_tar(0))
    store.prefetch(entry)
    (path,) = (tmp_path / "cache").glob("*.npz")
    content = path.read_bytes()
    at = content.index(b"k0k1k2k3")
    path.write_bytes(content[:at] + b"X" + content[at + 1 :])
    shard = store.open(entry)
    assert list(shard.index.keys) == ["k0", "k1", "k2", "k3"]
    os.close(shard.descriptor)
    assert server.count("/a.tar") == 1


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"file/cache cannot be used .*data\.cache\.folder"):
        Cache(CacheConfig(folder=tmp_path / "file" / "cache", limit_bytes=10)).begin(NAMES[0], evict="any")


# ---- a full disk ---------------------------------------------------------------------------------------------------


class Disk:
    """A disk of a few kilobytes: what is reserved, or written, beyond that fails as the kernel has it."""

    def __init__(self, folder: Path, *, num_bytes: int, can_reserve: bool) -> None:
        self.folder, self.num_bytes, self.can_reserve = folder, num_bytes, can_reserve
        self._pwrite = os.pwrite

    def used(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if not self.can_reserve:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        if self.used() + length > self.num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        if self.used() + len(content) > self.num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._pwrite(descriptor, content, offset)


@pytest.fixture(params=[True, False], ids=["can reserve", "cannot reserve"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "cache", num_bytes=40_000, can_reserve=request.param)
    monkeypatch.setattr(cache_module.os, "posix_fallocate", disk.posix_fallocate)
    monkeypatch.setattr(cache_module.os, "pwrite", disk.pwrite)
    monkeypatch.setattr(cache_module, "_FULL_POLL_SECONDS", 0.001)
    return disk


def test_a_full_disk_is_relieved_by_evicting(tmp_path: Path, disk: Disk):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=10**6))
    for number in range(6):
        os.close(put(cache, NAMES[number], num_bytes=16_000))
        if number:
            assert present(cache)[-1] == f"shard{number}"
        age(cache, NAMES[number], seconds=60 - number)
    assert len(present(cache)) == 2


def test_a_full_disk_that_cannot_be_relieved_is_an_error_that_says_so_and_leaves_nothing(tmp_path: Path, disk: Disk):
    cache = Cache(CacheConfig(folder=tmp_path / "cache", limit_bytes=10**6))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_bytes(b"x" * 30_000)
    with pytest.raises(
        StoreError, match=r"data\.cache\.folder, .*, is full: 20 kB are needed for one shard; free some space"
    ):
        put(cache, NAMES[0], num_bytes=20_000)
    with pytest.raises(CacheFull):
        put(cache, NAMES[0], num_bytes=20_000, evict="idle")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"thesis.txt", "cache.lock"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_full_disk(small_disk: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch):
    store = Store(CacheConfig(folder=small_disk / "cache", limit_bytes=10**9), retry=QUICK)
    entries = []
    for number in range(6):
        content = server.files[f"/{number}.tar"] = make_tar(number, num_bytes=300_000)
        entries.append(make_entry(f"{server.url}/{number}.tar", content=content))
    for number in [0, 1, 2, 3, 4, 5, 0]:
        shard = store.open(entries[number])
        assert os.pread(shard.descriptor, 10**6, 0) == server.files[f"/{number}.tar"]
        os.close(shard.descriptor)
    assert server.count("/0.tar") == 2
    monkeypatch.setattr(cache_module, "_FULL_POLL_SECONDS", 0.001)
    content = server.files["/large.tar"] = make_tar(9, num_bytes=1_200_000)
    with pytest.raises(StoreError, match=r"is full: .*free some space"):
        store.open(make_entry(f"{server.url}/large.tar", content=content))
    assert list((small_disk / "cache").glob("*.part")) == []


# ---- several processes ---------------------------------------------------------------------------------------------


def read_many(
    folder: Path, entries: list[ShardEntry], seed: int, together: Barrier, results: "multiprocessing.Queue[str]"
) -> None:
    """Read samples in any order, some shards open all the while, and compare each with what must come."""
    import hashlib

    store = Store(CacheConfig(folder=folder, limit_bytes=500_000))
    draw = random.Random(seed)
    opened: deque[tuple[int, ShardEntry]] = deque()
    evicted = 0
    for _ in range(60):
        together.wait(240)  # else one may be through before the other has begun, and evicts nothing under it
        if len(opened) < 4:
            entry = draw.choice(entries)
            opened.append((store.open(entry).descriptor, entry))
        descriptor, entry = draw.choice(opened)
        content = os.pread(descriptor, 10**6, 0)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            results.put(f"wrong bytes of {entry.url}")
            together.abort()
            return
        evicted += is_evicted(descriptor)
        if draw.random() < 0.3:
            os.close(opened.popleft()[0])
    results.put(f"right {evicted}")


def test_readers_get_right_bytes_while_shards_are_evicted_under_them(server: FaultServer, tmp_path: Path):
    entries = []
    for number in range(12):
        content = server.files[f"/{number}.tar"] = make_tar(number)
        entries.append(make_entry(f"{server.url}/{number}.tar", content=content))
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(2), context.Queue()
    args = [(tmp_path / "cache", entries, seed, together, results) for seed in range(2)]
    processes = [context.Process(target=read_many, args=each) for each in args]
    for process in processes:
        process.start()
    words = [results.get(timeout=240).split() for _ in processes]
    for process in processes:
        process.join()
    results.close()
    results.join_thread()
    assert [word for word, *_ in words] == ["right"] * 2, words
    assert sum(int(count) for _, count in words) > 0  # some were read after they had been evicted
    assert total_bytes(tmp_path / "cache") <= 500_000
    assert sum(server.totals().values()) > len(entries)


def test_a_container_user_without_a_name_has_a_cache_folder_too(monkeypatch: pytest.MonkeyPatch):
    def no_name() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_name)
    assert cache_module.default_cache_folder().name == f"shardvit-cache-{os.getuid()}"
