"""Choose hosts and GPUs: a hostfile in the format of DeepSpeed and MPI, `--include` and `--exclude`.

    worker-0 slots=8  # a comment
    worker-1 slots=8

A slot is one process with one GPU. `--include worker-0@worker-1:0,2` takes all slots of worker-0 and two of worker-1;
`--exclude` takes all others. Order follows the hostfile: the first host has rank 0. Contacts no host.
"""

import difflib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>[0-9]{1,20})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")  # no ssh option, nothing that a shell would expand
_MOST_SLOTS = 1024  # per machine; the largest have a few dozen GPUs


@dataclass(frozen=True)
class Host:
    """A machine and the GPUs to use on it."""

    name: str  # name or address, as passed to ssh
    slots: tuple[int, ...]  # GPU numbers, from 0


@dataclass(frozen=True)
class Fleet:
    """The hosts of a run and their rendezvous."""

    hosts: tuple[Host, ...]  # in rank order
    source: Path  # the hostfile
    master_addr: str = ""  # first host, as seen by the others; empty: found by the preflight
    master_port: int = 0  # rank 0 listens here; 0: the first host's system chooses

    @property
    def processes(self) -> int:
        return sum(len(host.slots) for host in self.hosts)


@Parameter(name="*")
@dataclass(frozen=True)
class HostOptions:
    """Flags of `shardvit run` for several machines."""

    hostfile: Annotated[
        Path | None, Parameter(help="Run on several machines: a file of lines HOST slots=8, as deepspeed's.")
    ] = None
    include: Annotated[str, Parameter(help="Only these of --hostfile, such as host0@host1:0,1.")] = ""
    exclude: Annotated[str, Parameter(help="Not these of --hostfile, in the same form.")] = ""
    master_addr: Annotated[
        str, Parameter(help="With --hostfile: address under which the other hosts reach the first one.")
    ] = ""
    master_port: Annotated[
        int, Parameter(help="With --hostfile: port that rank 0 listens on; 0: the system chooses.")
    ] = 0

    def fleet(self) -> Fleet | None:
        """Parse the flags; None: this machine only. UserError if the hostfile or a flag is wrong, or ssh is missing."""
        if self.hostfile is None:
            if self != HostOptions():
                raise UserError("--include, --exclude, --master-addr and --master-port need --hostfile: give it, too")
            return None
        file = str(self.hostfile)
        try:
            text = self.hostfile.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UserError(f"--hostfile {file} cannot be read ({why}): name a file of lines HOST slots=8") from None
        hosts = select(parse_hostfile(text, source=file), include=self.include, exclude=self.exclude, source=file)
        if shutil.which("ssh") is None:
            raise UserError("--hostfile: there is no ssh on this machine: install OpenSSH's client")
        if not 0 <= self.master_port < 65536:
            raise UserError(f"--master-port: it is {self.master_port}; give 1 to 65535, or leave it out")
        return Fleet(hosts, self.hostfile, master_addr=self.master_addr, master_port=self.master_port)


def parse_hostfile(text: str, *, source: str) -> tuple[Host, ...]:
    """Parse the hosts in file order; UserError if a line is malformed, a host is listed twice, or there is none."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is not None and "@" in found["name"]:
            user, _, name = found["name"].partition("@")
            raise UserError(
                f"{source}, line {number}: {found['name']}: write {name}, and put `User {user}` into ~/.ssh/config"
            )
        if found is None or not _NAME.fullmatch(found["name"]):
            raise UserError(f"{source}, line {number}: {content!r} is not a host with its GPUs: write HOST slots=8")
        name, count = found["name"], int(found["slots"])
        if name in hosts:
            raise UserError(f"{source}, line {number}: {name} is listed twice: give it one line with all its slots")
        if count == 0:
            raise UserError(f"{source}, line {number}: {name} has slots=0: give 1 or more, or leave the host out")
        if count > _MOST_SLOTS:
            raise UserError(f"{source}, line {number}: {name} has slots={count}: give {_MOST_SLOTS:,} at most")
        hosts[name] = Host(name, tuple(range(count)))
    if not hosts:
        raise UserError(f"{source} names no host: write a line such as: worker-0 slots=8")
    return tuple(hosts.values())


def select(
    hosts: Sequence[Host], *, include: str = "", exclude: str = "", source: str = "the hostfile"
) -> tuple[Host, ...]:
    """Keep only `include`, or all but `exclude`, each NAME[:SLOT[,SLOT ...]] joined by @. UserError if both are given,
    a name or slot does not exist, or nothing is left."""
    if include and exclude:
        raise UserError("--include, --exclude: give one of them, not both")
    if not include and not exclude:
        return tuple(hosts)
    option = "--include" if include else "--exclude"
    named = _parse_filter(include or exclude, option=option, hosts=hosts, source=source)
    left = []
    for host in hosts:
        slots = named.get(host.name, frozenset())
        kept = tuple(slot for slot in host.slots if (slot in slots) == (option == "--include"))
        if kept:
            left.append(replace(host, slots=kept))
    if not left:
        raise UserError(f"{option} {include or exclude}: no slot of {source} is left; name fewer")
    return tuple(left)


def _parse_filter(text: str, *, option: str, hosts: Sequence[Host], source: str) -> dict[str, frozenset[int]]:
    by_name = {host.name: host for host in hosts}
    found: dict[str, frozenset[int]] = {}
    for part in text.split("@"):
        name, has_slots, numbers = (part, "", "") if part in by_name else part.partition(":")
        host = by_name.get(name)
        if host is None:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(by_name)}"
            raise UserError(f"{option} {text}: {source} has no host {name!r}: {hint}")
        if not has_slots:
            found[name] = frozenset(host.slots)
            continue
        if not re.fullmatch(r"[0-9]{1,20}(,[0-9]{1,20})*", numbers):
            raise UserError(f"{option} {text}: {numbers!r} are not slots: write {name}:0,2")
        slots = frozenset(map(int, numbers.split(",")))
        absent = sorted(slots - set(host.slots))
        if absent:
            raise UserError(
                f"{option} {text}: {name} has no slot {absent[0]}: {source} gives it {len(host.slots)}, from 0"
            )
        found[name] = found.get(name, frozenset()) | slots
    return found
