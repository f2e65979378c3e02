"""The options of `shardvit submit`. To add one with a value, add a field to `JobOptions` and nothing else.

Command line, checks, a site file's [sbatch] keys and #SBATCH lines are derived from it. Imports nothing heavy.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_FROM_SITE = Parameter(help="As sbatch's; default: the site file's.")


def parse_time(text: str) -> int | None:
    """Seconds of "90" or "90:00" (minutes), "24:00:00", "2-12", "2-12:30" or "2-12:30:00"; else None (UNLIMITED)."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        return ((int(found["days"]) * 24 + first) * 60 + second) * 60 + third
    if found["third"] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # minutes[:seconds]


def limit_seconds(text: str) -> int:
    """Seconds of a time limit; UserError if it is zero or not a time."""
    seconds = parse_time(text)
    if seconds is None:
        raise UserError(
            f"--time: {text!r} is not a time limit; write 24:00:00, 2-12:00:00 (two and a half days) or minutes"
        )
    if seconds == 0:
        raise UserError(f"--time: {text!r} is zero; write 24:00:00, for instance")
    return seconds


def format_limit(seconds: int) -> str:
    """Format seconds for `#SBATCH --time`."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


@dataclass(frozen=True)
class Sbatch:
    """How an option reaches SLURM."""

    flag: str = ""  # sbatch's flag, for values other than None and 0; empty: not passed to sbatch
    least: int | None = None  # the smallest number allowed
    swap_head: int | None = None  # upper bound in stage swap_head, which is one process and takes seconds
    in_site: bool = False  # a site file's [sbatch] may set the default
    srun: bool = False  # srun needs it too
    read: Callable[[Any], Any] | None = None  # parses the option's text into a number
    show: Callable[[Any], str] = str  # formats the number for sbatch


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `shardvit submit`, in the order of the #SBATCH lines."""

    nodes: Annotated[int, Parameter(help="Nodes of a training stage."), Sbatch("nodes", least=1, swap_head=1)] = 1
    tasks_per_node: Annotated[
        int | None,
        Parameter(help="Processes of a node; default: one for each GPU."),
        Sbatch("ntasks-per-node", least=1, swap_head=1),
    ] = None
    gpus_per_node: Annotated[
        int,
        Parameter(help="GPUs of a node, one process each; 0: train on CPUs."),
        Sbatch("gpus-per-node", least=0, swap_head=1),  # not 0: a GPU partition may refuse a job without GPUs
    ] = 0
    cpus_per_task: Annotated[
        int | None,
        Parameter(help="Cores of each process; default: the cluster's."),
        Sbatch("cpus-per-task", least=1, srun=True),  # since SLURM 22.05 srun does not inherit it
    ] = None
    time: Annotated[
        str,
        Parameter(help="Time limit of one job, such as 24:00:00."),
        Sbatch("time", read=limit_seconds, show=format_limit, swap_head=1800),  # a cold import may take minutes
    ]
    partition: Annotated[str | None, _FROM_SITE, Sbatch("partition", in_site=True)] = None
    account: Annotated[str | None, _FROM_SITE, Sbatch("account", in_site=True)] = None
    qos: Annotated[str | None, _FROM_SITE, Sbatch("qos", in_site=True)] = None
    constraint: Annotated[str | None, _FROM_SITE, Sbatch("constraint", in_site=True)] = None
    container: Annotated[
        str | None, Parameter(help="Image in which the processes run (pyxis or apptainer, see --site)."), Sbatch()
    ] = None
    signal_seconds: Annotated[
        int,
        Parameter(help="The processes save this long before the time limit."),
        Sbatch(least=1),
    ] = 180
    max_restarts: Annotated[int, Parameter(help="How often a crashed stage is restarted."), Sbatch(least=0)] = 20

    def check(self) -> None:
        """UserError if a number is too small, or a text is empty or has several lines."""
        for name, entry in table().items():
            value: Any = getattr(self, name)
            option = "--" + name.replace("_", "-")
            if entry.read is not None:
                entry.read(value)
            elif isinstance(value, str):
                if not value or re.search(r"[\n\r\0]", value):
                    raise UserError(f"{option}: it must be one line of text")
            elif entry.least is not None and value is not None and value < entry.least:
                raise UserError(f"{option}: it is {value}; give {entry.least} or more")

    def flags(self, *, stage: str) -> Iterator[tuple[Sbatch, str]]:
        for name, entry in table().items():
            value = getattr(self, name)
            if entry.read is not None:
                value = entry.read(value)
            if entry.swap_head is not None and stage == "swap_head":
                value = min(value, entry.swap_head)
            if entry.flag and value:
                yield entry, entry.show(value)


@cache
def table() -> dict[str, Sbatch]:
    """The `Sbatch` entry of each field of `JobOptions`, in order."""
    hints = get_type_hints(JobOptions, include_extras=True)
    return {name: next(part for part in hint.__metadata__ if isinstance(part, Sbatch)) for name, hint in hints.items()}
