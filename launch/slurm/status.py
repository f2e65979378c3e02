"""`shardvit status`: how far each stage of a run is, and what SLURM says of its job.

Everything but the queue is read from the run folder, so it works for local runs as well, and on a machine without
SLURM. Reading costs one pass over metrics.jsonl for each stage, and one squeue.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from data_shards.text import printable, show_duration
from launch.slurm.commands import Queued, Slurm
from launch.slurm.records import Submission, read_ends, read_submission
from launch.slurm.submit import total_steps
from pipeline.checkpoint.identity import checkpoint_folders
from pipeline.recipe.io import parse_recipe
from pipeline.recipe.schema import Recipe, StageName, TrainStage
from pipeline.report.metrics_log import iter_metrics
from pipeline.report.progress import RecentSpeed
from pipeline.report.tracking_state import load_run_state
from pipeline.run_folder import RunFolder

_SPEED_WINDOW_SECONDS = 1800.0


@dataclass(frozen=True)
class StageStatus:
    """One stage.

    Attributes:
        stage: its name.
        state: of stage.json: new, running (begun and not done) or done.
        step: the last one that is in its curve.
        total_steps: None: there are none (swap_head), or the shards are not visible from here.
        eta_seconds: of training time that is still needed; None: unknown.
        restarts: attempts after the first one.
        saved_step: of the last checkpoint.
        saved_seconds_ago: None: there is none.
        job: SLURM's number.
        queue: the job's state in the queue.
        reason: why it waits, or has ended.
        nodes: where it runs.
        left_seconds: until its time limit.
        last_end: how its last attempt ended, in words.
        requeues_needed: until it is done, at this speed; None: unknown.
    """

    stage: StageName
    state: str
    step: int
    total_steps: int | None
    eta_seconds: float | None
    restarts: int
    saved_step: int
    saved_seconds_ago: float | None
    job: str = ""
    queue: str = ""
    reason: str = ""
    nodes: str = ""
    left_seconds: int | None = None
    last_end: str = ""
    requeues_needed: int | None = None


@dataclass(frozen=True)
class RunStatus:
    """A run.

    Attributes:
        run: its folder.
        notes: what could not be found out.
    """

    run: Path
    submission: Submission | None
    stages: tuple[StageStatus, ...]
    notes: tuple[str, ...]


def run_status(run: Path, *, slurm: Slurm) -> RunStatus:
    """Look.

    Raises:
        UserError: there is no such run.
    """
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
    if any(
        isinstance(getattr(recipe.stages, stage), TrainStage) and stage not in steps for stage in recipe.stages.names
    ):
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
    """The table, and a sentence for whatever is not as one would wish."""
    from launch.commands.demo import format_table

    rows = [("stage", "state", "job", "queue", "step", "ETA", "job's time left", "restarts", "last checkpoint")]
    for stage in status.stages:
        known = stage.total_steps is not None
        rows.append(
            (
                *(stage.stage, stage.state, stage.job),
                stage.queue
                + (f" ({stage.reason})" if stage.reason else "")
                + (f" {stage.nodes}" if stage.nodes else ""),
                f"{stage.step:,}" + (f" of {stage.total_steps:,}" if known else "") if stage.step or known else "",
                "" if stage.eta_seconds is None else show_duration(stage.eta_seconds),
                "" if stage.left_seconds is None else show_duration(stage.left_seconds),
                str(stage.restarts),
                ""
                if stage.saved_seconds_ago is None
                else f"step {stage.saved_step:,}, {show_duration(stage.saved_seconds_ago)} ago",
            )
        )
    lines = [f"run {status.run}", format_table(rows)]
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
    """The same for programs."""
    return {
        "run": str(status.run),
        "submission": None if status.submission is None else asdict(status.submission),
        "stages": [asdict(stage) for stage in status.stages],
        "notes": list(status.notes),
    }


def _recipe_of(run: Path) -> Recipe:
    for path in (run / "recipe.yaml", run / "slurm" / "recipe.yaml"):  # the latter until the first job begins
        if path.exists():
            return parse_recipe(path)
    raise UserError(f"{run} is no run folder: it has no recipe.yaml; give RUNS/NAME, for instance runs/digits")


def _stage_status(
    folder: RunFolder,
    stage: StageName,
    *,
    total: int | None,
    submission: Submission | None,
    queue: dict[str, Queued],
) -> StageStatus:
    record = folder.record(stage)
    speed, step = RecentSpeed(_SPEED_WINDOW_SECONDS), record.last_saved_step
    for row in iter_metrics(folder.stage(stage) / "metrics.jsonl"):
        speed.add(row.step, row.time)
        step = max(step, row.step)
    eta = math.nan if total is None or record.state != "running" else speed.seconds_left(total)
    job = "" if submission is None else submission.jobs.get(stage, "")
    queued = queue.get(job, Queued(""))
    ends = read_ends(folder.path / "slurm", stage)
    requeues = None
    if submission is not None and queued.left_seconds is not None and not math.isnan(eta):
        requeues = math.ceil(max(0.0, eta - queued.left_seconds) / submission.limit_seconds)
    return StageStatus(
        stage=stage,
        state=record.state,
        step=step,
        total_steps=total,
        eta_seconds=None if math.isnan(eta) else eta,
        restarts=max(0, _attempts(folder, stage) - 1),
        saved_step=record.last_saved_step,
        saved_seconds_ago=_checkpoint_age(folder, stage),
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
        return load_run_state(folder.stage(stage) / "mlflow.json").attempt
    except (OSError, ValueError):
        return 0


def _checkpoint_age(folder: RunFolder, stage: StageName) -> float | None:
    times = []
    for path in checkpoint_folders(folder.checkpoints(stage)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # pruned meanwhile
            continue
    return max(0.0, time.time() - max(times)) if times else None
