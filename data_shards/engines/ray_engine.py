"""Run parts on a Ray cluster, running or started here. The only file that imports ray.

A dead node costs its unfinished parts. A worker gets the request once and runs in the command's working folder, if its
node has it; it imports shardvit from the driver's place and nothing from the working folder. Costs 5 s to start, 1 ms
a part. Does not move files: sources and OUT are paths or URLs that all nodes see.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.processes import Done, Part, Request, Result, Work, num_cores
from shardvit.data_shards.working_folder import import_folder

if TYPE_CHECKING:
    from ray.exceptions import RayTaskError

_PARTS_PER_CPU = 2  # one runs, one waits at its side
_MOST_CRASHES = 2  # of one part, as `run_parts`
_ANSWER_SECONDS = 20.0  # of a cluster's head
_LOOK_SECONDS = 1.0  # at the cluster's size, at the latest
_STORE_BYTES = 2**28  # a local Ray's object store; parts return little
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class _Given(NamedTuple):
    """What a worker gets once."""

    work: Callable[[Any, Any], Any]
    request: Any
    folder: str
    seen_by_all: Sequence[str]


@dataclass(frozen=True)
class RayEngine:
    """A connected Ray cluster; it may grow and shrink meanwhile."""

    most_parts: int | None  # running at a time; None: as the cluster has CPUs
    seen_by_all: Sequence[str] = ()  # what every node must have

    @property
    def workers(self) -> int:
        import ray

        return self.most_parts or max(1, int(ray.cluster_resources().get("CPU", 0)))

    def run(
        self, work: Work[Request, Part, Result], request: Request, parts: Sequence[Part], *, done: Done[Result]
    ) -> dict[Part, Result]:
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        # In a list: Ray would unpickle an argument itself for each part.
        given = [ray.put(_Given(work, request, os.getcwd(), self.seen_by_all))]
        remote = ray.remote(num_cpus=1, max_retries=0)(_work_in_worker)
        waiting, crashes, results = deque(parts), Counter[Part](), dict[Part, Result]()
        flying: dict[Any, Part] = {}
        try:
            while waiting or flying:
                most = self.most_parts or _PARTS_PER_CPU * self.workers
                while waiting and len(flying) < most:
                    part = waiting.popleft()
                    flying[remote.remote(given, part)] = part
                for ready in ray.wait(list(flying), timeout=_LOOK_SECONDS)[0]:
                    part = flying.pop(ready)
                    try:
                        result = ray.get(ready)
                    except (NodeDiedError, ObjectLostError):
                        waiting.append(part)
                    except (WorkerCrashedError, OutOfMemoryError):
                        crashes[part] += 1
                        if crashes[part] < _MOST_CRASHES:
                            waiting.append(part)
                    except RayTaskError as error:
                        raise _own_error(error) from error
                    else:
                        results[part] = result
                        done(result)
        finally:
            for each in flying:
                ray.cancel(each, force=True)
        return results


@contextmanager
def open_ray(*, address: str | None, workers: int | None, seen_by_all: Sequence[Path]) -> Iterator[RayEngine]:
    """Connect to a cluster: `address`, or RAY_ADDRESS's, or a Ray on this machine, which ends with the block. UserError
    if ray is not installed or nothing answers."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray: Ray is not installed; pip install 'shardvit[ray]'") from None
    with ExitStack() as stack:
        if not ray.is_initialized():  # else it is the caller's own
            address = address or os.environ.get("RAY_ADDRESS") or "local"
            _connect(address, workers=workers)
            stack.callback(gc.collect)  # Ray's clients would kill a forked process that destroys them
            stack.callback(ray.shutdown)
            workers = None if address == "local" else workers
        yield RayEngine(workers, [os.path.abspath(path) for path in seen_by_all])


def _connect(address: str, *, workers: int | None) -> None:
    import ray

    own = {"num_cpus": workers or num_cores(), "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    host, _, port = address.rpartition("://")[2].rpartition(":")
    shown = os.environ.get("RAY_LOG_TO_DRIVER", "0").lower() in ("1", "true")
    try:
        if host and port.isdecimal():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        # Ray puts the folder that it is started in before all others of a worker's sys.path.
        with chdir(import_folder()):
            options: dict[str, Any] = own if address == "local" else {}
            ray.init(address, log_to_driver=shown, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"--address {address}: no Ray cluster answers there ({reason})") from error
    if not shown:
        # Ray's words on each dead process and node would go to standard output, where results are.
        from ray._private import worker

        worker.print_to_stdstream = lambda data, *, ignore_prefix: None


def _own_error(error: RayTaskError) -> Exception:
    """Return what the work raised; UserError for a file that is missing on its node alone."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FileNotFoundError) and cause.filename and os.path.exists(cause.filename):
        return _unseen(os.fsdecode(cause.filename), error.ip)
    return cause or error


def _unseen(name: str, node: str) -> UserError:
    return UserError(f"{name}: node {node} does not see it; with --engine ray, give a place that all nodes see")


def _work_in_worker(given: list[Any], part: Any) -> Any:
    own = _begin(given[0])
    return own.work(own.request, part)


@lru_cache(1)
def _begin(reference: Any) -> _Given:
    """Get this worker ready for a run."""
    import ray

    given: _Given = ray.get(reference)
    with suppress(OSError):
        os.chdir(given.folder)
    for path in given.seen_by_all:
        if not os.path.exists(path):
            raise _unseen(path, ray.util.get_node_ip_address())
    return given
