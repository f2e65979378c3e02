"""Which hosts and which of their GPUs: a hostfile as DeepSpeed and MPI read it, `--include` and `--exclude`. Pure.

    # a comment
    worker-0 slots=8
    worker-1 slots=8

A slot is one process with one GPU. `--include worker-0@worker-1:0,2` takes all slots of worker-0 and two of worker-1;
`--exclude` takes all others. The order is the hostfile's: the first host has rank 0. Costs nothing; does not know
whether such hosts exist (`preflight` does).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_shards.errors import UserError

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")  # no option of ssh's, nothing that a shell or pdsh would expand


@dataclass(frozen=True)
class Host:
    """A machine and the GPUs of it that are to be used."""

    name: str  # as ssh takes it: a name or an address
    slots: tuple[int, ...]  # numbers of GPUs, from 0


def num_slots(hosts: Sequence[Host]) -> int:
    """How many processes the hosts start together."""
    return sum(len(host.slots) for host in hosts)


def parse_hostfile(text: str, *, source: str) -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order.

    Args:
        text: what is in the file.
        source: its name, for messages.

    Raises:
        UserError: a line that cannot be read, a host that stands there twice, or none at all.
    """
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
            raise UserError(f"{source}, line {number}: {name} stands there twice: give it one line with all its slots")
        if count == 0:
            raise UserError(f"{source}, line {number}: {name} has slots=0: give 1 or more, or leave the host out")
        hosts[name] = Host(name, tuple(range(count)))
    if not hosts:
        raise UserError(f"{source} names no host: write a line such as: worker-0 slots=8")
    return tuple(hosts.values())


def select(
    hosts: Sequence[Host], *, include: str = "", exclude: str = "", source: str = "the hostfile"
) -> tuple[Host, ...]:
    """The hosts and slots that are left, in the order of `hosts`.

    Args:
        hosts: all.
        include: NAME[:SLOT[,SLOT ...]], joined by @: only these.
        exclude: the same, all but these. One of the two at most.
        source: the hostfile's name, for messages.

    Raises:
        UserError: both are given, a name or slot is not there, or nothing is left.
    """
    if include and exclude:
        raise UserError("--include, --exclude: give one of them, each says all by itself")
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
    """Host -> its named slots."""
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
        if not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise UserError(f"{option} {text}: {numbers!r} are not slots: write {name}:0,2")
        slots = frozenset(map(int, numbers.split(",")))
        absent = sorted(slots - set(host.slots))
        if absent:
            raise UserError(
                f"{option} {text}: {name} has no slot {absent[0]}: {source} gives it {len(host.slots)}, from 0"
            )
        found[name] = found.get(name, frozenset()) | slots
    return found
