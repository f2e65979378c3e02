r"""Decide what follows when srun has ended: the stage is done, the job is requeued, or we give up.

    python -m shardvit.launch.slurm.after RUN --stage S --job ID --code N --signal none --queue RUNNING/None \
        --max-restarts 20

Exit code: 0 done, 75 requeue this job, 2 the user must change something, 1 given up or left to SLURM. Dependent jobs
run only after 0. Crashes are retried at most `--max-restarts` times; neither they nor stops (time limit, signal) are
retried after two attempts in a row without progress. SLURM requeues what it takes away (preemption, node failure,
`scontrol requeue`), which does not count. Cancelled jobs stay cancelled. No torch; costs a second.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.output import say
from shardvit.launch.local.processes import reason
from shardvit.launch.run.restarts import Restarts
from shardvit.launch.slurm.records import End, Kind, read_cancelled, read_ends, write_ends
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, StageName
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord

_TIME_LIMIT = "TimeLimit"


@dataclass(frozen=True)
class Ending:
    """How srun ended."""

    job: str  # job number
    code: int  # srun's exit code
    signal: str  # the first that the batch script received: none, USR1 (before the time limit) or TERM
    queue: str  # the job's STATE/REASON, such as RUNNING/None; empty: no answer from the controller

    @property
    def ended_by_slurm(self) -> bool:
        """True if SLURM ends the job for any reason but its time limit."""
        state, _, why = self.queue.partition("/")
        return state not in ("RUNNING", "") and why != _TIME_LIMIT

    @property
    def kind(self) -> Kind:
        if self.ended_by_slurm:
            return "taken away"
        if self.signal == "USR1" or _TIME_LIMIT in self.queue:
            return "stopped"
        # Preempted with a grace period: the processes got the signal, and SLURM requeues at its end.
        return "taken away" if self.code == EXIT_STOPPED or self.signal == "TERM" else "failed"


class Verdict(NamedTuple):
    """The exit code and the reason for it."""

    code: int
    sentence: str


def decide(
    ending: Ending, *, record: StageRecord, earlier: Sequence[End], max_restarts: int, cancelled: bool
) -> Verdict:
    """Decide about the job. Pure. `earlier`: ends of the stage's attempts since submission; `cancelled`: by a user."""
    if record.state == "done":
        return Verdict(0, "done")
    saved = f"step {record.last_saved_step:,}" if record.last_saved_step else "its beginning"
    if cancelled:
        return Verdict(EXIT_FAILED, f"cancelled: shardvit submit resumes from {saved}")
    if ending.ended_by_slurm:
        return Verdict(EXIT_FAILED, f"SLURM ends the job ({ending.queue}): it resumes from {saved}")
    if ending.code == EXIT_USER_ERROR:
        return Verdict(EXIT_USER_ERROR, "not finished: change what the message above names, then run shardvit submit")
    why = f"signal {ending.signal}" if ending.signal != "none" else reason(ending.code, out_of_memory=None)
    refusal = _refusal(ending, record=record, earlier=earlier, max_restarts=max_restarts)
    if refusal is None:
        return Verdict(EXIT_STOPPED, f"not finished ({why}): requeued, it resumes from {saved}")
    return Verdict(EXIT_FAILED, f"not finished ({why}) and given up: {refusal}; shardvit submit resumes from {saved}")


def _refusal(ending: Ending, *, record: StageRecord, earlier: Sequence[End], max_restarts: int) -> str | None:
    if ending.kind == "taken away":
        return None
    ends = [*((end.kind, end.last_saved_step) for end in earlier), (ending.kind, record.last_saved_step)]
    steps = [step for kind, step in ends if kind != "taken away"]
    if no_progress := _replay(steps, allowed=len(steps)):
        return no_progress + (" (is --time long enough to start and to save?)" if ending.kind == "stopped" else "")
    return _replay([step for kind, step in ends if kind == "failed"], allowed=max_restarts)


def _replay(steps: Sequence[int], *, allowed: int) -> str | None:
    """Apply the rule of `launch.run.restarts`; returns the refusal after the last failure, if any."""
    restarts, refusal = Restarts(allowed), None
    for step in steps:
        refusal = restarts.after_failure("", last_saved_step=step)
    return refusal


def judge(run: Path, *, stage: StageName, ending: Ending, max_restarts: int) -> Verdict:
    """Decide from the run folder and record the end there; UserError if a record is damaged."""
    slurm, record = run / "slurm", RunFolder(runs_root=run.parent, name=run.name).record(stage)
    # A task of a sweep's array, such as 12_3, is cancelled with the array, in the sweep's folder.
    listed = read_cancelled(slurm) | read_cancelled(run.parent / "slurm")
    earlier, cancelled = read_ends(slurm, stage), not listed.isdisjoint({ending.job, ending.job.partition("_")[0]})
    verdict = decide(ending, record=record, earlier=earlier, max_restarts=max_restarts, cancelled=cancelled)
    if verdict.code:
        end = End(ending.job, time.time(), ending.kind, ending.code, record.last_saved_step, verdict.sentence)
        write_ends(slurm, stage, [*earlier, end])
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the batch script's question, print the verdict and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shardvit.launch.slurm.after", description="Is a stage's job requeued?"
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--stage", required=True, choices=ALL_STAGES)
    parser.add_argument("--job", required=True)
    parser.add_argument("--code", required=True, type=int, help="srun's exit code")
    parser.add_argument("--signal", default="none", choices=("none", "USR1", "TERM"))
    parser.add_argument("--queue", default="", help="the job's STATE/REASON in the queue")
    parser.add_argument("--max-restarts", type=int, default=20)
    options = parser.parse_args(arguments)
    ending = Ending(options.job, options.code, options.signal, options.queue)
    try:
        verdict = judge(options.run, stage=options.stage, ending=ending, max_restarts=options.max_restarts)
    except (UserError, OSError) as error:
        verdict = Verdict(EXIT_USER_ERROR, str(error))
    say(f"{options.stage}: {verdict.sentence}")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
