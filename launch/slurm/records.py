"""What the run folder remembers of SLURM: RUNS/NAME/slurm/*.json.

    jobs.json         what `shardvit submit` submitted last
    STAGE.ends.json   how the jobs of a stage have ended so far, written by `after`
    cancelled.json    jobs that `shardvit cancel` was asked to end: they are not requeued

Each is written beside and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from data_shards.durable import replace_text
from data_shards.errors import UserError
from pipeline.recipe.schema import StageName

_Record = TypeVar("_Record")
Kind = Literal["stopped", "failed", "taken away"]
"""How an attempt ended that did not finish its stage; taken away: by SLURM, for reasons of its own."""


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


def read_submission(slurm: Path) -> Submission | None:
    """The last one; None: the run was never submitted.

    Raises:
        UserError: the file is damaged.
    """
    content = _read(slurm / "jobs.json")
    return None if content is None else _make(Submission, content, slurm / "jobs.json")


def write_submission(slurm: Path, submission: Submission) -> None:
    """Replace the record."""
    _write(slurm / "jobs.json", asdict(submission))


def read_ends(slurm: Path, stage: StageName) -> list[End]:
    """How a stage's attempts ended, oldest first.

    Raises:
        UserError: the file is damaged.
    """
    path = slurm / f"{stage}.ends.json"
    return [_make(End, content, path) for content in _read(path) or []]


def write_ends(slurm: Path, stage: StageName, ends: Sequence[End]) -> None:
    """Replace the record."""
    _write(slurm / f"{stage}.ends.json", [asdict(end) for end in ends])


def read_cancelled(slurm: Path) -> set[str]:
    """Jobs that are not to be requeued."""
    return set(_read(slurm / "cancelled.json") or [])


def write_cancelled(slurm: Path, jobs: set[str]) -> None:
    """Replace the record."""
    _write(slurm / "cancelled.json", sorted(jobs))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): remove it") from None


def _make(kind: type[_Record], content: Mapping[str, Any], path: Path) -> _Record:
    try:
        return kind(**content)
    except TypeError as error:
        raise UserError(f"{path} is damaged ({error}): remove it") from None


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=1) + "\n")
