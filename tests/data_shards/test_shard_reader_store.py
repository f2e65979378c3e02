"""A reader of shards that the store brings: the same samples, and what the cache evicts while it is in use."""

import pickle
import random
from pathlib import Path

import pytest

from shardvit.data_shards.errors import SampleError
from shardvit.data_shards.reading import shard_reader
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.store import Store
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK
from tests.data_shards.small_set import by_webdataset, needs_proc, open_files, pack_small, places


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return pack_small(tmp_path)


@pytest.fixture
def elsewhere(manifest: Manifest, server: FaultServer) -> str:
    server.files = {f"/{path.name}": path.read_bytes() for path in manifest.root.iterdir() if path.suffix != ".idx"}
    return server.url


def test_shards_of_another_machine_read_the_same(
    manifest: Manifest, elsewhere: str, server: FaultServer, tmp_path: Path
):
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=10**8), retry=QUICK)
    reader = ShardReader(open_shards(elsewhere, store=store), store=store)
    copy = pickle.loads(pickle.dumps(reader))
    for each in (reader, copy):
        assert [each.read(shard, row=row) for shard, row in places(manifest)] == by_webdataset(manifest)
    assert max(server.totals().values()) == 1
    assert elsewhere in reader.describe(0, row=0)


class Clock:
    """The reader's; it moves when it is told to, and with each download."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shard_reader, "time", clock)
    return clock


@needs_proc
def test_what_the_cache_evicts_is_closed_when_nobody_has_read_it_for_a_while(
    manifest: Manifest, elsewhere: str, tmp_path: Path, clock: Clock
):
    """Room for three shards: the disk has no more than that and what was read in the last seconds."""
    limit = 3 * max(path.stat().st_size for path in manifest.shard_paths)
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=limit), retry=QUICK)
    reader = ShardReader(open_shards(elsewhere, store=store), store=store)
    draw = random.Random(2)
    expected = by_webdataset(manifest)
    for _ in range(60):
        number = draw.randrange(30)
        shard, row = places(manifest)[number]
        assert reader.read(shard, row=row) == expected[number]
        clock.seconds += shard_reader.TOUCH_SECONDS + 0.1
        assert open_files(tmp_path / "cache") <= 4  # one more at most: the one that is read
    # While one shard alone is read, the others that another process evicts are let go as well.
    reader.read(0, row=0)
    for path in (tmp_path / "cache").glob("*.tar"):
        path.unlink()
    for _ in range(2):
        clock.seconds += shard_reader.TOUCH_SECONDS + 0.1
        assert reader.read(0, row=0) == expected[0]
    assert open_files(tmp_path / "cache") == 1


def test_an_evicted_shard_in_use_is_not_downloaded_again(
    manifest: Manifest, elsewhere: str, server: FaultServer, tmp_path: Path, clock: Clock,
    monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    """Room for two shards of the six that are read in turns, and downloads that take their time."""
    limit = 2 * max(path.stat().st_size for path in manifest.shard_paths)
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=limit), retry=QUICK)
    reader = ShardReader(open_shards(elsewhere, store=store), store=store)
    download = store.open

    def slow_download(entry: ShardEntry) -> object:
        clock.seconds += 10 * shard_reader.TOUCH_SECONDS
        return download(entry)

    monkeypatch.setattr(store, "open", slow_download)
    expected = by_webdataset(manifest)
    for _ in range(10):
        for number, (shard, row) in enumerate(places(manifest)):
            assert reader.read(shard, row=row) == expected[number]
            clock.seconds += 0.1
    assert max(server.totals().values()) == 1


@needs_proc
def test_a_full_disk_gets_back_what_was_evicted_before_the_reader_gives_up(
    manifest: Manifest, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=10**8), retry=QUICK)
    reader = ShardReader(open_shards(elsewhere, store=store), store=store)
    for shard in range(3):
        reader.read(shard, row=0)
    for path in (tmp_path / "cache").glob("*.tar"):
        path.unlink()
    download, held = store.open, []

    def full(entry: ShardEntry) -> object:
        held.append(open_files(tmp_path / "cache"))
        if held[-1]:
            raise StoreError("the disk is full")
        return download(entry)

    monkeypatch.setattr(store, "open", full)
    assert reader.read(3, row=0).labels and held == [3, 0]
    with pytest.raises(StoreError):  # nothing is evicted now
        reader.read(4, row=0)
    assert held == [3, 0, 1]


def test_a_shard_that_cannot_be_had_stops_with_its_name(elsewhere: str, server: FaultServer, tmp_path: Path):
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=10**8), retry=QUICK)
    shards = open_shards(elsewhere, store=store)
    name = shards.shards[1].name.rpartition("/")[2]
    del server.files[f"/{name}"]
    with pytest.raises(SampleError, match=name):
        ShardReader(shards, store=store).read(1, row=0)
