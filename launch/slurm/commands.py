"""Call sbatch, squeue, scancel and sacct, one process per call. Only this file starts them."""

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.job_options import parse_time

_TIMEOUT_SECONDS = 60.0
_FORMAT = "%i|%T|%r|%L|%N"
After = Literal["afterok", "aftercorr", "afterany"]  # SLURM's; aftercorr: each array task after its counterpart
FINISHED = frozenset(  # in any other state a job is, or will again be, in the queue
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT")
)


@dataclass(frozen=True)
class Queued:
    """A job's entry in the queue."""

    state: str  # such as PENDING, RUNNING, COMPLETING or TIMEOUT
    reason: str = ""  # why it waits, or ended
    left_seconds: int | None = None  # until its time limit; None: not running, or no limit
    nodes: str = ""  # that it runs on

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED


class Slurm:
    """This machine's cluster. All methods but `history` raise UserError if SLURM refuses or does not answer."""

    def submit(self, script: Path, *, after: str | None, how: After = "afterok") -> str:
        """Submit a script; returns the job number. SLURM removes it if job `after` fails, unless `how` is afterany."""
        return self._call(submit_command(script, after=after, how=how)).strip().partition(";")[0]

    def queue(self, jobs: Iterable[str]) -> dict[str, Queued]:
        """The jobs that SLURM still knows; it forgets a job some minutes after its end."""
        try:
            text = self._ask(["squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}"], jobs)
        except UserError as error:
            if "Invalid job id" in str(error):  # SLURM knows none of them
                return {}
            raise
        return parse_queue(text)

    def alive(self, jobs: Iterable[str]) -> dict[str, str]:
        asked = list(jobs)
        queue = {job: queued for job, queued in self.queue(asked).items() if job in asked}
        return {job: queued.state for job, queued in queue.items() if not queued.is_finished}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Remove jobs from the queue; SLURM kills running ones after KillWait."""
        self._call(["scancel", *jobs])

    def cancel_waiting(self, job: str) -> None:
        """Remove an array's pending tasks; running ones stay."""
        self._call(["scancel", "--state=PENDING", job])

    def signal(self, job: str) -> None:
        """Send USR1, as before the time limit, to the batch script of a job or of each task of an array."""
        self._call(["scancel", "--signal=USR1", "--batch", job])

    def history(self, jobs: Iterable[str]) -> dict[str, str]:
        """Final states of jobs that left the queue; empty if the cluster keeps no accounts."""
        try:
            text = self._ask(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State"], jobs)
        except UserError:  # no accounting
            return {}
        rows = [line.split("|") for line in text.splitlines() if line.count("|") == 1]
        return {number: state.split()[0] for number, state in rows if state}

    def _ask(self, command: Sequence[str], jobs: Iterable[str]) -> str:
        numbers = sorted(set(jobs))
        return self._call([*command, f"--jobs={','.join(numbers)}"]) if numbers else ""

    def _call(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
        except FileNotFoundError:
            raise UserError(f"{command[0]} is not on this machine: run this where jobs are submitted from") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"SLURM has not answered {command[0]} for {_TIMEOUT_SECONDS:.0f} seconds") from None
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise UserError(f"{' '.join(command)}: {'; '.join(lines) or f'exit code {done.returncode}'}")
        return done.stdout


def submit_command(script: Path, *, after: str | None, how: After = "afterok") -> list[str]:
    """Build the sbatch command; `after`: number of the job to wait for."""
    dependency = [f"--dependency={how}:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *dependency, str(script)]


def parse_queue(text: str) -> dict[str, Queued]:
    """Parse squeue's lines (`_FORMAT`) by job number: an array's tasks as 12_3, and the most alive of them as 12."""
    found: dict[str, Queued] = {}
    for line in text.splitlines():
        number, state, why, left, nodes = line.split("|")
        left_seconds = parse_time(left) if state == "RUNNING" else None
        queued = Queued(state, "" if why == "None" else why, left_seconds, nodes)
        found[number] = queued
        array, is_task, _ = number.partition("_")
        if is_task and (array not in found or _aliveness(queued) > _aliveness(found[array])):
            found[array] = queued
    return found


def _aliveness(queued: Queued) -> int:
    return 0 if queued.is_finished else 1 if queued.state == "PENDING" else 2
