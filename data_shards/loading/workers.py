"""Data workers: threads of the training process, or processes, that read and decode ahead.

Threads share everything: no second torch, no copy, a first batch at once. But a tenth of the work is Python, where they
contend for the GIL with the training loop; so beyond some number, processes. These come from a fork server: a fork of
the training process would copy locks that its other threads (MLflow's, CUDA's) hold. They ignore the signals that stop
a job; their rank saves first and then ends them. They cost 0.03 s and 25 MB each once the server has loaded torch (2 s,
300 MB). Each worker holds `memory.PREFETCH` items.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import multiprocessing.connection
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from data_shards.errors import UserError, WorkerDied
from data_shards.loading.memory import PREFETCH
from data_shards.loading.sharing import share_large_arrays
from data_shards.processes import end_with_parent
from data_shards.vocabulary import WorkerKind

Item = TypeVar("Item")
Produced = TypeVar("Produced", covariant=True)

_EXIT_SECONDS = 5.0  # that worker threads get to finish their item, which takes a fraction of one
_NEWS_SECONDS = 30.0  # that the fork server gets to report a dead worker, which takes a millisecond

_at_work: set[threading.Thread] = set()
_exiting = threading.Event()

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Described(Protocol[Produced]):
    """A data set: item number i, and the name of a sample for messages."""

    def __getitem__(self, number: int) -> Produced: ...

    def describe(self, shard: int, *, row: int) -> str: ...


# (shard, row) of each worker's current sample, in memory shared with the rank; None outside worker processes.
_notes: Any = None
_worker = -1  # this worker's number


def note_sample(shard: int, *, row: int) -> None:
    """Note, in a worker, which sample comes next, so that a report of its death can name it."""
    if _notes is not None:
        _notes[2 * _worker], _notes[2 * _worker + 1] = shard, row


def empty_images(count: int, size: int) -> torch.Tensor:
    """uint8 [count, size, size, 3], not filled: in a worker process shared memory."""
    shape = (count, size, size, 3)
    if _notes is None:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(math.prod(shape))).view(shape)


def iterate(
    dataset: Described[Item], *, numbers: Sequence[int], workers: int, kind: WorkerKind = "process"
) -> Generator[Item]:
    """The items of `numbers`, in order; with 0 workers the calling thread makes them.

    The data set must be picklable for processes, thread-safe for threads. Raises the data set's UserError wherever it
    occurs, and WorkerDied if a worker process crashed or was killed.
    """
    if not workers:
        return (dataset[number] for number in numbers)
    match kind:
        case "thread":
            return _in_threads(dataset, numbers=numbers, workers=workers)
        case "process":
            return _in_processes(dataset, numbers=numbers, workers=workers)


def _in_threads(dataset: Described[Item], *, numbers: Sequence[int], workers: int) -> Generator[Item]:
    """Daemon threads, since those of a ThreadPoolExecutor would delay the exit until a store's last retry."""
    upcoming = iter(numbers)
    jobs: SimpleQueue[tuple[int, Future[Item]] | None] = SimpleQueue()
    ahead: deque[Future[Item]] = deque()

    def begin(count: int) -> None:
        for number in islice(upcoming, count):
            ahead.append(Future())
            jobs.put((number, ahead[-1]))

    for _ in range(workers):
        threading.Thread(target=_work, args=(dataset, jobs), name="data-worker", daemon=True).start()
    try:
        begin(workers * PREFETCH)
        while ahead:
            item = ahead.popleft().result()
            begin(1)
            yield item
    finally:
        for future in ahead:
            future.cancel()
        for _ in range(workers):
            jobs.put(None)


def _work(dataset: Described[Item], jobs: SimpleQueue[tuple[int, Future[Item]] | None]) -> None:
    me = threading.current_thread()
    while (job := jobs.get()) is not None:
        number, future = job
        _at_work.add(me)
        if _exiting.is_set():  # asked after the line above, or the exit might not see this thread
            return
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(dataset[number])
            except BaseException as error:  # noqa: BLE001 - the reader of the future gets it
                future.set_exception(error)
        del job, future
        _at_work.discard(me)


def _end_threads() -> None:
    """At exit: a thread that is ended inside torch crashes the process; one that waits for a store does not."""
    _exiting.set()
    end = time.monotonic() + _EXIT_SECONDS
    for thread in list(_at_work):
        thread.join(max(0.0, end - time.monotonic()))


def _in_processes(dataset: Described[Item], *, numbers: Sequence[int], workers: int) -> Generator[Item]:
    start_fork_server()
    share_large_arrays()
    notes: Any = multiprocessing.get_context("forkserver").RawArray("q", [-1] * (2 * workers))
    loader = DataLoader(
        _WithErrors(dataset),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context="forkserver",
        worker_init_fn=partial(_prepare_worker, notes),
        # The DataLoader draws a seed for its workers, by default from the global generator, which that would advance.
        generator=torch.Generator(),
    )
    iterator: Any = iter(loader)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:  # OSError: of a batch that the dead one did not hand over
            if "in DataLoader worker process" not in str(error):  # torch's words for what the dataset raised
                # The fork server reports the death, on a busy machine later than the lost item is missed.
                multiprocessing.connection.wait([each.sentinel for each in iterator._workers], timeout=_NEWS_SECONDS)
            if all(process.is_alive() for process in iterator._workers):
                raise
            raise WorkerDied(_obituary(dataset, iterator._workers, notes)) from error
        if isinstance(item, UserError):
            raise item
        yield item


class _WithErrors(Dataset["Item | UserError"]):
    """Returns a `UserError` as a value: raised in a worker, it would come wrapped in the worker's traceback."""

    def __init__(self, dataset: Described[Item]) -> None:
        self._dataset = dataset

    def __getitem__(self, number: int) -> Item | UserError:
        try:
            return self._dataset[number]
        except UserError as error:
            return error


def _obituary(dataset: Described[Item], processes: list[Any], notes: Any) -> str:
    dead = []
    for number, process in enumerate(processes):
        if process.is_alive():
            continue
        shard, row = notes[2 * number], notes[2 * number + 1]
        try:
            where = f"reading sample {dataset.describe(shard, row=row)}" if shard >= 0 else "not reading yet"
        except Exception as error:  # noqa: BLE001 - the death must be reported, even where the sample has no name
            where = f"reading row {row} of shard {shard}, which cannot be opened ({error})"
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        dead.append(f"data worker {number} (pid {process.pid}) {how} while {where}")
    reason = "; ".join(dead) or "a data worker is gone"
    return f"{reason}: signal 9 is what the kernel sends when memory runs out, 11 points at the image itself"


def start_fork_server() -> None:
    """Start it with torch loaded: a worker then starts in 0.03 s instead of 1, with 25 MB of its own instead of 310.

    Returns at once, and does nothing where it runs. Called early, it loads torch while this process does other things.
    The signals that stop a job are blocked: Slurm signals every process, and without their server the workers die. A
    blocked signal stays blocked through fork and exec; one sent meanwhile reaches this process afterwards.
    """
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    forkserver.set_forkserver_preload(["torch", "data_shards.loading.loader"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # the fork server would start it, but it unblocks signals when it is started
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_workers() -> None:
    """At exit, before multiprocessing sends SIGTERM, which they ignore, and waits for them forever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _prepare_worker(notes: Any, worker: int) -> None:
    global _notes, _worker
    _notes, _worker = notes, worker
    for stop in _STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(1)  # the workers share the cores among themselves
    # torch's workers watch their parent, but here that is the fork server, which lives as long as any of them.
    end_with_parent()


atexit.register(_end_threads)
