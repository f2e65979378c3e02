"""What srun tells the tasks of a step: their numbers, and where they meet. Pure; `launch.env` passes the environment.

Only inside a step is a process one of several: the batch script has SLURM_PROCID and SLURM_NTASKS too, but not
SLURM_STEP_NUM_TASKS. The default meeting place is the step's first node, on a port derived from job and step number:
20000 to 29999, below Linux's ephemeral ports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from data_shards.errors import UserError

FIRST_PORT, PORTS = 20_000, 10_000
_STEPS_OF_A_JOB = 16  # so many may run at the same time without meeting at another job's port


@dataclass(frozen=True)
class Step:
    """One task's view of its step."""

    task: int
    tasks: int
    local_task: int
    tasks_here: int  # the most tasks on any of its nodes
    first_host: str  # "" where SLURM does not say
    port: int


@dataclass(frozen=True)
class NodeShare:
    """What one srun task starts, where it has a whole node with several GPUs: a process for each GPU.

    All nodes must have as many GPUs.
    """

    node: int  # its number among the step's
    nodes: int
    processes: int  # on each node
    address: str  # of the first node
    port: int

    def names_of(self, local_rank: int) -> dict[str, str]:
        """What a launcher sets for one process."""
        return {
            "RANK": str(self.node * self.processes + local_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def read_step(environ: Mapping[str, str]) -> Step | None:
    """This task's step; None: srun did not start this process.

    Raises:
        UserError: a number is missing.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdigit():
        return None
    numbers: dict[str, int] = {}
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        text = environ.get(name, "")
        if not text.isdigit():
            raise UserError(
                f"srun started {tasks} tasks, but {name} is {text or 'missing'}: do not change SLURM's names"
            )
        numbers[name] = int(text)
    if numbers["SLURM_PROCID"] >= int(tasks):
        raise UserError(f"SLURM_PROCID {numbers['SLURM_PROCID']} is not below SLURM_STEP_NUM_TASKS {tasks}")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return Step(
        task=numbers["SLURM_PROCID"],
        tasks=int(tasks),
        local_task=numbers["SLURM_LOCALID"],
        tasks_here=most_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or int(tasks),
        first_host=first_host(nodes),
        port=meeting_port(job=numbers["SLURM_JOB_ID"], step=numbers["SLURM_STEP_ID"]),
    )


def gpu_of_task(step: Step, *, visible_gpus: int) -> int | None:
    """Which of the visible GPUs is this task's; None: there is none, or the one with the task's local number.

    A single one is taken as this task's own (--gpus-per-task, --gpu-bind): NCCL reports it if it is shared.

    Raises:
        UserError: the tasks of a node would have to share GPUs.
    """
    if visible_gpus == 0:
        return None
    if visible_gpus == 1 and step.tasks_here > 1:
        return 0
    if visible_gpus < step.tasks_here:
        raise UserError(
            f"srun started {step.tasks_here} tasks on a node, which see {visible_gpus} GPUs: give --ntasks-per-node "
            f"{visible_gpus}, or more GPUs"
        )
    return None


def first_host(nodes: str) -> str:
    """The first of a list such as "gpu[03-05,7],login1"; "" of an empty one."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches nothing, too
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


def most_tasks(per_node: str) -> int:
    """The most tasks on any node, of "8(x63),4"; 0 where nothing is said."""
    return max((int(count) for count in re.findall(r"(?:^|,)(\d+)", per_node)), default=0)


def meeting_port(*, job: int, step: int) -> int:
    """Where a step's tasks meet on its first node."""
    return FIRST_PORT + (job * _STEPS_OF_A_JOB + step) % PORTS
