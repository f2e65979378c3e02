"""What a run folder records about SLURM: RUNS/NAME/slurm/*.json, each replaced atomically.

jobs.json         what `shardvit submit` submitted last
STAGE.ends.json   how the attempts at a stage ended, written by `after`
cancelled.json    jobs that `shardvit cancel` was asked to end: they are not requeued
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from data_shards.durable import replace_text
from data_shards.errors import UserError
from pipeline.vocabulary import StageName

_Record = TypeVar("_Record")
Kind = Literal["stopped", "failed", "taken away"]
"""How an attempt ended that did not finish its stage; taken away: by SLURM (preemption, a failed node, scancel)."""


@dataclass(frozen=True)
class Submission:
    """The jobs of a run, one for each stage that was not done.

    Attributes:
        time: unix seconds.
        processes: of a training stage.
        limit_seconds: of one job.
        max_restarts: of a stage that crashed.
        jobs: stage -> job number; stages are submitted in this order.
        total_steps: of the training stages.
    """

    time: float
    processes: int
    limit_seconds: int
    max_restarts: int
    jobs: dict[StageName, str] = field(default_factory=dict)
    total_steps: dict[StageName, int] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """How one attempt at a stage ended."""

    job: str
    time: float
    kind: Kind
    code: int
    last_saved_step: int
    sentence: str


# All three readers raise UserError for a damaged file.


def read_submission(slurm: Path) -> Submission | None:
    """The last one; None: the run was never submitted."""
    return _read(slurm / "jobs.json", TypeAdapter(Submission | None), missing=None)


def write_submission(slurm: Path, submission: Submission) -> None:
    """Replace the record."""
    _write(slurm / "jobs.json", asdict(submission))


def read_ends(slurm: Path, stage: StageName) -> list[End]:
    """How a stage's attempts ended, oldest first."""
    return _read(slurm / f"{stage}.ends.json", TypeAdapter(list[End]), missing=[])


def write_ends(slurm: Path, stage: StageName, ends: Sequence[End]) -> None:
    """Replace the record."""
    _write(slurm / f"{stage}.ends.json", [asdict(end) for end in ends])


def read_cancelled(slurm: Path) -> set[str]:
    """Jobs that are not to be requeued."""
    return _read(slurm / "cancelled.json", TypeAdapter(set[str]), missing=set())


def write_cancelled(slurm: Path, jobs: set[str]) -> None:
    """Replace the record."""
    _write(slurm / "cancelled.json", sorted(jobs))


def _read(path: Path, kind: TypeAdapter[_Record], *, missing: Any) -> _Record:
    try:
        return kind.validate_json(path.read_bytes())
    except FileNotFoundError:
        return missing
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({error.errors()[0]['msg']}): remove it") from None


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=1) + "\n")
