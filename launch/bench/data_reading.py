"""Reading without decoding, in this process, from the page cache: our reader in the stream's order, and webdataset.

webdataset's iterator gives the shards' samples in their order, `webdataset-shuffled` has its buffer of 1,000 samples
besides; both count from the first sample, so their start is in it. Ours is the reader in shuffled order with its
indexes read; what the planning of that order costs, with the crops' random numbers, is told apart. `pread` is what the
kernel takes for copying the same images' bytes in the same order, and nothing else: the limit of a reader that hands
over bytes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_SHUFFLE_SAMPLES = 1000


def measure_reading(folder: Path, *, samples: int, rounds: int) -> dict[str, list[float]]:
    """CPU microseconds per sample of each way to read, one number a round.

    Args:
        folder: a packed set.
        samples: how many are read in a round; at most as many as there are.
        rounds: in which the ways take turns.
    """
    from data_shards.reading.opening import open_shards
    from data_shards.reading.shard_reader import ShardReader
    from data_shards.shards.tar_index import open_index
    from launch.bench.data_ours import shuffled_places, stream_of

    shards = open_shards(str(folder), report=lambda _: None)
    reader, places = ShardReader(shards), shuffled_places(stream_of(shards), samples=samples)
    for number in range(len(shards.shards)):
        reader.read(number, row=0)

    def ours() -> None:
        for shard, row in places:
            reader.read(shard, row=row)

    indexes = [open_index(Path(shard.url)) for shard in shards.shards]
    descriptors = [os.open(shard.url, os.O_RDONLY | os.O_CLOEXEC) for shard in shards.shards]
    where = [
        (descriptors[shard], int(indexes[shard].image_size[row]), int(indexes[shard].image_offset[row]))
        for shard, row in places
    ]

    def pread() -> None:
        for descriptor, size, offset in where:
            os.pread(descriptor, size, offset)

    def planning() -> None:
        shuffled_places(stream_of(shards), samples=samples)

    ways: dict[str, Callable[[], object]] = {
        "webdataset": lambda: _exhaust(_webdataset(folder), samples=samples),
        "webdataset-shuffled": lambda: _exhaust(_webdataset(folder).shuffle(_SHUFFLE_SAMPLES), samples=samples),
        "ours": ours,
        "pread": pread,
        "planning": planning,
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            before = time.process_time()
            way()
            spent[name].append(1e6 * (time.process_time() - before) / samples)
    for descriptor in descriptors:
        os.close(descriptor)
    return spent


def _webdataset(folder: Path) -> Any:
    return import_module("webdataset").WebDataset(
        [str(path) for path in sorted(folder.glob("*.tar"))], shardshuffle=False, empty_check=False
    )


def _exhaust(samples_of: Any, *, samples: int) -> None:
    stream: Iterator[Any] = itertools.islice(iter(samples_of), samples)
    for _ in stream:
        pass
