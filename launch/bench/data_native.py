"""One measured run of our loader with threads; marks `go` and `end` with CPU time, faults and native work.

Started as `python -m shardvit.launch.bench.data_native` by `data_threads`. Native work is nvImageCodec's decode and
torch's resize, both of which release the GIL; each call is timed in its thread, or replaced by a sleep.
"""

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardvit.data_shards.images import decode_nvimgcodec, resizing
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from shardvit.data_shards.order.mixture import make_order
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from shardvit.launch.bench import data_ours
from shardvit.launch.bench.data_methods import BATCH_IMAGES
from shardvit.launch.bench.measure import Teller


class NativeWork:
    """Times or replaces the loader's native calls, from any thread; `sleep_us`: decode and resize of an image."""

    def __init__(self, sleep_us: tuple[float, float] | None) -> None:
        self._sleep_us, self._lock = sleep_us, threading.Lock()
        self.decode_seconds = self.resize_seconds = 0.0
        self.pixels = 0
        make_decoder, find_kernel = decode_nvimgcodec._decoder, resizing._torch_kernel
        decode_nvimgcodec._decoder = lambda device: self._decoder(make_decoder(device))
        resizing._torch_kernel = lambda *names: (self._kernel(find_kernel(*names)[0]), find_kernel(*names)[1])

    def marks(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("decode_seconds", "resize_seconds", "pixels")}

    def _decoder(self, made: Any) -> Any:
        work = self

        class Timed:
            library, params = made.library, made.params

            class decoder:
                @staticmethod
                def decode(streams: Any, params: Any) -> Any:
                    if work._sleep_us is not None:
                        time.sleep(work._sleep_us[0] * len(streams) / 1e6)
                        return [_SMALL] * len(streams)
                    before = time.thread_time()
                    images = made.decoder.decode(streams, params=params)
                    work._add("decode_seconds", time.thread_time() - before)
                    work._add("pixels", sum(image.shape[0] * image.shape[1] for image in images if image is not None))
                    return images

        return Timed

    def _kernel(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._sleep_us is not None:
                time.sleep(self._sleep_us[1] / 1e6)
                return None
            before = time.thread_time()
            found = kernel(*args, **options)
            self._add("resize_seconds", time.thread_time() - before)
            return found

        return timed

    def _add(self, name: str, value: float) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + value)


WORKER = "data-worker"  # name of the loader's threads
_SMALL = np.zeros((8, 8, 3), np.uint8)


def run(
    teller: Teller, *, location: str, cache: str, threads: int, batches: int, sleep_us: tuple[float, float] | None
) -> None:
    """Take `batches` batches after each thread has made one."""
    work = NativeWork(sleep_us)
    store = Store(CacheConfig(Path(cache)))
    shards = open_shards(location, store=store, report=lambda _: None)
    order = make_order([shards.shard_sizes], weights=None, **data_ours.ORDER)
    layout = Layout(rank=0, world_size=1, micro_batch_size=BATCH_IMAGES, accumulation_steps=1)
    stream = TrainBatches(Access(shards, store), order=order, transform=data_ours.OURS, layout=layout, seed=1)
    loader = TrainLoader(stream, stop_step=1 << 40, workers=threads, kind="thread")
    for _ in range(threads + 1):
        next(loader)
    teller.mark("go", **_usage(), **work.marks())
    for _ in range(batches):
        next(loader)
    teller.mark("end", **_usage(), **work.marks())
    loader.close()


def _usage() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "system_seconds": usage.ru_stime,
        "page_faults": usage.ru_minflt,
        "waited_seconds": sum(_waited_seconds(each.native_id) for each in threading.enumerate() if each.name == WORKER),
    }


def _waited_seconds(thread: int | None) -> float:
    """Time that a thread was ready to run and had no core."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    request: dict[str, Any] = json.loads(sys.argv[1])
    run(Teller(request.pop("descriptor")), **request)
