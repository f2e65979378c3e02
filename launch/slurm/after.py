"""What the batch script asks when srun is gone: is the stage done, is the job requeued, or is it given up?

    python -m launch.slurm.after RUN --stage S --job ID --code N --signal none --queue RUNNING/None --max-restarts 20

The answer is the exit code, and a sentence in the job's log: 0 done, 75 requeue this job, 2 somebody must change
something, 1 given up or not for us to decide. The jobs behind this one run after 0 alone. No torch; costs a second.

A stop (the time limit, a signal) and a crash both go on in a new attempt, a crash `--max-restarts` times at most, and
neither when two attempts in a row saved no later step. Jobs that SLURM takes away by itself (preemption, a node that
went down, `scontrol requeue`) are requeued by SLURM and count for nothing; those that somebody cancelled stay so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_shards.errors import UserError
from launch.endings import reason
from launch.run.restarts import Restarts
from launch.slurm.records import End, Kind, read_cancelled, read_ends, write_ends
from pipeline.recipe.schema import StageName
from pipeline.run_folder import RunFolder, StageRecord
from pipeline.vocabulary import ALL_STAGES, EXIT_STOPPED, EXIT_USER_ERROR

_TIME_LIMIT = "TimeLimit"


@dataclass(frozen=True)
class Ending:
    """How srun ended.

    Attributes:
        job: its number.
        code: srun's exit code.
        signal: the first one that the batch script received: none, USR1 (before the time limit) or TERM.
        queue: the job's state and reason in the queue, such as RUNNING/None.
    """

    job: str
    code: int
    signal: str
    queue: str

    @property
    def ended_by_slurm(self) -> bool:
        """Whether the job is being taken away, and not for its time limit alone."""
        state, _, why = self.queue.partition("/")
        return state not in ("RUNNING", "") and why != _TIME_LIMIT  # "": the controller did not answer

    @property
    def kind(self) -> Kind:
        """Of an attempt that did not finish."""
        if self.ended_by_slurm:
            return "taken away"
        if self.signal == "USR1" or _TIME_LIMIT in self.queue:
            return "stopped"
        # Preempted with a time of grace: the processes were told, and SLURM requeues when the grace is over.
        return "taken away" if self.code == EXIT_STOPPED or self.signal == "TERM" else "failed"


@dataclass(frozen=True)
class Verdict:
    """The exit code, and why."""

    code: int
    sentence: str


def decide(
    ending: Ending, *, record: StageRecord, earlier: Sequence[End], max_restarts: int, cancelled: bool
) -> Verdict:
    """What becomes of the job. Pure.

    Args:
        ending: of srun.
        record: the stage's.
        earlier: how attempts at this stage ended before, since it was submitted.
        max_restarts: how often a crashed stage is started again.
        cancelled: whether `shardvit cancel` asked for this.
    """
    if record.state == "done":
        return Verdict(0, "done")
    saved = f"step {record.last_saved_step:,}" if record.last_saved_step else "its beginning"
    if cancelled:
        return Verdict(1, f"cancelled: shardvit submit goes on from {saved}")
    if ending.ended_by_slurm:
        return Verdict(1, f"SLURM ends the job ({ending.queue}): it goes on from {saved}")
    if ending.code == EXIT_USER_ERROR:
        return Verdict(
            EXIT_USER_ERROR, "not finished: what is said above must be changed, then give shardvit submit again"
        )
    why = f"signal {ending.signal}" if ending.signal != "none" else reason(ending.code, out_of_memory=None)
    refusal = _refusal(ending, record=record, earlier=earlier, max_restarts=max_restarts)
    if refusal is None:
        return Verdict(EXIT_STOPPED, f"not finished ({why}): requeued, it goes on from {saved}")
    return Verdict(1, f"not finished ({why}) and given up: {refusal}; shardvit submit goes on from {saved}")


def _refusal(ending: Ending, *, record: StageRecord, earlier: Sequence[End], max_restarts: int) -> str | None:
    """Why another attempt would be in vain."""
    if ending.kind == "taken away":
        return None
    ends = [*((end.kind, end.last_saved_step) for end in earlier), (ending.kind, record.last_saved_step)]
    ends = [(kind, step) for kind, step in ends if kind != "taken away"]
    progress = _replay([step for _, step in ends], allowed=len(ends))
    if progress is not None:
        hint = " (is --time long enough to start, and to save?)" if ending.kind == "stopped" else ""
        return progress + hint
    return _replay([step for kind, step in ends if kind == "failed"], allowed=max_restarts)


def _replay(steps: Sequence[int], *, allowed: int) -> str | None:
    """The rule of `launch.run.restarts`, for the last of these failures."""
    restarts, refusal = Restarts(allowed), None
    for step in steps:
        refusal = restarts.after_failure("", last_saved_step=step)
    return refusal


def judge(run: Path, *, stage: StageName, ending: Ending, max_restarts: int) -> Verdict:
    """Decide from what the run folder holds, and note the end there.

    Raises:
        UserError: a record is damaged.
    """
    folder = RunFolder(runs_root=run.parent, name=run.name)
    slurm = run / "slurm"
    record, earlier = folder.record(stage), read_ends(slurm, stage)
    verdict = decide(
        ending,
        record=record,
        earlier=earlier,
        max_restarts=max_restarts,
        cancelled=ending.job in read_cancelled(slurm),
    )
    if verdict.code:
        end = End(
            job=ending.job,
            time=time.time(),
            kind=ending.kind,
            code=ending.code,
            last_saved_step=record.last_saved_step,
            sentence=verdict.sentence,
        )
        write_ends(slurm, stage, [*earlier, end])
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the batch script."""
    parser = argparse.ArgumentParser(prog="python -m launch.slurm.after", description="Is a stage's job requeued?")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--stage", required=True, choices=ALL_STAGES)
    parser.add_argument("--job", required=True)
    parser.add_argument("--code", required=True, type=int, help="srun's exit code")
    parser.add_argument("--signal", default="none", choices=("none", "USR1", "TERM"))
    parser.add_argument("--queue", default="", help="the job's STATE/REASON in the queue")
    parser.add_argument("--max-restarts", type=int, default=20)
    options = parser.parse_args(arguments)
    ending = Ending(job=options.job, code=options.code, signal=options.signal, queue=options.queue)
    try:
        verdict = judge(options.run, stage=options.stage, ending=ending, max_restarts=options.max_restarts)
    except (UserError, OSError) as error:
        print(f"shardvit: {options.stage}: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    print(f"shardvit: {options.stage}: {verdict.sentence}", file=sys.stderr, flush=True)
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
