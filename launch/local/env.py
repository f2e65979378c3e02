"""Read all environment variables: rank and world size from any launcher, visible GPUs, tracking. Imports no torch.

Only srun steps have SLURM_STEP_NUM_TASKS; batch scripts also have SLURM_PROCID and SLURM_NTASKS. Tasks rendezvous on
the step's first node, at a port from job and step number (20000 to 29999, below Linux's ephemeral ports).
"""

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardvit.data_shards.control_groups import user_name
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import TimeLimit

SUPERVISOR_PID = "SHARDVIT_SUPERVISOR_PID"
PATHS_FILE = "SHARDVIT_DATA"
PICTURES = "SHARDVIT_PICTURES"  # off: no pictures during training, whatever the recipe says
RUN_MARK = "SHARDVIT_RUN_ON_HOSTS"  # the run folder, for ranks started by `launch.hosts`
RENDEZVOUS = "SHARDVIT_RENDEZVOUS"  # a folder, see `pipeline.ranks.group`
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_STEP_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_LAUNCHER_NAMES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's and accelerate's; deepspeed's
_PLACE_NAMES = (
    *_RANK_NAMES,
    *_LAUNCHER_NAMES,
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", RENDEZVOUS),
)
_LONGEST_JOB_SECONDS = 366 * 86_400  # beyond it, the job has no limit
FIRST_PORT, PORTS = 20_000, 10_000
_STEPS_OF_A_JOB = 16  # simultaneous steps with ports of their own


@dataclass(frozen=True)
class Step:
    """A task's view of its srun step."""

    task: int
    tasks: int
    local_task: int
    tasks_here: int  # maximum over the step's nodes
    first_host: str  # "" if SLURM does not say
    port: int


@dataclass(frozen=True)
class NodeShare:
    """One process per GPU, started by one srun task per node. All nodes need equally many GPUs."""

    node: int  # its index in the step
    nodes: int
    processes: int  # on each node
    address: str  # of the first node
    port: int

    def environ_of(self, local_rank: int) -> dict[str, str]:
        return {
            "RANK": str(self.node * self.processes + local_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def paths_file(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file with each role's shards, from --data or else SHARDVIT_DATA, if any."""
    named = environ.get(PATHS_FILE, "")
    return given or (Path(named) if named else None)


def read_place(environ: Mapping[str, str] = os.environ, *, gpus: int | None = None) -> Place:
    """Find this process's place from deepspeed, torchrun, accelerate, srun, or no launcher. A launcher inside srun
    overrides srun, and srun overrides exported variables. UserError if variables are contradictory or incomplete."""
    step = None if _has_launcher(environ) else read_step(environ)
    if step is not None and step.tasks > 1:
        world_size = environ.get("WORLD_SIZE", str(step.tasks))
        if world_size != str(step.tasks):
            raise UserError(
                f"WORLD_SIZE is {world_size}, but srun started {step.tasks} tasks: leave WORLD_SIZE out, or give "
                f"--ntasks {world_size}"
            )
        place = Place(
            rank=step.task,
            world_size=step.tasks,
            local_rank=step.local_task,
            local_world_size=step.tasks_here,
            gpu=gpu_of_task(step, visible_gpus=num_gpus(environ) if gpus is None else gpus),
        )
    elif "RANK" in environ or "WORLD_SIZE" in environ:
        place = _launchers_place(environ)
    else:
        return Place()
    if place.world_size == 1:  # no rendezvous
        return place
    if RUN_MARK in environ or "SLURM_STEP_NUM_TASKS" in environ:  # srun's output, or that of `shardvit run`
        place = replace(place, log="of the run")
    if (meeting := rendezvous_folder(environ)) is not None:
        return replace(place, rendezvous=meeting)
    address, port = _meeting_place(environ, step=step)
    return replace(place, master_addr=address, master_port=port)


def node_share(
    environ: Mapping[str, str] = os.environ, *, processes: int | Literal["auto"], gpus: int | None = None
) -> NodeShare | None:
    """Plan a node's processes if srun started one task per node that sees several GPUs. None: this process is itself a
    rank, also if the recipe's `processes` equals the number of tasks."""
    step = None if _has_launcher(environ) or "RANK" in environ else read_step(environ)
    if step is None or step.tasks_here != 1 or processes == step.tasks:
        return None
    count = num_gpus(environ) if gpus is None else gpus
    if count < 2:
        return None
    address, port = _meeting_place(environ, step=step)
    return NodeShare(step.task, step.tasks, processes=count, address=address, port=port)


def says_mistakes(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process reports errors that all ranks find; works even if `read_place` fails."""
    by_srun = "SLURM_STEP_NUM_TASKS" in environ and not _has_launcher(environ)
    return environ.get("SLURM_PROCID" if by_srun else "RANK", "0") == "0"


def _has_launcher(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _LAUNCHER_NAMES)


def _meeting_place(environ: Mapping[str, str], *, step: Step | None) -> tuple[str, int]:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if step is not None:
        address, port = address or step.first_host, port or str(step.port)
    if not address or not port.isdigit():
        raise UserError(
            "MASTER_ADDR and MASTER_PORT must name the first process's host and a free port: start through "
            "deepspeed, torchrun or srun, or export both"
        )
    return address, int(port)


def _numbers(environ: Mapping[str, str], names: Sequence[str], *, problem: str) -> list[int]:
    for name in names:
        if not environ.get(name, "").isdigit():
            raise UserError(f"{problem}: {name} is {environ.get(name) or 'missing'}")
    return [int(environ[name]) for name in names]


def _launchers_place(environ: Mapping[str, str]) -> Place:
    problem = f"the launcher set {', '.join(_RANK_NAMES)} incompletely"
    rank, world_size, local_rank = _numbers(environ, _RANK_NAMES, problem=problem)
    if rank >= world_size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {world_size}")
    local_world_size = next((environ[name] for name in _LAUNCHER_NAMES if name in environ), "")
    return Place(rank, world_size, local_rank, int(local_world_size) if local_world_size.isdigit() else world_size)


def without_place(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without a launcher's or batch script's rank variables."""
    return {name: value for name, value in environ.items() if name not in _PLACE_NAMES}


def num_gpus(environ: Mapping[str, str] = os.environ, *, devices: Path = Path("/dev")) -> int:
    """Count the visible NVIDIA GPUs without calling the driver."""
    there = len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and there:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    return there


def accelerator() -> dict[str, str]:
    """Return what DeepSpeed must be told where there is no GPU: else it warns in every process."""
    return {} if num_gpus() else {"DS_ACCELERATOR": "cpu"}


def tracking_uri(
    environ: Mapping[str, str] = os.environ, *, form: Literal["an address", "any"] = "an address"
) -> str | None:
    """Return the user's MLflow server or database, if any; UserError if MLflow would take it for a folder."""
    uri = environ.get("MLFLOW_TRACKING_URI") or None
    if form != "any" and uri is not None and "://" not in uri and not uri.startswith(("databricks", "uc", "file:")):
        shown = one_line(uri.rpartition("@")[2])
        raise UserError(f"MLFLOW_TRACKING_URI is {shown!r}: give an address, http://HOST:PORT or sqlite:///FILE")
    return uri


def omp_num_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the threads per process that the user or a launcher requests, if any."""
    text = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) else None


def experiment_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the user's MLflow experiment, if any."""
    return environ.get("MLFLOW_EXPERIMENT_NAME") or None


def pictures_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if pictures may be drawn during training; UserError if SHARDVIT_PICTURES is neither auto nor off."""
    value = environ.get(PICTURES, "auto")
    if value not in ("auto", "off"):
        raise UserError(f"{PICTURES} is {value!r}: set it to auto or off")
    return value == "auto"


def job_tags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return MLflow tags of this attempt: host, user, SLURM job."""
    tags = {"shardvit.host": platform.node(), "mlflow.user": user_name()}
    if "SLURM_JOB_ID" in environ:
        tags["shardvit.slurm_job_id"] = environ["SLURM_JOB_ID"]
    return tags


def time_limit(environ: Mapping[str, str] = os.environ, *, now: float | None = None) -> TimeLimit | None:
    """Return the SLURM job's time limit; None if unknown or over. `now` in unix seconds, by default the clock's."""
    end, start = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_START_TIME", "")
    now = time.time() if now is None else now
    if not end.isdecimal() or not 0 < int(end) - now < _LONGEST_JOB_SECONDS:
        return None
    began = int(start) if start.isdecimal() and int(start) < int(end) else now
    return TimeLimit(ends_at=float(end), seconds=int(end) - began)


def supervisor_pid(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the PID of the `shardvit run` that started this process, if any."""
    text = environ.get(SUPERVISOR_PID, "")
    return int(text) if text.isdigit() else None


def rendezvous_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder where the ranks rendezvous, if the launcher made one."""
    return Path(environ[RENDEZVOUS]) if environ.get(RENDEZVOUS) else None


def read_step(environ: Mapping[str, str]) -> Step | None:
    """Read this task's step; None if not started by srun, UserError if a number is missing."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdigit():
        return None
    problem = f"srun started {tasks} tasks, but its variables are incomplete or changed"
    task, local_task, job, step = _numbers(environ, _STEP_NAMES, problem=problem)
    if task >= int(tasks):
        raise UserError(f"SLURM_PROCID {task} is not below SLURM_STEP_NUM_TASKS {tasks}")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return Step(
        task=task,
        tasks=int(tasks),
        local_task=local_task,
        tasks_here=most_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or int(tasks),
        first_host=first_host(nodes),
        port=meeting_port(job=job, step=step),
    )


def gpu_of_task(step: Step, *, visible_gpus: int) -> int | None:
    """Choose this task's GPU; None: no GPU, or use the local task number. A single visible GPU is the task's own
    (--gpus-per-task, --gpu-bind); NCCL reports it if shared. UserError if tasks of a node would share GPUs."""
    if visible_gpus == 1 and step.tasks_here > 1:
        return 0
    if 0 < visible_gpus < step.tasks_here:
        raise UserError(
            f"srun started {step.tasks_here} tasks on a node, which see {visible_gpus} GPUs: give --ntasks-per-node "
            f"{visible_gpus}, or more GPUs"
        )
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[03-05,7],login1"; "" for ""."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it also matches ""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


def most_tasks(per_node: str) -> int:
    """Return the largest number of tasks on a node from text such as "8(x63),4"; 0 for ""."""
    return max(map(int, re.findall(r"(?:^|,)(\d+)", per_node)), default=0)


def meeting_port(*, job: int, step: int) -> int:
    """Return the port where a step's tasks rendezvous on its first node."""
    return FIRST_PORT + (job * _STEPS_OF_A_JOB + step) % PORTS
