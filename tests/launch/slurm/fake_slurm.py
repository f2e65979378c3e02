"""A cluster that does as the test says, in the place of SLURM's commands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.commands import After, Queued, Slurm


@dataclass
class FakeSlurm(Slurm):
    """Notes what it was told."""

    states: dict[str, Queued] = field(default_factory=dict)  # of the jobs, as the queue shows them
    refuse: int = 0  # the number, from 1, of the submission that is refused
    submitted: list[tuple[str, str | None]] = field(default_factory=list)
    how: list[After] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    signalled: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)  # of what waits
    old: dict[str, str] = field(default_factory=dict)
    away: bool = False

    def submit(self, script: Path, *, after: str | None, how: After = "afterok") -> str:
        assert script.exists()
        if len(self.submitted) + 1 == self.refuse:
            raise UserError("sbatch: error: Invalid account")
        self.submitted.append((script.name, after))
        self.how.append(how)
        job = str(100 + len(self.submitted))
        self.states[job] = Queued("PENDING")
        return job

    def queue(self, jobs: Iterable[str]) -> dict[str, Queued]:
        if self.away:
            raise UserError("squeue is not on this machine")
        return {job: self.states[job] for job in jobs if job in self.states}

    def cancel(self, jobs: Sequence[str]) -> None:
        self.cancelled += jobs
        for job in jobs:
            self.states[job] = Queued("CANCELLED")

    def cancel_waiting(self, job: str) -> None:
        self.emptied.append(job)

    def signal(self, job: str) -> None:
        assert job in self.emptied  # else an array's next task would start
        self.signalled.append(job)

    def history(self, jobs: Iterable[str]) -> dict[str, str]:
        return {job: self.old[job] for job in jobs if job in self.old}
