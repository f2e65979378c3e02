"""What a store hands out, read in full; what it leaves lying about; and waiting for what others do."""

import os
import time
from collections.abc import Callable

from data_shards.shard_set import ShardEntry
from data_shards.store.store import Store


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


def assert_attempts(requests: int, *, faults: list[str], waits: list[float]) -> None:
    """One request for each fault and one more, a wait between two."""
    if any(fault.startswith("stall") for fault in faults):
        # An answer that is merely slow counts as stalled, too; whoever asks again has waited before.
        assert len(faults) < requests <= len(waits) + 1
    else:
        assert requests == len(waits) + 1 == len(faults) + 1


def parts(store: Store) -> list[str]:
    assert store.cache is not None
    return [path.name for path in store.cache.folder.glob("*.part")] if store.cache.folder.exists() else []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)
