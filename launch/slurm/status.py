"""`shardvit status`: how far each stage of a run is, and the state of its SLURM job.

All but the queue is read from the run folder, so it works for local runs and without SLURM. Costs one pass over each
stage's metrics.jsonl, and one squeue.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from data_shards.text import printable, show_duration, table
from launch.slurm.commands import Queued, Slurm
from launch.slurm.records import Submission, read_ends, read_submission
from launch.slurm.submit import total_steps
from pipeline.ranks.stopping import requeues_needed
from pipeline.recipe.io import parse_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import METRICS_FILE, MLFLOW_FILE, RECIPE_FILE, StageName
from pipeline.report.progress import RecentSpeed
from pipeline.runs.metrics_log import iter_metrics
from pipeline.runs.run_folder import RunFolder, checkpoint_folders
from pipeline.tracking.run_state import load_run_state

SPEED_WINDOW_SECONDS = 1800.0


@dataclass(frozen=True)
class StageStatus:
    """One stage; also what `--json` prints."""

    stage: StageName
    state: str  # of stage.json: new, running (begun and not done) or done
    step: int  # the last one in metrics.jsonl
    total_steps: int | None  # None: it has none (swap_head), or the shards are not visible from here
    eta_seconds: float | None  # training time that is left; None: unknown
    restarts: int  # attempts after the first one
    saved_step: int
    saved_seconds_ago: float | None  # None: there is no checkpoint
    job: str = ""
    queue: str = ""  # the job's state
    reason: str = ""  # why it waits, or ended
    nodes: str = ""
    left_seconds: int | None = None  # until the job's time limit
    last_end: str = ""  # how its last attempt ended
    requeues_needed: int | None = None  # until it is done, at this speed; None: unknown


@dataclass(frozen=True)
class RunStatus:
    """A run; `notes` say what could not be found out."""

    run: Path
    submission: Submission | None
    stages: tuple[StageStatus, ...]
    notes: tuple[str, ...]


def run_status(run: Path, *, slurm: Slurm) -> RunStatus:
    """Read the run folder and ask the queue; raises UserError if there is no such run."""
    folder = RunFolder(runs_root=run.parent, name=run.name)
    recipe = _recipe_of(run)
    submission, notes = read_submission(run / "slurm"), []
    queue: dict[str, Queued] = {}
    if submission is not None:
        jobs = submission.jobs.values()
        try:
            queue = slurm.queue(jobs)
            forgotten = set(jobs) - set(queue)
            queue |= {job: Queued(state) for job, state in slurm.history(forgotten).items()}
        except UserError as error:
            notes.append(f"the queue is unknown: {error}")
    steps = dict(submission.total_steps) if submission is not None else {}
    steps |= {stage: begun for stage in recipe.stages.names if (begun := folder.record(stage).total_steps)}
    if not steps.keys() >= set(recipe.stages.trained):
        try:
            steps = total_steps(recipe, processes=1) | steps
        except UserError as error:
            notes.append(f"the number of steps is unknown: {error}")
    stages = [
        _stage_status(folder, stage, total=steps.get(stage), submission=submission, queue=queue)
        for stage in recipe.stages.names
    ]
    return RunStatus(run=run, submission=submission, stages=tuple(stages), notes=tuple(notes))


def as_text(status: RunStatus) -> str:
    """The table, and a sentence for each stage that needs attention."""
    rows = [("stage", "state", "job", "queue", "step", "ETA", "job's time left", "restarts", "last checkpoint")]
    for stage in status.stages:
        of_total = "" if stage.total_steps is None else f" of {stage.total_steps:,}"
        saved, left, eta = stage.saved_seconds_ago, stage.left_seconds, stage.eta_seconds
        rows.append(
            (
                *(stage.stage, stage.state, stage.job),
                " ".join(filter(None, (stage.queue, stage.reason and f"({stage.reason})", stage.nodes))),
                f"{stage.step:,}{of_total}" if stage.step or of_total else "",
                "" if eta is None else show_duration(eta),
                "" if left is None else show_duration(left),
                str(stage.restarts),
                "" if saved is None else f"step {stage.saved_step:,}, {show_duration(saved)} ago",
            )
        )
    lines = [f"run {status.run}", table(rows, align="lr", heading="ruled")]
    for stage in status.stages:
        if stage.requeues_needed:
            times = "once" if stage.requeues_needed == 1 else f"{stage.requeues_needed} times"
            lines.append(
                f"{stage.stage}: its job ends before the ETA: it will save, be requeued and go on, about {times}"
            )
        if stage.last_end and stage.state != "done":
            lines.append(f"{stage.stage}: {stage.last_end}")
    return printable("\n".join([*lines, *status.notes]))


def as_tree(status: RunStatus) -> dict[str, Any]:
    """The status as JSON-ready values."""
    return {**asdict(status), "run": str(status.run)}


def _recipe_of(run: Path) -> Recipe:
    for path in (run / RECIPE_FILE, run / "slurm" / RECIPE_FILE):  # the latter until the first job begins
        if path.exists():
            return parse_recipe(path)
    raise UserError(f"{run} is not a run folder: it has no recipe.yaml; give RUNS/NAME, for instance runs/digits")


def _stage_status(
    folder: RunFolder,
    stage: StageName,
    *,
    total: int | None,
    submission: Submission | None,
    queue: dict[str, Queued],
) -> StageStatus:
    record = folder.record(stage)
    speed, step = RecentSpeed(SPEED_WINDOW_SECONDS), record.last_saved_step
    try:
        for row in iter_metrics(folder.stage(stage) / METRICS_FILE):
            speed.add(row.step, row.time)
            step = max(step, row.step)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from None
    eta = math.nan if total is None or record.state != "running" else speed.seconds_left(total)
    job = "" if submission is None else submission.jobs.get(stage, "")
    queued = queue.get(job, Queued(""))
    ends = read_ends(folder.path / "slurm", stage)
    requeues = None
    if submission is not None and queued.left_seconds is not None and not math.isnan(eta):
        requeues = requeues_needed(eta, left_seconds=queued.left_seconds, limit_seconds=submission.limit_seconds)
    return StageStatus(
        stage=stage,
        state=record.state,
        step=step,
        total_steps=total,
        eta_seconds=None if math.isnan(eta) else eta,
        restarts=max(0, _attempts(folder, stage) - 1),
        saved_step=record.last_saved_step,
        saved_seconds_ago=checkpoint_age(folder, stage),
        job=job,
        queue=queued.state,
        reason=queued.reason,
        nodes=queued.nodes if queued.state == "RUNNING" else "",
        left_seconds=queued.left_seconds,
        last_end=ends[-1].sentence if ends else "",
        requeues_needed=requeues,
    )


def _attempts(folder: RunFolder, stage: StageName) -> int:
    try:
        return load_run_state(folder.stage(stage) / MLFLOW_FILE).attempt
    except (OSError, ValueError):
        return 0


def checkpoint_age(folder: RunFolder, stage: StageName) -> float | None:
    """Seconds since a stage's newest checkpoint; None: it has none."""
    times: list[float] = []
    for path in checkpoint_folders(folder.checkpoints(stage)):
        with suppress(OSError):  # pruned meanwhile
            times.append(path.stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None
