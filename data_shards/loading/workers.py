"""Read and decode ahead in data workers: threads of the training process, or processes.

Threads need no second torch and no copy, and give their first batch immediately. But a tenth of the work is Python,
where they contend for the GIL with the training loop, so larger numbers of workers are processes. These come from a
fork server, since a fork would copy locks held by other threads (CUDA's). They ignore the signals that stop a job:
their rank saves first, then ends them. Each costs 0.03 s and 25 MB once the server has loaded torch (2 s, 300 MB).
"""

import atexit
import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from itertools import islice, takewhile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from shardvit.data_shards.errors import OwnCodeFailed, UserError, WorkerDied
from shardvit.data_shards.loading.memory import PREFETCH, TOGETHER
from shardvit.data_shards.processes import end_with_parent
from shardvit.data_shards.vocabulary import WorkerKind

Item = TypeVar("Item")
Produced = TypeVar("Produced", covariant=True)

_LEAST_SHARED_BYTES = 1 << 16  # smaller arrays are pickled
_EXIT_SECONDS = 5.0  # for worker threads to finish their item, which takes a fraction of a second
_NEWS_SECONDS = 30.0  # for the fork server to report a dead worker, which takes a millisecond

_shared: dict[int, tuple[weakref.ref[NDArray[Any]], torch.Tensor]] = {}  # by the array's id, for all workers
_at_work: set[threading.Thread] = set()
_exiting = threading.Event()

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class NamedItems(Protocol[Produced]):
    """A data set: items by number, and sample names for messages."""

    def __getitem__(self, number: int) -> Produced: ...

    def describe(self, shard: int, *, row: int) -> str: ...


def iterate(
    dataset: NamedItems[Item], *, numbers: Sequence[int], workers: int, kind: WorkerKind = "process"
) -> Generator[Item]:
    """Yield the items of `numbers` in order; with 0 workers the calling thread makes them.

    The data set must be picklable (processes) or thread-safe (threads). Raises its UserErrors, and WorkerDied.
    """
    if not workers:
        return (dataset[number] for number in numbers)
    match kind:
        case "thread":
            return _in_threads(dataset, numbers=numbers, workers=workers)
        case "process":
            return _in_processes(dataset, numbers=numbers, workers=workers)


def _in_threads(dataset: NamedItems[Item], *, numbers: Sequence[int], workers: int) -> Generator[Item]:
    """Use daemon threads: those of a ThreadPoolExecutor would delay the exit until a store's last retry."""
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


def _work(dataset: NamedItems[Item], jobs: SimpleQueue[tuple[int, Future[Item]] | None]) -> None:
    me = threading.current_thread()
    while (job := jobs.get()) is not None:
        number, future = job
        _at_work.add(me)
        if _exiting.is_set():  # checked after the line above, or the exit might miss this thread
            return
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(dataset[number])
            except BaseException as error:  # noqa: BLE001 - raised to whoever reads the future
                future.set_exception(error)
        del job, future
        _at_work.discard(me)


def _end_threads() -> None:
    """Wait at exit for busy threads: ending one inside torch would crash the process; ending a store's wait is safe."""
    _exiting.set()
    end = time.monotonic() + _EXIT_SECONDS
    for thread in list(_at_work):
        thread.join(max(0.0, end - time.monotonic()))


def _in_processes(dataset: NamedItems[Item], *, numbers: Sequence[int], workers: int) -> Generator[Item]:
    start_fork_server()
    ForkingPickler.register(np.ndarray, _reduce)
    notes: Any = multiprocessing.get_context("forkserver").RawArray("q", [-1] * (2 * TOGETHER * workers))
    loader = DataLoader(
        _WithErrors(dataset, notes),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context="forkserver",
        worker_init_fn=_prepare_worker,
        # The DataLoader draws a seed for its workers, which would advance the default: the global generator.
        generator=torch.Generator(),
    )
    iterator: Any = iter(loader)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:  # OSError: a batch that the dead worker did not hand over
            if "in DataLoader worker process" not in str(error):  # torch's words for an exception of the dataset
                # The fork server reports the death; on a busy machine, after we have missed the lost item.
                multiprocessing.connection.wait([each.sentinel for each in iterator._workers], timeout=_NEWS_SECONDS)
            if all(process.is_alive() for process in iterator._workers):
                raise
            raise WorkerDied(_death_report(dataset, iterator._workers, notes)) from error
        if isinstance(item, UserError | OwnCodeFailed):
            raise item
        yield item


def _reduce(array: NDArray[Any]) -> Any:
    """Hand large arrays to workers in shared memory, which they must not write to; it goes with its last descriptor."""
    # A set of 10^5 shards and its order are 20 MB: pickled for 16 workers of 8 ranks, 2.5 GB at each start.
    if array.nbytes < _LEAST_SHARED_BYTES or array.dtype.hasobject or array.dtype.fields:
        return array.__reduce_ex__(2)
    return _restore, (_in_shared_memory(array), array.dtype.str, array.shape)


def _in_shared_memory(array: NDArray[Any]) -> torch.Tensor:
    known = _shared.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(array.nbytes))
    content.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    number = id(array)
    _shared[number] = (weakref.ref(array, lambda _: _shared.pop(number, None) and None), content)
    return content


def _restore(content: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return content.numpy().view(dtype).reshape(shape)


class _WithErrors(Dataset["Item | UserError | OwnCodeFailed"]):
    """Return such errors as a value: raised in a worker, it would arrive wrapped in the worker's traceback."""

    def __init__(self, dataset: NamedItems[Item], notes: Any) -> None:
        self._dataset, self.notes = dataset, notes  # shared with the rank: shard and row of each worker's samples

    def __getitem__(self, number: int) -> Item | UserError | OwnCodeFailed:
        try:
            return self._dataset[number]
        except (UserError, OwnCodeFailed) as error:
            return error


def _death_report(dataset: NamedItems[Item], processes: list[Any], notes: Any) -> str:
    dead = []
    for number, process in enumerate(processes):
        if process.is_alive():
            continue
        own = notes[2 * TOGETHER * number : 2 * TOGETHER * (number + 1)]
        samples = list(takewhile(lambda sample: sample[0] >= 0, zip(own[::2], own[1::2], strict=True)))
        names = ", ".join(_described(dataset, shard, row) for shard, row in samples)
        where = f"reading {names if len(samples) == 1 else f'one of {names}'}" if samples else "not reading yet"
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        dead.append(f"data worker {number} (pid {process.pid}) {how} while {where}")
    reason = "; ".join(dead) or "a data worker is gone"
    return f"{reason}: signal 9 is what the kernel sends when memory runs out, 11 points at the image itself"


def _described(dataset: NamedItems[Item], shard: int, row: int) -> str:
    try:
        return f"sample {dataset.describe(shard, row=row)}"
    except Exception as error:  # noqa: BLE001 - report the death even if the sample has no name
        return f"row {row} of shard {shard}, which cannot be opened ({error})"


def start_fork_server() -> None:
    """Start the fork server, which loads torch while this process does other things; no wait, and no effect if it runs.
    UserError if TMPDIR is too long for its socket.

    It blocks the signals that stop a job (a block survives fork and exec): Slurm signals every process, and workers die
    with their server.
    """
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    forkserver.set_forkserver_preload(["torch", "shardvit.data_shards.loading.loader"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # the fork server would start it, but starting it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX" not in str(error):  # it has no errno
            raise
        raise UserError(
            f"TMPDIR: {tempfile.gettempdir()} is too long a path for the data workers' socket: set TMPDIR to one of at "
            f"most 75 bytes, or data.worker_kind to thread"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_workers() -> None:
    """Kill workers at exit, before multiprocessing sends SIGTERM, which they ignore, and waits for them forever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _prepare_worker(worker: int) -> None:
    for stop in _STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(1)  # the workers share the cores
    # torch's workers watch their parent, here the fork server, which outlives them all.
    end_with_parent()


atexit.register(_end_threads)
