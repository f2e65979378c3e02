"""What this machine has of a cluster: SLURM's commands and partitions, DeepSpeed's launcher, ssh and pdsh.

None of it is missed on a machine of its own. SLURM's controller is asked once, for at most 10 seconds.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.child import Answer, ask
from launch.doctor.result import Check

_SLURM = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_SINFO = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G")
_SINFO_SECONDS = 10.0
_SHOWN_PARTITIONS = 8


@dataclass(frozen=True)
class Cluster:
    """Which commands there are, and what sinfo says."""

    commands: frozenset[str]
    sinfo: Answer | None
    has_deepspeed_launcher: bool


def read_cluster(*, which: Callable[[str], str | None] = shutil.which, run: Callable[..., Answer] = ask) -> Cluster:
    """Look for the commands on PATH, and ask sinfo where it is."""
    commands = frozenset(name for name in (*_SLURM, "ssh", "pdsh") if which(name))
    sinfo = run(_SINFO, limit_seconds=_SINFO_SECONDS) if "sinfo" in commands else None
    spec = importlib.util.find_spec("deepspeed")  # found, not imported
    folders = spec.submodule_search_locations if spec else None
    has_launcher = any(Path(folder, "launcher", "runner.py").exists() for folder in folders or ())
    return Cluster(commands, sinfo, has_launcher)


def cluster_checks(cluster: Cluster) -> list[Check]:
    """All verdicts."""
    return [check_slurm(cluster), check_deepspeed_launcher(cluster), check_remote_shells(cluster)]


def check_slurm(cluster: Cluster) -> Check:
    """Whether jobs can be submitted from here, and to what."""
    missing = [name for name in _SLURM if name not in cluster.commands]
    if len(missing) == len(_SLURM):
        return Check("SLURM", "absent", "its commands are not on PATH: this is no machine of a SLURM cluster")
    if missing:
        return Check(
            "SLURM",
            "note",
            f"{', '.join(missing)} missing, the other commands are on PATH",
            "shardvit submit wants them all: work on a login node, or load SLURM's module",
        )
    answer = cluster.sinfo
    if answer is None or not answer.is_success:
        said = answer.ending if answer else "was not asked"
        return Check(
            "SLURM",
            "note",
            f"its commands are here, but sinfo {said}",
            "nothing can be submitted from here: SLURM is not running, or its configuration names another host",
        )
    partitions = [show_partition(line) for line in answer.output.splitlines() if line.count("|") == 4]
    if not partitions:
        return Check("SLURM", "note", "no partitions are shown to you", "ask its administrators for an account")
    more = len(partitions) - _SHOWN_PARTITIONS
    shown = "; ".join(partitions[:_SHOWN_PARTITIONS]) + (f"; and {more} more" if more > 0 else "")
    return Check("SLURM", "fine", f"partitions {shown}")


def show_partition(line: str) -> str:
    """One of sinfo's lines in words; "*" marks the default partition."""
    name, state, limit, nodes, gres = line.strip().split("|")
    extra = "" if gres == "(null)" else f" with {gres}"
    down = "" if state == "up" else f", {state}"
    return f"{name} ({nodes} node{'s' * (nodes != '1')}{extra}, at most {limit}{down})"


def check_deepspeed_launcher(cluster: Cluster) -> Check:
    """What `shardvit run` starts processes with."""
    if cluster.has_deepspeed_launcher:
        return Check("deepspeed launcher", "fine", "python -m deepspeed.launcher.runner")
    return Check(
        "deepspeed launcher",
        "problem",
        "deepspeed is not installed",
        "pip install -e . in the repository",
    )


def check_remote_shells(cluster: Cluster) -> Check:
    """What starts processes on other hosts of a hostfile."""
    there = [name for name in ("pdsh", "ssh") if name in cluster.commands]
    if not there:
        return Check(
            "ssh, pdsh",
            "absent",
            "neither is on PATH",
            "several hosts with a hostfile need ssh; torchrun and srun do not",
        )
    return Check("ssh, pdsh", "fine", " and ".join(there))
