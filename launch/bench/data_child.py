"""One measured process of the data benchmark; it marks its progress (`measure.Teller`).

    loader   `first` (batch), `go` (after the warm-up) and `end`, the last two with the process tree's CPU seconds
    resume   `ready` (imports done) and `end` (first batch)
    memory   `tenth` 1 .. 10 * epochs, each with the tree's memory; then `end`
    prepare  `end`, when a peer's own format is written

Imports late: the time to the first batch includes each method's imports.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from shardvit.launch.bench.data_methods import METHODS, Method, Work
from shardvit.launch.bench.measure import Teller, tree_cpu_seconds, tree_memory


def _loader(teller: Teller, work: Work, *, method: str, warm_up: int, batches: int) -> None:
    stream = _batches(METHODS[method], work)
    next(stream)
    teller.mark("first")
    for _ in islice(stream, warm_up - 1):
        pass
    teller.mark("go", cpu_seconds=tree_cpu_seconds(psutil.Process()))
    for _ in islice(stream, batches):
        pass
    teller.mark("end", cpu_seconds=tree_cpu_seconds(psutil.Process()))
    sys.stdin.read()  # wait until the parent has read our memory: the workers exit with this process


def _batches(method: Method, work: Work) -> Iterator[Any]:
    if method.batches is None:
        from shardvit.launch.bench import data_ours

        return data_ours.batches(work.resized if method.shards == "resized" else work.shards, kind=method.kind)
    from shardvit.launch.bench import data_peers

    match method.transform:
        case "own":
            return getattr(data_peers, method.batches)(work)
        case "stock":
            transform = data_peers.stock_transform()
        case "fast":
            from shardvit.launch.bench.data_ours import fast_transform

            transform = fast_transform()
        case "opencv":
            from shardvit.launch.bench.data_ours import opencv_transform

            transform = opencv_transform()
    return getattr(data_peers, method.batches)(work, transform)


def _resume(teller: Teller, work: Work, *, step: int) -> None:
    from shardvit.launch.bench import data_ours

    teller.mark("ready")
    next(data_ours.batches(work.many, start_step=step))
    teller.mark("end")


def _memory(teller: Teller, work: Work, *, epochs: int) -> None:
    from shardvit.launch.bench import data_ours

    stream, steps = data_ours.batches(work.shards), data_ours.steps_of_epoch(work.shards)
    tenths = [max(1, steps * tenth // 10) for tenth in range(1, 10 * epochs + 1)]
    for step in range(1, steps * epochs + 1):
        next(stream)
        for tenth, at in enumerate(tenths, start=1):
            if at == step:
                teller.mark(f"tenth {tenth}", pss_mib=tree_memory(psutil.Process()).pss_mib)
    teller.mark("end")


def _prepare(teller: Teller, work: Work, *, method: str) -> None:
    from shardvit.launch.bench import data_peers

    getattr(data_peers, str(METHODS[method].prepare))(work)
    teller.mark("end")


_TASKS: dict[str, Callable[..., None]] = {
    "loader": _loader,
    "resume": _resume,
    "memory": _memory,
    "prepare": _prepare,
}

if __name__ == "__main__":
    request: dict[str, Any] = json.loads(sys.argv[1])
    task, teller, work = request.pop("task"), Teller(request.pop("descriptor")), Work(Path(request.pop("work")))
    _TASKS[task](teller, work, **request)
