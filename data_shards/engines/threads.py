"""Run parts in threads of this process: enough where decoding and I/O release the interpreter's lock, up to 8 cores."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardvit.data_shards.processes import Done, Part, Request, Result, Work

_here = threading.local()


class GivenUp(Exception):
    """Another part failed, or Ctrl-C was pressed: this one is given up."""


def give_up_if_stopped() -> None:
    """Raise `GivenUp` in a thread of an engine that ends; long parts call it now and then."""
    if (stop := getattr(_here, "stop", None)) is not None and stop.is_set():
        raise GivenUp


@dataclass(frozen=True)
class ThreadEngine:
    """This process's threads; see `PartsEngine`. Results arrive in order."""

    workers: int

    def run(
        self, work: Work[Request, Part, Result], request: Request, parts: Sequence[Part], *, done: Done[Result]
    ) -> dict[Part, Result]:
        stop, failures = threading.Event(), list[BaseException]()

        def one(part: Part) -> Result:
            _here.stop = stop
            try:
                give_up_if_stopped()
                return work(request, part)
            except BaseException as error:
                failures.append(error)
                stop.set()  # here: the main thread only notices when it waits for this part
                raise

        results: dict[Part, Result] = {}
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(one, part) for part in parts]
            try:
                for part, future in zip(parts, futures, strict=True):
                    results[part] = future.result()
                    done(results[part])
            except BaseException as error:
                stop.set()
                pool.shutdown(cancel_futures=True)
                if isinstance(error, GivenUp):
                    raise failures[0] from None  # of another part, which is why
                raise
        return results
