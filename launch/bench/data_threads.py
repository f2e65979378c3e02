"""`--threads` of the data benchmark: images/s of 1, 2, 4, ... decoding threads, and what would bound more of them.

Measured: our loader with as many threads as there are cores (with more only by --beyond-cores). Derived for more: each
thread's native work, which releases the GIL and would use a core of its own, is replaced by a sleep of the CPU time
that it takes, so that any number of threads run beside each other on few cores. The loader's Python, queues and locks
are the real ones and still share the cores here. Left out of that, and so bounded apart, are memory and the kernel.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardvit.data_shards.text import table
from shardvit.launch.bench.data_methods import BATCH_IMAGES, PIXELS
from shardvit.launch.bench.measure import child_environment, run_told

_TIMEOUT_SECONDS = 300.0
_BATCHES_A_THREAD = 12  # at least, after the warm-up
_COPY_BYTES, _COPIES = 1 << 26, 5
# How often each byte moves between processor and memory if no cache helps.
_MOVES_OF_FILE = 3  # read from the page cache, written, read by the decoder
_MOVES_OF_PIXELS = 3  # fetched and written by the decoder, read by the resize
_MOVES_OF_OUTPUT = 3  # fetched and written by the resize, read by whoever takes the batch


@dataclass(frozen=True)
class ThreadsRun:
    """Our loader with a number of threads, over a number of images; seconds of CPU are of the whole process."""

    threads: int
    images: int
    seconds: float
    cpu_seconds: float
    system_seconds: float  # of these, in the kernel
    decode_seconds: float  # CPU time in native code, without the GIL
    resize_seconds: float
    page_faults: float
    waited_seconds: float  # threads were ready and had no core, because of other programs if there are enough cores
    pixels: float  # decoded

    @property
    def images_per_second(self) -> float:
        """What it would be without waits for a core."""
        return self.images / (self.seconds - self.waited_seconds / self.threads)

    def ms(self, name: str) -> float:
        """Milliseconds an image of `cpu`, `system`, `decode`, `resize` or `python`, which is what is not native."""
        if name == "python":
            return self.ms("cpu") - self.ms("decode") - self.ms("resize")
        return 1000 * getattr(self, f"{name}_seconds") / self.images


@dataclass(frozen=True)
class Limits:
    """Bounds on any number of threads of one process, in images/s."""

    gil: float  # if all that is not native code held it: some of that is the kernel's, which does not
    memory: float  # at the bandwidth of copying on the cores here, if no cache helps
    kernel: float  # if one lock covered all of its work
    bytes_an_image: float


def efficiency(rates: Mapping[int, float]) -> dict[int, float]:
    """Images/s a thread, relative to one thread's."""
    return {threads: rate / threads / rates[1] for threads, rate in rates.items()}


def limits_of(one: ThreadsRun, *, file_bytes: float, copied_bytes_per_second: float) -> Limits:
    """Derive the bounds from a run of one thread and from how much is copied here (read and written) a second."""
    moved = _MOVES_OF_FILE * file_bytes + _MOVES_OF_PIXELS * 3 * one.pixels / one.images
    moved += _MOVES_OF_OUTPUT * 3 * PIXELS**2
    return Limits(1000 / one.ms("python"), copied_bytes_per_second / moved, 1000 / one.ms("system"), moved)


def likely_efficiency(slept: float, *, threads: int, one_rate: float, memory: float = math.inf) -> float:
    """Bound the efficiency of that many threads: `slept` is theirs with native work slept, `memory` in images/s."""
    return min(1.0, slept, memory / (threads * one_rate))


def copy_bytes_per_second(cores: int) -> float:
    """Bytes read and written a second by one copying thread a core, by CPU time: the best of a few times."""
    import numpy as np

    def copy() -> float:
        source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
        before = time.thread_time()
        for _ in range(_COPIES):
            np.copyto(target, source)
        return 2 * _COPIES * _COPY_BYTES / (time.thread_time() - before)

    with ThreadPoolExecutor(cores) as pool:
        return max(sum(pool.map(lambda _: copy(), range(cores))) for _ in range(_COPIES))


def split_threads(threads: Sequence[int], *, cores: int, beyond_cores: bool) -> tuple[list[int], list[int]]:
    """Numbers of threads to run, always with 1, and those to leave out for want of cores."""
    wanted = sorted({1, *threads})
    left_out = [] if beyond_cores else [number for number in wanted if number > cores]
    return [number for number in wanted if number not in left_out], left_out


@dataclass(frozen=True)
class Scaling:
    """Runs by number of threads: with native work done, and with it slept."""

    done: Mapping[int, ThreadsRun]
    slept: Mapping[int, ThreadsRun]
    left_out: Sequence[int]
    cores: int


def measure_threads(
    location: str,
    root: Path,
    *,
    threads: Sequence[int],
    images: int,
    rounds: int,
    cores: int,
    beyond_cores: bool,
) -> Scaling:
    """Run every number of threads in turns, `rounds` times; the fastest run is kept, as others disturbed it least."""
    runs, left_out = split_threads(threads, cores=cores, beyond_cores=beyond_cores)
    for number in left_out:
        print(f"not run: {number} threads on {cores} cores; --beyond-cores runs them", flush=True)

    def one(number: int, sleep_us: tuple[float, float] | None) -> ThreadsRun:
        with tempfile.TemporaryDirectory(prefix="cache-", dir=root) as cache:
            found = _child(location, cache, number, images=images, sleep_us=sleep_us, root=root)
        kind = "" if sleep_us is None else ", native work slept"
        print(f"{number} threads{kind}: {found.images_per_second:.0f} images/s", flush=True)
        return found

    turns = [[one(number, None) for number in runs] for _ in range(rounds)]
    done = {number: _fastest([turn[at] for turn in turns]) for at, number in enumerate(runs)}
    sleep_us = 1000 * done[1].ms("decode"), 1000 * done[1].ms("resize")
    everyone = sorted({*runs, *left_out})
    turns = [[one(number, sleep_us) for number in everyone] for _ in range(rounds)]
    slept = {number: _fastest([turn[at] for turn in turns]) for at, number in enumerate(everyone)}
    return Scaling(done, slept, left_out, cores)


def _fastest(runs: Sequence[ThreadsRun]) -> ThreadsRun:
    return max(runs, key=lambda run: run.images_per_second)


def _child(
    location: str,
    cache: str,
    threads: int,
    *,
    images: int,
    sleep_us: tuple[float, float] | None,
    root: Path,
) -> ThreadsRun:
    batches = max(images // BATCH_IMAGES, _BATCHES_A_THREAD * threads)
    request = {"location": location, "cache": cache, "threads": threads, "batches": batches, "sleep_us": sleep_us}
    told = run_told(
        lambda descriptor: [
            *(sys.executable, "-m", "shardvit.launch.bench.data_native"),
            json.dumps({"descriptor": descriptor, **request}),
        ],
        env=child_environment(temporary=root),
        timeout_seconds=_TIMEOUT_SECONDS,
        samples_memory=False,
    )
    if told.failure:
        raise RuntimeError(f"our own data path failed: {told.failure}")
    spent = {name: told.marks["end"][name] - value for name, value in told.marks["go"].items()}
    return ThreadsRun(threads, batches * BATCH_IMAGES, **spent)


def scaling_lines(scaling: Scaling, *, file_bytes: float, copied_bytes_per_second: float) -> list[str]:
    """Format what was measured, the limits, and what follows from them."""
    one = scaling.done[1]
    limits = limits_of(one, file_bytes=file_bytes, copied_bytes_per_second=copied_bytes_per_second)
    lines = [f"not run: {number} threads on {scaling.cores} cores" for number in scaling.left_out]
    lines += ["", *table(list(_measured_rows(scaling)), align="r").split("\n")]
    lines += [
        "",
        f"one image on one thread: {one.ms('cpu'):.3f} ms of CPU, of which decode {one.ms('decode'):.3f} and resize "
        f"{one.ms('resize'):.3f} without the GIL, {one.ms('python'):.3f} all else; {one.ms('system'):.3f} in the "
        f"kernel, with {one.page_faults / one.images:.1f} page faults",
        f"limit by the GIL, if all else held it: {limits.gil:,.0f} images/s; reached with native work slept: "
        f"{max(run.images_per_second for run in scaling.slept.values()):,.0f}",
        f"limit by memory: {limits.memory:,.0f} images/s, at {limits.bytes_an_image / 1e6:.2f} MB moved an image if no "
        f"cache helps, and {copied_bytes_per_second / 1e9:.1f} GB/s of copying by {scaling.cores} cores here",
        f"limit by the kernel, if all its work were under one lock (it is not): {limits.kernel:,.0f} images/s",
    ]
    return [*lines, "", *table(list(_derived_rows(scaling, limits)), align="r").split("\n")]


def _measured_rows(scaling: Scaling) -> Iterator[Sequence[str]]:
    yield "threads, measured", "images/s by the clock", "without waits for a core", "efficiency", "CPU ms/image"
    shares = efficiency({number: run.images_per_second for number, run in scaling.done.items()})
    for number, run in scaling.done.items():
        by_clock, rate = run.images / run.seconds, run.images_per_second
        yield f"{number}", f"{by_clock:.0f}", f"{rate:.0f}", f"{shares[number]:.2f}", f"{run.ms('cpu'):.3f}"


def _derived_rows(scaling: Scaling, limits: Limits) -> Iterator[Sequence[str]]:
    yield (
        "threads, derived",
        "efficiency by GIL and locks",
        "images/s",
        "GB/s moved",
        "with no more memory bandwidth than here",
    )
    one_rate = 1000 / scaling.done[1].ms("cpu")  # on a core of its own
    slept = efficiency({number: run.images_per_second for number, run in scaling.slept.items()})
    for number in scaling.slept:
        most = likely_efficiency(slept[number], threads=number, one_rate=one_rate)
        bounded = likely_efficiency(slept[number], threads=number, one_rate=one_rate, memory=limits.memory)
        rate = number * most * one_rate
        yield f"{number}", f"{most:.2f}", f"{rate:.0f}", f"{rate * limits.bytes_an_image / 1e9:.1f}", f"{bounded:.2f}"
