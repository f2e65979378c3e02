"""One measured process of the data benchmark: it runs one loader and tells when it is where (see `measure.Teller`).

    loader   the marks `first` (batch), `go` (after the warm-up) and `end`, the last two with the tree's CPU seconds
    resume   `ready` (everything is imported) and `first`
    memory   `tenth` 1 .. 10 * epochs, each with the tree's memory; then `end`
    prepare  `end`, when a peer's own format is written

Nothing is imported before it is needed: the time to the first batch includes each method's imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from launch.bench.data_methods import METHODS, Method, Work
from launch.bench.measure import Teller, tree_cpu_seconds, tree_memory


def main() -> None:
    """Do what the one argument, JSON, says."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    teller = Teller(request.pop("descriptor"))
    task: Callable[..., None] = {"loader": _loader, "resume": _resume, "memory": _memory, "prepare": _prepare}[
        request.pop("task")
    ]
    task(teller, **request)


def _loader(teller: Teller, *, method: str, work: str, warm_up: int, batches: int) -> None:
    stream = _batches(METHODS[method], Path(work))
    itself = psutil.Process()
    next(stream)
    teller.mark("first")
    for _ in range(warm_up - 1):
        next(stream)
    teller.mark("go", cpu_seconds=tree_cpu_seconds(itself))
    for _ in range(batches):
        next(stream)
    teller.mark("end", cpu_seconds=tree_cpu_seconds(itself))
    sys.stdin.read()  # until its memory has been looked at: the workers leave with this process


def _batches(method: Method, root: Path) -> Iterator[Any]:
    from launch.bench import data_peers

    work = Work(root)
    if method.batches is None:
        from launch.bench import data_ours

        return data_ours.batches(work.resized if method.shards == "resized" else work.shards, kind=method.kind)
    match method.transform:
        case "own":
            transform: data_peers.Transform = _no_transform
        case "stock":
            transform = data_peers.stock_transform()
        case "fast":
            from launch.bench.data_fast import fast_transform

            transform = fast_transform()
    return getattr(data_peers, method.batches)(work, transform)


def _no_transform(content: bytes) -> bytes:
    raise AssertionError("this method brings its own transform")


def _resume(teller: Teller, *, work: str, step: int) -> None:
    from launch.bench import data_ours

    teller.mark("ready")
    next(data_ours.batches(Work(Path(work)).many, start_step=step))
    teller.mark("first")


def _memory(teller: Teller, *, work: str, epochs: int) -> None:
    from launch.bench import data_ours

    folder = Work(Path(work)).shards
    stream, steps = data_ours.batches(folder), data_ours.steps_of_epoch(folder)
    tenths = [max(1, steps * tenth // 10) for tenth in range(1, 10 * epochs + 1)]
    for step in range(steps * epochs):
        next(stream)
        for tenth, at in enumerate(tenths, start=1):
            if at == step + 1:
                teller.mark(f"tenth {tenth}", pss_mib=tree_memory(psutil.Process()).pss_mib)
    teller.mark("end")


def _prepare(teller: Teller, *, method: str, work: str) -> None:
    from launch.bench import data_peers

    getattr(data_peers, str(METHODS[method].prepare))(Work(Path(work)))
    teller.mark("end")


if __name__ == "__main__":
    main()
