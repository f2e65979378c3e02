"""The only reader of the environment: which process this is, which GPUs there are, where to track.

Launchers differ in the names they set; here they become a `Place`. No torch: `shardvit run` asks too.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from launch.slurm_step import NodeShare, Step, gpu_of_task, read_step
from pipeline.ranks.place import Place

SUPERVISOR_PID = "SHARDVIT_SUPERVISOR_PID"
RENDEZVOUS = "SHARDVIT_RENDEZVOUS"  # a folder, see `pipeline.ranks.group`
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCHER_NAMES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's and accelerate's; deepspeed's
_PLACE_NAMES = (
    *_RANK_NAMES,
    *_LAUNCHER_NAMES,
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", RENDEZVOUS),
)


def read_place(environ: Mapping[str, str] = os.environ, *, gpus: int | None = None) -> Place:
    """Where the launcher (deepspeed, torchrun, accelerate, srun, or none) put this process.

    A launcher that srun started comes first; srun itself comes before names that somebody exported by hand.

    Args:
        environ: the environment.
        gpus: that this process sees; default: they are counted.

    Raises:
        UserError: the variables contradict each other or are incomplete.
    """
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
    if place.world_size == 1:  # nobody to meet
        return place
    meeting = rendezvous_folder(environ)
    if meeting is not None:
        return replace(place, rendezvous=meeting)
    address, port = _meeting_place(environ, step=step)
    return replace(place, master_addr=address, master_port=port)


def node_share(
    environ: Mapping[str, str] = os.environ, *, processes: int | Literal["auto"], gpus: int | None = None
) -> NodeShare | None:
    """What to start here, where srun gave each node one task and that task sees several GPUs; None: this is a process.

    Args:
        environ: the environment.
        processes: the recipe's; as many as there are tasks: every task is meant to be one.
        gpus: that this process sees; default: they are counted.
    """
    step = None if _has_launcher(environ) or "RANK" in environ else read_step(environ)
    if step is None or step.tasks_here != 1 or processes == step.tasks:
        return None
    count = num_gpus(environ) if gpus is None else gpus
    if count < 2:
        return None
    address, port = _meeting_place(environ, step=step)
    return NodeShare(step.task, step.tasks, processes=count, address=address, port=port)


def says_mistakes(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether it is for this process to say what all of them find wrong, also where `read_place` refuses."""
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


def _launchers_place(environ: Mapping[str, str]) -> Place:
    values: list[int] = []
    for name in _RANK_NAMES:
        text = environ.get(name, "")
        if not text.isdigit():
            raise UserError(f"the launcher set {', '.join(_RANK_NAMES)} incompletely: {name} is {text or 'missing'}")
        values.append(int(text))
    rank, world_size, local_rank = values
    if rank >= world_size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {world_size}")
    local_world_size = next((environ[name] for name in _LAUNCHER_NAMES if name in environ), "")
    return Place(rank, world_size, local_rank, int(local_world_size) if local_world_size.isdigit() else world_size)


def without_place(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without a launcher's or a batch script's numbers, for processes that get their own."""
    return {name: value for name, value in environ.items() if name not in _PLACE_NAMES}


def num_gpus(environ: Mapping[str, str] = os.environ, *, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a process here would see, without asking the driver."""
    there = len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and there:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    return there


def tracking_uri(environ: Mapping[str, str] = os.environ) -> str | None:
    """MLflow's server, if the user named one."""
    return environ.get("MLFLOW_TRACKING_URI") or None


def experiment_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """MLflow's experiment, if the user named one."""
    return environ.get("MLFLOW_EXPERIMENT_NAME") or None


def job_tags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Facts of this attempt, for MLflow's tags."""
    tags = {"shardvit.host": platform.node(), "mlflow.user": _user()}
    if "SLURM_JOB_ID" in environ:
        tags["shardvit.slurm_job_id"] = environ["SLURM_JOB_ID"]
    return tags


def supervisor_pid(environ: Mapping[str, str] = os.environ) -> int | None:
    """The `shardvit run` that started this process, if one did."""
    text = environ.get(SUPERVISOR_PID, "")
    return int(text) if text.isdigit() else None


def rendezvous_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the ranks meet, if their launcher made a folder for it."""
    return Path(environ[RENDEZVOUS]) if environ.get(RENDEZVOUS) else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
