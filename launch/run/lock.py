"""One run folder, one run: exclusive between processes and machines, and free again when its owner dies.

The kernel's lock (flock) comes first: it excludes the processes of one machine, and of all machines where the file
system passes it on (NFS by default, Lustre with `-o flock`). Some do not: they have none, or keep it to each machine.
So the owner also writes a claim (`claims`) and counts on in it. Who finds the claim of a process that never let go
- of this machine: knows at once whether it is alive (from flock, or without it from /proc);
- of another machine: watches for a while. The count goes on: in use. It stands still: the owner is dead.
A kill at any moment leaves nothing locked; after one on another machine the next start takes half a minute longer.

Costs a small write and fsync every few seconds from a thread. An owner whose machine was suspended for longer than
the watch may find that somebody else took over: its process ends within a few seconds, without another save.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_shards.errors import UserError
from launch.run.claims import Claim, OwnClaim, highest_claim, this_process
from launch.run.presence import Presence, gone
from pipeline.ranks.pid import process_started
from pipeline.vocabulary import EXIT_USER_ERROR

_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 30.0  # file servers stand still for a while, too
_BEGIN_SECONDS = 5.0  # within which a claim that was made is filled; whoever is slower finds that it lost
_LOOK_SECONDS = 0.2
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class _InUse(Exception):
    """Somebody else holds the lock."""


def _to_stderr(text: str) -> None:
    print(f"shardvit: {text}", file=sys.stderr, flush=True)


@contextmanager
def locked(
    path: Path,
    *,
    what: str,
    wait_seconds: float = 0.0,
    say: Callable[[str], None] = _to_stderr,
    gone_seconds: float = 0.0,
    end_others: Callable[[], object] = lambda: None,
) -> Iterator[Presence]:
    """Hold the lock file `path`; yields its folder's presence. When that is gone, this process ends within seconds.

    Args:
        path: the file; made when missing, never removed (removing it would let two owners in).
        what: what is locked, for the message.
        wait_seconds: how long to wait for the present owner.
        say: told when a dead owner on another machine is waited for and followed.
        gone_seconds: given to this process to end by itself when the folder is gone.
        end_others: called before it is ended then.

    Raises:
        UserError: somebody else holds it.
        OSError: nothing can be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                claim = _acquire(path, has_flock=_flock(descriptor), what=what, say=say)
                break
            except _InUse as error:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"{what} is in use by {error} (lock {path}): wait for it, or stop it first"
                    ) from None
            time.sleep(_LOOK_SECONDS)
        there = Presence(path.parent)
        try:
            with _counting_on(claim, what=what, there=there, gone_seconds=gone_seconds, end_others=end_others):
                yield there
        finally:
            there.close()
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Take the kernel's lock; False: somebody has it; None: this file system knows none."""
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
    """Make the highest claim, as soon as the one that is there has no living owner.

    Raises:
        _InUse: it has.
    """
    while True:
        found = highest_claim(path)
        if has_flock is False:
            raise _InUse(found.owner or "another process")
        if found.state == "taken":
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
    say(f"{what} was not let go of by {who}: watching for {seconds:g} seconds whether it is alive")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = highest_claim(path)
        if now.state == "free":
            return
        if (now.number, now.text) != (found.number, found.text):
            raise _InUse(now.owner or "another process")
    say(f"taking over: {who} shows no sign of life")


@contextmanager
def _counting_on(
    claim: OwnClaim, *, what: str, there: Presence, gone_seconds: float, end_others: Callable[[], object]
) -> Iterator[None]:
    """Let the claim's count go up as long as this is entered, and release it at the end."""
    over = threading.Event()

    def count() -> None:
        while not over.wait(_BEAT_SECONDS):
            with suppress(OSError):  # the file server is away, or the disk is full: it may come back
                if there.is_gone() or claim.is_deleted():  # the latter: it is being deleted
                    if over.wait(gone_seconds):
                        return
                    try:
                        _to_stderr(gone(there.folder))
                        end_others()
                    finally:
                        os._exit(EXIT_USER_ERROR)
                if not claim.holds():
                    _to_stderr(f"{what} was taken over by another process while this one stood still: leaving at once")
                    os._exit(1)
                claim.beat()

    thread = threading.Thread(target=count, daemon=True, name="lock-beat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # a beat that the disk holds up must not come after the release, nor into a closed file
        with suppress(OSError):
            claim.release()
