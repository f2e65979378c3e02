"""Lock a run folder for one process across all machines; a dead owner's lock becomes free.

flock excludes other processes on this machine, and on all machines if the file system forwards it (NFS by default,
Lustre with `-o flock`). Some do not, so the owner also writes a claim with a heartbeat. An unreleased claim of this
machine is checked by flock, else by PID and start time. A claim of another machine is watched for half a minute: its
owner is dead if the heartbeat stops. So a kill leaves nothing locked.

Claims are files PATH.1, PATH.2, ... next to the lock file PATH. The highest names the owner or says "free". To take the
lock, create the next one, which only one process can (O_EXCL, also on NFS), then remove the lower ones. The highest is
never removed, so two processes can never both own it. (filelock's SoftFileLease needs renameat2's exchange, which NFS
refuses: a dead owner would hold the lock forever.)

Costs a small write and fsync every 5 seconds in a thread. An owner suspended for longer than the watch may lose the
lock; its process then exits within seconds without saving.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from shardvit.data_shards.durable import break_links
from shardvit.data_shards.errors import UserError
from shardvit.launch.local.output import say as to_stderr
from shardvit.launch.run.disk import Presence, gone
from shardvit.pipeline.ranks.process import process_started, this_machine
from shardvit.pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_USER_ERROR

_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 30.0  # longer than a file server's pauses
_BEGIN_SECONDS = 5.0  # to write a new claim; a slower owner loses it
_POLL_SECONDS = 0.2
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_FREE = "free"


class _InUse(Exception):
    """Another process holds the lock."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock."""

    host: str  # for messages
    machine: str  # `pipeline.ranks.process.this_machine`
    pid: int
    started: float  # distinguishes a later process with the same PID
    token: str  # unique to this claim

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Claim(NamedTuple):
    """The highest claim."""

    number: int  # 0: none yet
    text: str  # changes with each heartbeat
    owner: Owner | None = None  # None: nobody, or half written
    is_free: bool = True


@contextmanager
def locked(
    path: Path,
    *,
    what: str,
    wait_seconds: float = 0.0,
    say: Callable[[str], None] = to_stderr,
    gone_seconds: float = 0.0,
    end_others: Callable[[], object] = lambda: None,
) -> Iterator[Presence]:
    """Hold the lock file `path`, and yield its folder's presence. Never removes `path`, which would admit two owners.

    `what` names the locked thing in messages. If the folder disappears, this process has `gone_seconds` to end by
    itself; then `end_others` is called and it exits. UserError if another process holds the lock, OSError if the folder
    is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                has_flock = _flock(descriptor)
                if has_flock and not _is_own(path, descriptor):
                    continue
                claim = _acquire(path, has_flock=has_flock, what=what, say=say)
                break
            except _InUse as error:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"{what} is in use by {error} (lock {path}): wait for it, or stop it first"
                    ) from None
            time.sleep(_POLL_SECONDS)
        there = Presence(path.parent)
        try:
            with _heartbeat(claim, what=what, there=there, gone_seconds=gone_seconds, end_others=end_others):
                yield there
        finally:
            there.close()
    finally:
        os.close(descriptor)


def _is_own(path: Path, descriptor: int) -> bool:
    """Check that `descriptor` is `path`, not the original of a hard-linked copy; else reopen it and return False."""
    break_links(path)
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    is_own = os.path.samestat(os.fstat(descriptor), os.fstat(own))
    if not is_own:
        os.dup2(own, descriptor, inheritable=False)
    os.close(own)
    return is_own


def _flock(descriptor: int) -> bool | None:
    """Take the kernel's lock. False: another process has it; None: no locks on this file system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _acquire(path: Path, *, has_flock: bool | None, what: str, say: Callable[[str], None]) -> OwnClaim:
    """Make the highest claim once the current one has no live owner; _InUse if it has one."""
    while True:
        found = highest_claim(path)
        if has_flock is False:
            raise _InUse(found.owner or "another process")
        if not found.is_free:
            _make_sure_it_is_dead(found, path=path, has_flock=has_flock, what=what, say=say)
        try:
            claim = OwnClaim(path, number=found.number + 1, owner=this_process())
        except FileExistsError:
            continue
        if claim.holds():
            claim.remove_lower()
            return claim
        claim.withdraw()


def _make_sure_it_is_dead(
    found: Claim, *, path: Path, has_flock: bool | None, what: str, say: Callable[[str], None]
) -> None:
    owner, here = found.owner, this_process()
    if owner is not None and owner.machine == here.machine:
        if has_flock is None and process_started(owner.pid) == owner.started:
            raise _InUse(owner)
        return
    who, seconds = (owner, _WATCH_SECONDS) if owner else ("a process that could not begin", _BEGIN_SECONDS)
    say(f"{what} was not released by {who}: watching its heartbeat for {seconds:g} seconds")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = highest_claim(path)
        if now.is_free:
            return
        if (now.number, now.text) != (found.number, found.text):
            raise _InUse(now.owner or "another process")
    say(f"taking over: no heartbeat from {who}")


@contextmanager
def _heartbeat(
    claim: OwnClaim, *, what: str, there: Presence, gone_seconds: float, end_others: Callable[[], object]
) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_SECONDS):
            with suppress(OSError):  # file server unreachable or disk full: retried
                if there.is_gone() or not claim.numbers():  # the latter: the folder is being deleted
                    if over.wait(gone_seconds):
                        return
                    try:
                        to_stderr(gone(there.folder))
                        end_others()
                    finally:
                        os._exit(EXIT_USER_ERROR)
                if not claim.holds():
                    to_stderr(f"{what} was taken over by another process while this one was suspended: it ends now")
                    os._exit(EXIT_FAILED)
                claim.beat()

    thread = threading.Thread(target=beat, daemon=True, name="lock-beat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # no heartbeat after the release or into a closed file
        with suppress(OSError):
            claim.release()


def this_process() -> Owner:
    """Describe this process as an owner."""
    pid = os.getpid()
    return Owner(os.uname().nodename, this_machine(), pid, process_started(pid) or 0.0, token=secrets.token_hex(8))


def highest_claim(path: Path) -> Claim:
    """Read the highest claim from the file server, not a cache."""
    while True:
        number = max(_numbers(path), default=0)
        if number == 0:
            return Claim(0, "")
        try:
            text = _claim_path(path, number).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # superseded by a higher one
            continue
        line = text.partition("\n")[0].strip()
        if line == _FREE:
            return Claim(number, text)
        try:
            record = json.loads(line)
            owner = Owner(**{key: record[key] for key in Owner.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):
            owner = None
        return Claim(number, text, owner, is_free=False)


class OwnClaim:
    """This process's claim; FileExistsError if another process was faster."""

    def __init__(self, path: Path, *, number: int, owner: Owner) -> None:
        self._path, self._number, self._owner = path, number, owner
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(_claim_path(path, number), flags, 0o644)
        self._beats = 0
        try:
            self.beat()
        except OSError:  # disk full; the empty claim stays, as a number must not be reused
            os.close(self._descriptor)
            raise

    def beat(self) -> None:
        self._write(json.dumps({**asdict(self._owner), "beat": f"{self._beats:012d}"}))  # of constant length
        self._beats += 1

    def numbers(self) -> list[int]:
        return _numbers(self._path)

    def holds(self) -> bool:
        return max(self.numbers(), default=0) == self._number

    def remove_lower(self) -> None:
        for number in self.numbers():
            if number < self._number:
                _claim_path(self._path, number).unlink(missing_ok=True)

    def release(self) -> None:
        try:
            self._write(_FREE)
            os.ftruncate(self._descriptor, len(_FREE) + 1)
        finally:
            os.close(self._descriptor)

    def withdraw(self) -> None:
        os.close(self._descriptor)
        _claim_path(self._path, self._number).unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        """Overwrite the line, through to the server."""
        os.pwrite(self._descriptor, f"{line}\n".encode(), 0)
        os.fsync(self._descriptor)


def _claim_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    start = f"{path.name}."
    suffixes = [name.removeprefix(start) for name in os.listdir(path.parent) if name.startswith(start)]
    return [int(suffix) for suffix in suffixes if suffix.isdecimal()]
