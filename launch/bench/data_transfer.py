"""One measured reader of a remote set; marks `ready` (imports done), `first` (batch) and `end`, with CPU seconds.

Started as `python -m shardvit.launch.bench.data_transfer` by `data_remote`. Nothing is decoded: a worker keeps the
length of each image and drops its bytes, so what is measured is the way from the store to a worker. Every reader makes
one pass in batches of 64, and begins without a cache.
"""

import json
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from shardvit.launch.bench.data_methods import BATCH_IMAGES
from shardvit.launch.bench.data_server import BUCKET
from shardvit.launch.bench.measure import Teller, tree_cpu_seconds

SHUFFLE_SAMPLES = 1000  # webdataset's buffer, as in the other bench


@dataclass(frozen=True)
class Remote:
    """Where a set lies, and a folder for its cache."""

    url: str
    endpoint: str
    names: Sequence[str]  # of its tars, in train/
    cache: Path
    workers: int

    @property
    def tars(self) -> list[str]:
        return [f"{self.url}/train/{name}" for name in self.names]


Start = Callable[[], Iterator[int]]  # imports are done before; yields images of each batch


def ours(remote: Remote) -> Start:
    """The training loader with its cache and prefetching, threads, reading without decoding."""
    from shardvit.data_shards.loading.assemble import Access
    from shardvit.data_shards.loading.loader import Layout, TrainBatches, TrainLoader
    from shardvit.data_shards.order.mixture import make_order
    from shardvit.data_shards.reading.opening import open_shards
    from shardvit.data_shards.reading.shard_reader import ShardReader
    from shardvit.data_shards.store.cache import CacheConfig
    from shardvit.data_shards.store.store import Store
    from shardvit.launch.bench import data_ours

    class Lengths(TrainBatches):
        def __getitem__(self, number: int) -> Any:
            refs, _ = self.plan(number)
            reader: ShardReader = self._assembler._reader
            places = zip(refs.shard.tolist(), refs.row.tolist(), strict=True)
            return [len(reader.read(shard, row=row).image) for shard, row in places]

    def start() -> Iterator[int]:
        store = Store(CacheConfig(remote.cache))
        shards = open_shards(f"{remote.url}/train", store=store, report=lambda _: None)
        order = make_order([shards.shard_sizes], weights=None, **data_ours.ORDER)
        layout = Layout(rank=0, world_size=1, micro_batch_size=BATCH_IMAGES, accumulation_steps=1)
        stream = Lengths(Access(shards, store), order=order, transform=data_ours.OURS, layout=layout, seed=0)
        steps = shards.num_samples // BATCH_IMAGES
        loader: Any = TrainLoader(stream, stop_step=steps, workers=remote.workers, kind="thread")
        with closing(loader):
            yield from (len(batch) for batch in loader)

    return start


def fsspec(remote: Remote) -> Start:
    """Tars streamed through `fsspec.open` with its default read-ahead, in DataLoader workers."""
    fsspec = import_module("fsspec")
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Images(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            assert worker is not None
            for url in remote.tars[worker.id :: worker.num_workers]:
                with fsspec.open(url, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                    for member in tar:
                        if member.name.endswith(".jpg"):
                            found = tar.extractfile(member)
                            assert found is not None
                            yield len(found.read())

    return lambda: map(len, DataLoader(Images(), batch_size=BATCH_IMAGES, num_workers=remote.workers, collate_fn=list))


def webdataset(remote: Remote) -> Start:
    """WebDataset and WebLoader: curl for HTTP, `aws s3 cp` for S3, as its documentation shows."""
    wds = import_module("webdataset")
    urls = [url if url.startswith("http") else f"pipe:aws s3 cp {url} -" for url in remote.tars]

    def start() -> Iterator[int]:
        samples = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(SHUFFLE_SAMPLES)
        samples = samples.to_tuple("jpg", "cls").map_tuple(len, int).batched(BATCH_IMAGES)
        return (len(lengths) for lengths, _ in wds.WebLoader(samples, batch_size=None, num_workers=remote.workers))

    return start


def mosaic(remote: Remote) -> Start:
    """MosaicML streaming in torch's DataLoader, its own format and default predownload."""
    streaming = import_module("streaming")
    from torch.utils.data import DataLoader

    class Images(streaming.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return len(super().__getitem__(at)["image"])

    def start() -> Iterator[int]:
        streaming.base.util.clean_stale_shared_memory()
        images = Images(remote=f"{remote.url}/mosaic", local=str(remote.cache), shuffle=True, batch_size=BATCH_IMAGES)
        yield from map(len, DataLoader(images, batch_size=BATCH_IMAGES, num_workers=remote.workers))

    return start


def plain(remote: Remote) -> Start:
    """Whole tars by GET on one connection, thrown away: what the server itself gives one connection."""
    bucket = "" if remote.url.startswith("http") else f"/{BUCKET}"

    def start() -> Iterator[int]:
        with closing(HTTPConnection(urlsplit(remote.endpoint).netloc, timeout=60)) as connection:
            for name in remote.names:
                connection.request("GET", f"{bucket}/train/{name}")
                response = connection.getresponse()
                while response.read(1 << 20):
                    pass
                yield 0

    return start


READERS: dict[str, Callable[[Remote], Start]] = {
    "plain": plain,
    "ours": ours,
    "fsspec": fsspec,
    "webdataset": webdataset,
    "mosaic": mosaic,
}

if __name__ == "__main__":
    request: dict[str, Any] = json.loads(sys.argv[1])
    teller, reader = Teller(request.pop("descriptor")), READERS[request.pop("reader")]
    start = reader(Remote(**{**request, "cache": Path(request["cache"])}))
    me = psutil.Process()
    teller.mark("ready", cpu_seconds=tree_cpu_seconds(me))
    images = 0
    for count in start():
        if not images:
            teller.mark("first")
        images += count
    teller.mark("end", cpu_seconds=tree_cpu_seconds(me), images=images)
