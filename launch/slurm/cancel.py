"""`shardvit cancel`: end all jobs of a run, after the running ones have saved.

First records the jobs as cancelled, so that none requeues itself; then removes pending ones and signals running ones to
save. SLURM cancels those that take too long (with "now": all) and kills them half a minute later.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.commands import Slurm
from shardvit.launch.slurm.records import read_cancelled, read_submission, write_cancelled

_POLL_SECONDS = 2.0


def cancel_run(
    run: Path,
    *,
    slurm: Slurm,
    how: Literal["save", "now"] = "save",
    wait_seconds: float = 600.0,
    say: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """End a run's jobs ("now": without a checkpoint); returns how many were queued. UserError if the run was never
    submitted, or SLURM refuses."""
    submission = read_submission(run / "slurm")
    if submission is None:
        raise UserError(f"{run} was not submitted (it has no slurm/jobs.json): a run on this machine ends with Ctrl-C")
    jobs = list(submission.jobs.values())
    write_cancelled(run / "slurm", read_cancelled(run / "slurm") | set(jobs))
    alive = slurm.alive(jobs)
    count = len(alive)
    if not alive:
        say(f"{run}: no job is in the queue")
        return 0
    signalled: set[str] = set()
    waited = 0.0
    while alive and waited < wait_seconds:
        # Dependent jobs first, so that none starts when its predecessor is gone.
        idle = [job for job in reversed(jobs) if job in alive and (how == "now" or alive[job] == "PENDING")]
        if idle:
            slurm.cancel(idle)
            say(f"cancelled: {', '.join(idle)}")
        for job in (job for job, state in alive.items() if state == "RUNNING" and job not in signalled | set(idle)):
            slurm.cancel_waiting(job)
            slurm.signal(job)
            signalled.add(job)
            say(f"job {job} saves and ends (at most {wait_seconds:.0f} seconds; --now does not wait)")
        if how == "now":
            return count
        sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS
        alive = slurm.alive(jobs)
    if alive:
        slurm.cancel(list(alive))
        say(f"cancelled without a checkpoint: {', '.join(alive)} did not end within {wait_seconds:.0f} seconds")
    return count
