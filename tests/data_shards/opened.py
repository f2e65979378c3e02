"""What a store hands out, read in full; and what it leaves lying about."""

import os

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


def parts(store: Store) -> list[str]:
    assert store.cache is not None
    return [path.name for path in store.cache.folder.glob("*.part")] if store.cache.folder.exists() else []
