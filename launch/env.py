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

from data_shards.errors import UserError
from pipeline.process import Place

SUPERVISOR_PID = "SHARDVIT_SUPERVISOR_PID"
RENDEZVOUS = "SHARDVIT_RENDEZVOUS"  # a folder, see `pipeline.rendezvous`
_PLACE_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", RENDEZVOUS),
)


def read_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Where the launcher (deepspeed, torchrun, accelerate, srun, or none) put this process.

    Raises:
        UserError: the variables contradict each other or are incomplete.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
        local_world_size = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")  # torchrun's and deepspeed's
    elif environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environ:
        names = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
        # The first is there only if --ntasks-per-node was given.
        local_world_size = environ.get("SLURM_NTASKS_PER_NODE") or _most_tasks(environ)
    else:
        return Place()
    values: dict[str, int] = {}
    for field, name in names.items():
        text = environ.get(name, "")
        if not text.isdigit():
            raise UserError(f"the launcher set {', '.join(names.values())} incompletely: {name} is {text or 'missing'}")
        values[field] = int(text)
    if values["rank"] >= values["world_size"]:
        raise UserError(f"{names['rank']} {values['rank']} is not below {names['world_size']} {values['world_size']}")
    place = Place(
        rank=values["rank"],
        world_size=values["world_size"],
        local_rank=values["local_rank"],
        local_world_size=int(local_world_size) if (local_world_size or "").isdigit() else values["world_size"],  # pyright: ignore[reportArgumentType]
    )
    if place.world_size == 1:  # nobody to meet
        return place
    if environ.get(RENDEZVOUS):
        return replace(place, rendezvous=Path(environ[RENDEZVOUS]))
    port = environ.get("MASTER_PORT", "")
    if "MASTER_ADDR" not in environ or not port.isdigit():
        raise UserError(
            "MASTER_ADDR and MASTER_PORT must name the first process's host and a free port: start through "
            "deepspeed or torchrun, or export both"
        )
    return replace(place, master_addr=environ["MASTER_ADDR"], master_port=int(port))


def _most_tasks(environ: Mapping[str, str]) -> str | None:
    """The most tasks on any node, of "8(x63),4"."""
    counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(counts, key=int, default=None)


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


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
