"""What is asked of SLURM for the stages of a run: `shardvit submit`'s options, completed by the site file. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from data_shards.errors import UserError
from launch.slurm.site import ContainerSite, Site

SWAP_HEAD_SECONDS = 1800  # arithmetic on saved weights: seconds, and minutes to import from a cold file server
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_MOST_SIGNAL_SECONDS = 65_535  # SLURM's


@dataclass(frozen=True)
class Asked:
    """The command line's options, as they were given."""

    nodes: int
    time: str
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    container: str | None = None
    signal_seconds: int = 180
    max_restarts: int = 20


@dataclass(frozen=True)
class SlurmJob:
    """What every stage of a run is submitted with.

    Attributes:
        limit_seconds: of one job; a stage may take several.
        signal_seconds: so long before the limit the processes are told to save.
        max_restarts: how often a stage that crashed is started again.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    limit_seconds: int
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    signal_seconds: int = 180
    max_restarts: int = 20
    container: ContainerSite | None = None
    site: Site = field(default_factory=Site)

    @property
    def processes(self) -> int:
        """Of a training stage, over all nodes."""
        return self.nodes * self.tasks_per_node


def job_of(asked: Asked, *, site: Site) -> SlurmJob:
    """Complete and check what was asked for.

    Raises:
        UserError: it contradicts itself.
    """
    for name, number, least in (
        ("nodes", asked.nodes, 1),
        ("gpus-per-node", asked.gpus_per_node, 0),
        ("tasks-per-node", asked.tasks_per_node, 1),
        ("cpus-per-task", asked.cpus_per_task, 1),
        ("signal-seconds", asked.signal_seconds, 1),
        ("max-restarts", asked.max_restarts, 0),
    ):
        if number is not None and number < least:
            raise UserError(f"--{name}: it is {number}; give {least} or more")
    for name in ("partition", "account", "qos", "constraint", "container"):
        text = getattr(asked, name)
        if text is not None and (not text or re.search(r"[\n\r\0]", text)):
            raise UserError(f"--{name}: it must be one line of text")
    if asked.gpus_per_node and asked.tasks_per_node not in (None, asked.gpus_per_node):
        raise UserError(
            f"--tasks-per-node: it is {asked.tasks_per_node}, but every GPU has one process: leave it out, or give "
            "--gpus-per-node 0 to train on CPUs"
        )
    if not asked.gpus_per_node and asked.tasks_per_node is None:
        raise UserError("--gpus-per-node: give the GPUs of a node, or for a cluster without GPUs --tasks-per-node")
    limit = limit_seconds(asked.time)
    if asked.signal_seconds >= min(limit, _MOST_SIGNAL_SECONDS + 1):
        raise UserError(
            f"--signal-seconds: it is {asked.signal_seconds}, and the job has {limit} seconds (--time {asked.time}): "
            "the signal to save must come before the end, and after the start"
        )
    container = site.container
    if asked.container is not None:
        container = container.model_copy(update={"image": asked.container}) if container else None
        container = container or ContainerSite(image=asked.container)
    return SlurmJob(
        nodes=asked.nodes,
        tasks_per_node=asked.tasks_per_node or asked.gpus_per_node,
        gpus_per_node=asked.gpus_per_node,
        limit_seconds=limit,
        cpus_per_task=asked.cpus_per_task,
        partition=asked.partition or site.sbatch.partition,
        account=asked.account or site.sbatch.account,
        qos=asked.qos or site.sbatch.qos,
        constraint=asked.constraint or site.sbatch.constraint,
        signal_seconds=asked.signal_seconds,
        max_restarts=asked.max_restarts,
        container=container,
        site=site,
    )


def limit_seconds(text: str) -> int:
    """A time limit as SLURM writes it: "90" and "90:00" are minutes, "24:00:00", "2-12", "2-12:30", "2-12:30:00".

    Raises:
        UserError: it is none, or nothing.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"--time: {text!r} is no time limit; write 24:00:00, 2-12:00:00 (two and a half days) or minutes"
        )
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        seconds = ((int(found["days"]) * 24 + first) * 60 + second) * 60 + third
    elif found["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:  # minutes[:seconds]
        seconds = first * 60 + second
    if seconds == 0:
        raise UserError(f"--time: {text!r} is no time at all; write 24:00:00, for instance")
    return seconds


def format_limit(seconds: int) -> str:
    """The same for `#SBATCH --time`."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
