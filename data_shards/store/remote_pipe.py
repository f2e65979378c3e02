"""The output of a shell command as a stream of bytes: `pipe:` locations, as in webdataset.

The command's end is part of its output: an exit status other than 0 is a failure even if bytes came, and a command
that writes nothing for too long is killed, with everything it has started. Only the last command of a shell pipeline
tells its status to the shell; a shard that was cut short by the failure of an earlier one is found by its tar's end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO

from data_shards.store.location import PIPE, scrubbed
from data_shards.store.remote_errors import Refused, Stopped, Transient, Wrong

_PIECE_BYTES = 2**20
_POLL_SECONDS = 0.1
_SHELL_CANNOT_RUN = (126, 127)


def open_pipe(url: str, *, stall_seconds: float, stop: Callable[[], bool]) -> Iterator[bytes]:
    """What the command of `url` writes; it starts when the first piece is taken, and is killed on closing.

    Raises:
        Wrong: while iterating: the command failed; has the last line of its standard error.
        Refused: the shell could not run it.
        Transient: it wrote nothing for `stall_seconds`.
        Stopped: `stop` said so.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            url.removeprefix(PIPE),
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # a group of its own, so that all of it can be killed
        )
        assert process.stdout is not None
        try:
            yield from _pieces(process.stdout, stall_seconds=stall_seconds, stop=stop)
            try:
                status = process.wait(timeout=stall_seconds)
            except subprocess.TimeoutExpired:
                raise Transient(f"the command closed its output but did not end for {stall_seconds:g} s") from None
        finally:
            # SIGKILL, because data workers ignore SIGTERM and a child inherits that.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            process.wait()
        if status:
            reason = f"the command ended with exit status {status}{_last_line(errors, url)}"
            raise Refused(reason) if status in _SHELL_CANNOT_RUN else Wrong(reason)


def _pieces(output: IO[bytes], *, stall_seconds: float, stop: Callable[[], bool]) -> Iterator[bytes]:
    last = time.monotonic()
    while True:
        if stop():
            raise Stopped
        if select.select([output], [], [], _POLL_SECONDS)[0]:
            piece = os.read(output.fileno(), _PIECE_BYTES)
            if not piece:
                return
            yield piece
            last = time.monotonic()
        elif time.monotonic() - last > stall_seconds:
            raise Transient(f"the command wrote nothing for {stall_seconds:g} s")


def _last_line(errors: IO[bytes], url: str) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    lines = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({scrubbed(last, url=url)[:300]})" if last else ""
