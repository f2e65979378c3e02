"""Run a command's helper processes: how many to start, Ctrl-C, exit with the parent, work in parts."""

import logging
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from shardvit.data_shards.control_groups import core_quota

Request = TypeVar("Request")
Part = TypeVar("Part", bound=Hashable)
Result = TypeVar("Result")
Work = Callable[[Request, Part], Result]  # a module-level function
Done = Callable[[Result], None]  # called with each result as it arrives

_own: tuple[Callable[[Any, Any], Any], Any] | None = None  # work and request of this worker process


def num_cores() -> int:
    """Count the cores this process may use; a container or batch system may grant fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, math.ceil(core_quota() or cores))


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block Ctrl-C while processes start, as they would print a traceback; this process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Exit this multiprocessing child as soon as its parent is gone, even while it waits for a server."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_parts(
    work: Work[Request, Part, Result],
    request: Request,
    parts: Sequence[Part],
    *,
    processes: int,
    done: Done[Result],
) -> dict[Part, Result]:
    """Run `work(request, part)` for each part in several processes; call `done` with each result as it arrives.

    The result lacks only parts whose process crashed (a decoder, out of memory). A single part, `processes` 1 or a
    program read from standard input starts no process. `work` is a module-level function; its exceptions pass through.
    Each process gets `request` once.
    """
    results: dict[Part, Result] = {}
    can_start = processes > 1 and len(parts) > 1
    if can_start:
        results |= _run_in_pool(_pool(work, request, processes=min(processes, len(parts))), parts, done=done)
        # After a crash, one process per part shows which part crashed.
        can_start = len(results) < len(parts) and _can_start_processes(work, request)
    for part in parts:
        if part not in results and can_start:
            results |= _run_in_pool(_pool(work, request, processes=1), [part], done=done)
        elif part not in results:
            results[part] = work(request, part)
            done(results[part])
    return results


def _run_in_pool(pool: ProcessPoolExecutor, parts: Sequence[Part], *, done: Done[Result]) -> dict[Part, Result]:
    results: dict[Part, Result] = {}
    try:
        with block_interrupts():
            futures = {pool.submit(_work_in_worker, part): part for part in parts}
        for future in as_completed(futures):
            results[futures.pop(future)] = future.result()
            done(future.result())
    except BrokenProcessPool:
        pass
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _can_start_processes(work: Callable[[Any, Any], Any], request: Any) -> bool:
    """False in a program read from standard input."""
    try:
        with block_interrupts(), _pool(work, request, processes=1) as pool:
            return pool.submit(os.getpid).result() > 0
    except BrokenProcessPool:
        return False


def _pool(work: Callable[[Any, Any], Any], request: Any, *, processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker, initargs=(work, request))


def _begin_worker(work: Callable[[Any, Any], Any], request: Any) -> None:
    global _own
    _own = work, request
    end_with_parent()
    # Silence libjpeg, whose warnings do not name the image (our findings do), but show our own log.
    logging.getLogger("shardvit").addHandler(logging.StreamHandler(os.fdopen(os.dup(2), "w")))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _work_in_worker(part: Any) -> Any:
    assert _own is not None
    work, request = _own
    return work(request, part)
