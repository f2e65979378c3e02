"""Read all that a store hands out, list what it leaves behind, and wait for other processes."""

import hashlib
import io
import os
import random
import tarfile
import time
from collections.abc import Callable

from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.store.store import RetryPolicy, Store
from tests.data_shards.http_server import FaultServer

StoreFor = Callable[[list[str]], tuple[Store, list[float]]]

# Faults are waited out here, too, but not for minutes. What a slow machine takes for an answer is no fault.
QUICK = RetryPolicy(
    first_delay_seconds=0.01,
    most_delay_seconds=0.02,
    give_up_seconds=240.0,
    wrong_attempts=3,
    connect_timeout_seconds=240.0,
    stall_timeout_seconds=240.0,
)


def make_tar(seed: int, *, num_bytes: int = 100_000, key: str = "k") -> bytes:
    """Make a tar with four samples, about that large."""
    draw = random.Random(seed)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number in range(4):
            for name, content in (("jpg", draw.randbytes(num_bytes // 4)), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{key}{number}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def make_entry(url: str, *, content: bytes | None = None, size: int | None = None) -> ShardEntry:
    """Make an entry that knows the digest of its content, or without it none."""
    num_bytes, sha256 = (size, "") if content is None else (len(content), hashlib.sha256(content).hexdigest())
    name = url.rpartition("/")[2]
    return ShardEntry(url, name, num_samples=4, num_bytes=num_bytes, sha256=sha256, index=None, labels=LabelSpec())


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
