"""Read all that a store hands out, list what it leaves behind, and wait for other processes."""

import os
import time
from collections.abc import Callable

from data_shards.shards.shard_set import ShardEntry
from data_shards.store.store import Store
from tests.data_shards.http_server import FaultServer

MakeTar = Callable[..., bytes]
MakeEntry = Callable[..., ShardEntry]
StoreFor = Callable[[list[str]], tuple[Store, list[float]]]


def content_of(store: Store, entry: ShardEntry) -> bytes:
    """All bytes of a shard as the store opens it; its index must lead to them."""
    shard = store.open(entry)
    try:
        content = os.pread(shard.descriptor, os.fstat(shard.descriptor).st_size, 0)
        assert len(shard.index) == entry.num_samples
        labels = [os.pread(shard.descriptor, 1, int(offset)) for offset in shard.index.label_offset]
        assert labels == [b"0", b"1", b"2", b"3"]
        return content
    finally:
        os.close(shard.descriptor)


def assert_attempts(server: FaultServer, path: str, *, faults: list[str], waits: list[float]) -> None:
    """Every fault was met, and whoever asked again after one had waited before; ranges may be asked for without."""
    assert not server.faults[path] and server.count(path) >= len(faults)
    if not any(fault.startswith("stall") for fault in faults):  # an answer that is merely slow counts as stalled, too
        assert 1 <= len(waits) <= len(faults)


def parts(store: Store) -> list[str]:
    assert store.cache is not None
    return [path.name for path in store.cache.folder.glob("*.part")] if store.cache.folder.exists() else []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)
