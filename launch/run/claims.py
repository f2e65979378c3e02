"""Who owns a lock, written down so that other machines can tell whether that owner is still alive.

Beside the lock file PATH lie claims, PATH.1, PATH.2 and so on. The highest one tells the owner: its machine, process
and a count that goes up every few seconds, or that it let go. Whoever takes over makes the next one, which only one
process can (O_EXCL, also on NFS), and removes those below; the highest is never removed, so the numbers only grow and
two newcomers can never both be the highest.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.ranks.pid import process_started, this_machine

_FREE = "free"


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock.

    Attributes:
        host: name of its machine, for people.
        machine: see `pipeline.ranks.pid.this_machine`.
        pid: its number there.
        started: when it was started; a later process with the same number has another.
        token: of this claim alone.
    """

    host: str
    machine: str
    pid: int
    started: float
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Claim:
    """The highest claim as it was read.

    Attributes:
        number: 0 when there is none yet.
        text: all of it; compared to see whether the owner still counts.
        owner: None: nobody, or it cannot be told (half written).
        state: "free": let go of, or there never was one.
    """

    number: int
    text: str
    owner: Owner | None
    state: Literal["free", "taken"]


def this_process() -> Owner:
    """The owner that this process would be."""
    pid = os.getpid()
    return Owner(os.uname().nodename, this_machine(), pid, process_started(pid) or 0.0, token=secrets.token_hex(8))


def highest_claim(path: Path) -> Claim:
    """What the lock's highest claim says now, read from the file server rather than from what was known of it."""
    while True:
        number = max(_numbers(path), default=0)
        if number == 0:
            return Claim(0, "", None, "free")
        try:
            text = _claim_path(path, number).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # a higher one was made meanwhile
            continue
        line = text.partition("\n")[0].strip()
        if line == _FREE:
            return Claim(number, text, None, "free")
        try:
            record = json.loads(line)
            owner = Owner(**{key: record[key] for key in Owner.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):
            owner = None
        return Claim(number, text, owner, "taken")


class OwnClaim:
    """A claim that this process has made; whether it is the highest is asked with `holds`."""

    def __init__(self, path: Path, *, number: int, owner: Owner) -> None:
        self._path, self._number, self._owner = path, number, owner
        # FileExistsError: somebody else was faster
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(_claim_path(path, number), flags, 0o644)
        self._beats = 0
        try:
            self.beat()
        except OSError:  # a full disk; the empty claim stays, for a number must not be used twice
            os.close(self._descriptor)
            raise

    def beat(self) -> None:
        """Count on, for those who watch."""
        self._write(json.dumps({**asdict(self._owner), "beat": f"{self._beats:012d}"}))  # always of one length
        self._beats += 1

    def holds(self) -> bool:
        """Whether this is still the highest claim."""
        return max(_numbers(self._path), default=0) == self._number

    def is_deleted(self) -> bool:
        """Whether this claim and all others are gone."""
        return not _numbers(self._path)

    def remove_lower(self) -> None:
        """Clear away the claims of those who came before."""
        for number in _numbers(self._path):
            if number < self._number:
                _claim_path(self._path, number).unlink(missing_ok=True)

    def release(self) -> None:
        """Write down that nobody owns the lock."""
        try:
            self._write(_FREE)
            os.ftruncate(self._descriptor, len(_FREE) + 1)
        finally:
            os.close(self._descriptor)

    def withdraw(self) -> None:
        """Take back a claim that is not the highest."""
        os.close(self._descriptor)
        _claim_path(self._path, self._number).unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        """One line in the place of the last one, on the server before this returns."""
        os.pwrite(self._descriptor, f"{line}\n".encode(), 0)
        os.fsync(self._descriptor)


def _claim_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    start = f"{path.name}."
    suffixes = [name.removeprefix(start) for name in os.listdir(path.parent) if name.startswith(start)]
    return [int(suffix) for suffix in suffixes if suffix.isdecimal()]
