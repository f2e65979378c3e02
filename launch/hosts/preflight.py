"""Check every host before any GPU time is spent: reachable, same software and files, clocks in sync. Prints a table.

Asks all hosts in parallel (`host_facts`), compares them with this one, then lets the others connect to the first.
Costs a few seconds and a temporary file among the runs. Does not test GPUs or network speed.
"""

from __future__ import annotations

import functools
import json
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import show_bytes, table
from shardvit.launch.hosts import host_facts
from shardvit.launch.hosts.hostfile import Fleet, Host
from shardvit.launch.hosts.remote import Connection

PACKAGES = ("shardvit", "torch", "deepspeed")
_MODULES = ("launch", "pipeline", "model", "data_shards")
_ANSWER_SECONDS = 60.0
_MAX_CLOCK_SECONDS = 5.0
_MIN_FREE_BYTES = 1 << 30
_PYTHON = ["-u", "-c", "import sys; exec(sys.stdin.read(int(sys.stdin.readline())))"]


@dataclass(frozen=True)
class Facts:
    """One host's facts from `host_facts.answer`."""

    machine: str
    python: str
    packages: dict[str, str]
    code: str  # digest of the four packages' sources
    revision: str
    sees_marker: bool
    can_write: bool
    files: dict[str, str]  # path -> digest, size, or "! error"
    gpus: int
    free_bytes: int
    addresses: dict[str, str]  # IPv4 address -> network interface
    port: int
    clock_offset_seconds: float = 0.0  # ahead of this host


@dataclass(frozen=True)
class Ready:
    """Rendezvous of hosts that passed the checks."""

    address: str  # where all others reach the first host
    interfaces: dict[str, str]  # host -> its network interface to the others, if known


def find_problems(
    hosts: Sequence[Host], facts: Mapping[str, Facts | str], *, here: Facts, folder: Path
) -> dict[str, list[str]]:
    """List each host's problems, one sentence each. Pure. In `facts`, a string says why a host sent none."""
    found: dict[str, list[str]] = {}
    seen: dict[str, str] = {}
    has_gpus = any(isinstance(each, Facts) and each.gpus for each in facts.values())
    for host in hosts:
        each = facts[host.name]
        if isinstance(each, str):
            found[host.name] = [each]
            continue
        found[host.name] = [
            *_other_software(host.name, each, here=here),
            *_other_files(host.name, each, here=here, folder=folder),
            *_too_little(host, each, has_gpus=has_gpus, folder=folder),
        ]
        if each.machine in seen:
            found[host.name].append(
                f"{host.name} and {seen[each.machine]} are one machine: give it one line with all its slots"
            )
        seen.setdefault(each.machine, host.name)
    return found


def _other_software(name: str, facts: Facts, *, here: Facts) -> list[str]:
    found = []
    if facts.python != here.python:
        found.append(f"{name} has Python {facts.python}, this host {here.python}: install the same environment on both")
    found += [
        f"{name} has {package} {facts.packages[package]}, this host {version}: install the same environment on both"
        for package, version in here.packages.items()
        if facts.packages[package] != version
    ]
    if not facts.code:
        found.append(f"{name} has no shardvit that its Python finds: install it, or start from its folder")
    elif facts.code != here.code:
        revisions = f" (revision {facts.revision or 'unknown'}, this host {here.revision or 'unknown'})"
        revisions = revisions if facts.revision != here.revision else " (the same revision, with other changes)"
        found.append(f"{name} has other code of shardvit than this host{revisions}: bring both to one revision")
    if abs(facts.clock_offset_seconds) > _MAX_CLOCK_SECONDS:
        way = "ahead of" if facts.clock_offset_seconds > 0 else "behind"
        found.append(
            f"{name}'s clock is {abs(facts.clock_offset_seconds):.0f} seconds {way} this host's: set both by NTP"
        )
    return found


def _other_files(name: str, facts: Facts, *, here: Facts, folder: Path) -> list[str]:
    if not facts.sees_marker:
        # Its other files differ too, and need no sentences of their own.
        return [f"{name} does not see what this host writes to {folder}: let --runs name a folder that all hosts share"]
    found = []
    if not facts.can_write:
        found.append(f"{name} may not write to {folder}: give its user the right to")
    for path, digest in here.files.items():
        other = facts.files.get(path, "! not asked")
        if other.startswith("! ") and not digest.startswith("! "):
            found.append(f"{name} cannot read {path} ({other[2:]}): put it where all hosts have it at the same path")
        elif other != digest and not digest.startswith("! "):
            found.append(f"{path} on {name} is not the one on this host: copy it there again, or share it")
    return found


def _too_little(host: Host, facts: Facts, *, has_gpus: bool, folder: Path) -> list[str]:
    found = []
    if has_gpus and max(host.slots) >= facts.gpus:
        found.append(
            f"{host.name} has {facts.gpus} GPUs, and slot {max(host.slots)} (counted from 0) is asked for: lower its "
            "slots in the hostfile, or leave it out with --exclude"
        )
    if facts.sees_marker and facts.free_bytes < _MIN_FREE_BYTES:
        found.append(
            f"{host.name} has {show_bytes(facts.free_bytes)} free in {folder}, less than "
            f"{show_bytes(_MIN_FREE_BYTES)}: make room"
        )
    return found


def hosts_table(hosts: Sequence[Host], facts: Mapping[str, Facts | str], problems: Mapping[str, Sequence[str]]) -> str:
    """Format one line per host. Pure."""
    rows: list[tuple[str, ...]] = [("host", "slots", "GPUs", "Python", *PACKAGES, "code", "clock", "free", "verdict")]
    for host in hosts:
        each, count = facts[host.name], len(problems[host.name])
        verdict = "ready" if not count else "1 problem" if count == 1 else f"{count} problems"
        cells = ["-"] * (len(rows[0]) - 3)
        if not isinstance(each, str):
            cells = [str(each.gpus), each.python, *(each.packages[package] for package in PACKAGES)]
            cells += [each.code or "-", f"{each.clock_offset_seconds:+.1f} s", show_bytes(each.free_bytes)]
        rows.append((host.name, str(len(host.slots)), *cells, verdict))
    return table(rows, heading="ruled")


def preflight(
    fleet: Fleet, *, folder: Path, files: Sequence[Path], python_path: str, say: Callable[[str], None]
) -> Ready:
    """Check that all hosts see `folder` (created if missing) and the same `files`, and show the table. UserError lists
    every problem; OSError if `folder` is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    marker, text = folder.absolute() / f".hosts-{secrets.token_hex(8)}", secrets.token_hex(16)
    question = {
        "ask": "facts",
        "folder": str(folder.absolute()),
        "marker": [marker.name, text],
        "files": [str(path.absolute()) for path in files],
        "packages": PACKAGES,
        "modules": _MODULES,
        "listen": False,
        "port": fleet.master_port,
    }
    marker.write_text(text, encoding="utf-8")
    try:
        own = host_facts.answer(question)
        here = Facts(**{name: value for name, value in own.items() if name != "clock"})
        with _Inquiry(fleet, python_path=python_path) as inquiry:
            several = len(fleet.hosts) > 1
            facts = inquiry.ask_all(question, first={**question, "listen": several})
            problems = find_problems(fleet.hosts, facts, here=here, folder=folder)
            address, interfaces = fleet.master_addr or fleet.hosts[0].name, {}
            if several and not any(problems.values()):
                address, interfaces = inquiry.meet(fleet, facts, text=text, problems=problems)
            say(hosts_table(fleet.hosts, facts, problems))
    finally:
        marker.unlink(missing_ok=True)
    sentences = folded(problems)
    if sentences:
        bad = sum(bool(each) for each in problems.values())
        raise UserError(
            f"{bad} of {len(fleet.hosts)} hosts of {fleet.source} {'is' if bad == 1 else 'are'} not ready:"
            + "".join(f"\n  {sentence}" for sentence in sentences)
        )
    return Ready(address, interfaces)


def folded(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Merge sentences that differ only in the host's name. Pure."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for host, sentences in problems.items():
        for sentence in sentences:
            alike.setdefault(sentence.replace(host, "\0"), []).append((host, sentence))
    found = []
    for (_, first), *others in alike.values():
        more = f" (the same of {len(others)} more: {', '.join(host for host, _ in others)})" if others else ""
        found.append(first + more)
    return found


class _Inquiry:
    def __init__(self, fleet: Fleet, *, python_path: str) -> None:
        self._word = f"probe-{secrets.token_hex(8)} "
        self._replies: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._asked = 0.0  # time of the last question, by this host's clock
        script = Path(host_facts.__file__).read_text(encoding="utf-8")
        self._connections: dict[str, Connection] = {}
        for host in fleet.hosts:
            note = functools.partial(self._note, host.name)
            self._connections[host.name] = Connection(host.name, _PYTHON, python_path=python_path, on_line=note)
            self._connections[host.name].send(f"{len(script)}\n{script}")

    def __enter__(self) -> _Inquiry:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def ask_all(self, question: Mapping[str, Any], *, first: Mapping[str, Any]) -> dict[str, Facts | str]:
        """Ask every host, the first one with its own question; a string says why a host sent no facts."""
        names = list(self._connections)
        replies = self._ask({name: first if name == names[0] else question for name in names})
        return {
            name: Facts(**replies[name]) if name in replies else self._connections[name].failure() for name in names
        }

    def meet(
        self, fleet: Fleet, facts: Mapping[str, Facts | str], *, text: str, problems: dict[str, list[str]]
    ) -> tuple[str, dict[str, str]]:
        """Find an address where all others reach the first host, and each host's interface; adds to `problems`."""
        first, *others = [host.name for host in fleet.hosts]
        host = facts[first]
        assert isinstance(host, Facts)
        candidates = [fleet.master_addr] if fleet.master_addr else [first, *host.addresses]
        question = {"ask": "connect", "addresses": candidates, "port": host.port, "text": text}
        reached: dict[str, dict[str, list[str]]] = self._ask(dict.fromkeys(others, question))
        chosen = next((each for each in candidates if all(each in reached.get(name, {}) for name in others)), None)
        if chosen is None:
            for name in others:
                if not set(candidates) & set(reached.get(name, {})):
                    where = f"at {', '.join(candidates)}, port {host.port}"
                    problems[name].append(
                        f"{name} does not reach {first} {where}: open the ports between the hosts, or name an address "
                        "that all reach with --master-addr"
                    )
            if not any(problems.values()):
                problems[first].append(
                    f"{first} has no address that all others reach: name one with --master-addr "
                    f"({', '.join(candidates)} were tried)"
                )
            return candidates[0], {}
        number = reached[others[0]][chosen][0]
        interfaces = {first: host.addresses.get(number, ""), **{name: reached[name][chosen][1] for name in others}}
        return number, {name: interface for name, interface in interfaces.items() if interface}

    def _ask(self, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        self._asked = time.time()
        for name, question in questions.items():
            self._connections[name].send(json.dumps({**question, "word": self._word}) + "\n")
        replies: dict[str, Any] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            while not self._replies.empty():
                name, content = self._replies.get()
                replies[name] = content
            over = all(name in replies or self._connections[name].code() is not None for name in questions)
            if over and self._replies.empty():
                break
            time.sleep(0.02)
        return replies

    def _note(self, name: str, line: str) -> None:
        now = time.time()
        if line.startswith(self._word):
            content = json.loads(line.removeprefix(self._word))
            if isinstance(clock := content.get("clock"), float):  # facts; else addresses, whose values are lists
                del content["clock"]
                content["clock_offset_seconds"] = clock_offset(clock, asked=self._asked, replied=now)
            self._replies.put((name, content))


def clock_offset(clock: float, *, asked: float, replied: float) -> float:
    """Smallest possible offset of a host's clock from ours, in seconds (positive: ahead). Pure. The host read `clock`
    between our question (`asked`) and its reply (`replied`), so a busy host's delay does not count."""
    return min(0.0, clock - asked) + max(0.0, clock - replied)
