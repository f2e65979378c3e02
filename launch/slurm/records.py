"""Records of a run about SLURM: RUNS/NAME/slurm/*.json, each replaced atomically.

jobs.json         what `shardvit submit` submitted last
STAGE.ends.json   how the attempts at a stage ended, written by `after`
cancelled.json    jobs that `shardvit cancel` was asked to end: they are not requeued
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from data_shards.durable import break_links, replace_text
from data_shards.errors import UserError
from data_shards.safe_paths import read_inside
from pipeline.recipe.vocabulary import StageName

Kind = Literal["stopped", "failed", "taken away"]
"""End of an attempt that did not finish its stage; taken away: by SLURM (preemption, a failed node, scancel)."""


@dataclass(frozen=True)
class Submission:
    """The jobs of a run, one for each stage that was not done."""

    time: float  # unix seconds
    processes: int  # of a training stage
    limit_seconds: int  # of one job
    max_restarts: int  # of a crashed stage
    jobs: dict[str, str] = field(default_factory=dict)  # stage (of a sweep: what) -> job number, in submission's order
    total_steps: dict[StageName, int] = field(default_factory=dict)  # of the training stages


@dataclass(frozen=True)
class End:
    """The end of one attempt at a stage."""

    job: str
    time: float
    kind: Kind
    code: int
    last_saved_step: int
    sentence: str


_Value = TypeVar("_Value")


def read_submission(slurm: Path) -> Submission | None:
    """Read the last submission; None: the run was never submitted."""
    return _read(slurm / "jobs.json", TypeAdapter(Submission | None), missing=None)


def write_submission(slurm: Path, submission: Submission) -> None:
    """Replace jobs.json."""
    _write(slurm / "jobs.json", submission)


def read_ends(slurm: Path, stage: StageName) -> list[End]:
    """Read the ends of a stage's attempts, oldest first."""
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
    """Prepare for new jobs: none is cancelled, no attempt at `stages` has ended, and the logs, to which SLURM appends,
    have no other hard links."""
    write_cancelled(slurm, set())
    for stage in stages:
        write_ends(slurm, stage, [])
    for log in slurm.glob("*.log"):
        break_links(log)


def _read(path: Path, kind: TypeAdapter[_Value], *, missing: Any) -> _Value:
    """Raises UserError if the file is damaged or cannot be read."""
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
