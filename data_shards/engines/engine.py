"""Run independent parts of a work: on this machine's processes, or on a Ray cluster.

A work is a module-level function of a request, which each worker receives once, and a part (a shard, a file to list).
Parts must be repeatable: a part whose worker died is done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.processes import Done, Part, Request, Result, Work, num_cores, run_parts
from shardvit.data_shards.vocabulary import EngineName


class PartsEngine(Protocol):
    """`run` returns each part's result, and passes it to `done` as it arrives; parts that crash again are left out."""

    @property
    def workers(self) -> int: ...

    def run(
        self, work: Work[Request, Part, Result], request: Request, parts: Sequence[Part], *, done: Done[Result]
    ) -> dict[Part, Result]: ...


@dataclass(frozen=True)
class LocalEngine:
    """This machine's processes."""

    workers: int

    def run(
        self, work: Work[Request, Part, Result], request: Request, parts: Sequence[Part], *, done: Done[Result]
    ) -> dict[Part, Result]:
        return run_parts(work, request, parts, processes=self.workers, done=done)


def local_engine(workers: int | None = None) -> LocalEngine:
    """Use `workers` processes; None: one per core."""
    return LocalEngine(workers or num_cores())


def open_engine(
    name: EngineName = "processes",
    *,
    workers: int | None = None,
    address: str | None = None,
    seen_by_all: Sequence[Path] = (),
) -> AbstractContextManager[PartsEngine]:
    """Open an engine; a local Ray ends with the block, a running cluster stays. `address`: of that, default:
    RAY_ADDRESS's, else a local Ray. `seen_by_all`: what all nodes must have. UserError if it cannot be opened."""
    if name == "ray":
        from shardvit.data_shards.engines.ray_engine import open_ray

        return open_ray(address=address, workers=workers, seen_by_all=seen_by_all)
    if address is not None:
        raise UserError("--address: it is a Ray cluster's; give --engine ray, too")
    return nullcontext(local_engine(workers))
