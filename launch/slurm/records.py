"""A run's SLURM records: RUNS/NAME/slurm/*.json, each replaced atomically.

jobs.json         the last submission
STAGE.ends.json   how each attempt at a stage ended, written by `after`
cancelled.json    jobs that `shardvit cancel` ended: they are not requeued
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardvit.data_shards.durable import break_links, replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import read_inside
from shardvit.pipeline.recipe.vocabulary import StageName

Kind = Literal["stopped", "failed", "taken away"]
"""How an unfinished attempt ended; taken away: by SLURM (preemption, a failed node, scancel)."""


@dataclass(frozen=True)
class Submission:
    """The jobs of a run, one per unfinished stage."""

    time: float  # unix seconds
    processes: int  # of a training stage
    limit_seconds: int  # of one job
    max_restarts: int  # of a crashed stage
    jobs: dict[str, str] = field(default_factory=dict)  # stage, or step of a sweep -> job number, in submission order
    total_steps: dict[StageName, int] = field(default_factory=dict)  # of training stages


@dataclass(frozen=True)
class End:
    """How one attempt at a stage ended."""

    job: str
    time: float
    kind: Kind
    code: int
    last_saved_step: int
    sentence: str


_Value = TypeVar("_Value")


def read_submission(slurm: Path) -> Submission | None:
    """Read the last submission; None: never submitted."""
    return _read(slurm / "jobs.json", TypeAdapter(Submission | None), missing=None)


def write_submission(slurm: Path, submission: Submission) -> None:
    """Replace jobs.json."""
    _write(slurm / "jobs.json", submission)


def read_ends(slurm: Path, stage: StageName) -> list[End]:
    """Read how a stage's attempts ended, oldest first."""
    return _read(slurm / f"{stage}.ends.json", TypeAdapter(list[End]), missing=[])


def write_ends(slurm: Path, stage: StageName, ends: Sequence[End]) -> None:
    """Replace a stage's ends."""
    _write(slurm / f"{stage}.ends.json", ends)


def read_cancelled(slurm: Path) -> set[str]:
    """Read the jobs that must not be requeued."""
    return _read(slurm / "cancelled.json", TypeAdapter(set[str]), missing=set())


def write_cancelled(slurm: Path, jobs: set[str]) -> None:
    """Replace cancelled.json."""
    _write(slurm / "cancelled.json", sorted(jobs))


def begin_jobs(slurm: Path, *, stages: Iterable[StageName] = ()) -> None:
    """Forget cancelled jobs and ends of `stages`, and break hard links of the logs, to which SLURM appends."""
    write_cancelled(slurm, set())
    for stage in stages:
        write_ends(slurm, stage, [])
    for log in slurm.glob("*.log"):
        break_links(log)


def _read(path: Path, kind: TypeAdapter[_Value], *, missing: Any) -> _Value:
    """UserError if the file is damaged or unreadable."""
    try:
        return kind.validate_json(read_inside(path, folder=path.parent.parent))
    except FileNotFoundError:
        return missing
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({error.errors()[0]['msg']}): remove it") from None


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, TypeAdapter(Any).dump_json(content, indent=1).decode() + "\n")
