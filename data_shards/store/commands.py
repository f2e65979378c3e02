"""Stream a program's output: `pipe:COMMAND`, and schemes of webdataset's `gopen` (ais, scp, ...).

A nonzero exit status is a failure even if bytes came. A program that writes nothing for too long is killed, a `pipe:`
command with all its children. gopen's own pipes kill nothing, take status 141 for 0, and lose stderr. If an earlier
command of a shell pipeline fails, only the tar's missing end shows it.
"""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from typing import IO, Any

from shardvit.data_shards.shards.location import PIPE, protocol, redact_text
from shardvit.data_shards.shards.webdataset_parts import part
from shardvit.data_shards.store.remote_errors import DownloadStopped, Refused, Stop, Transient, Wrong, translate_errors
from shardvit.data_shards.working_folder import users_environment

_PIECE_BYTES = 2**20
_POLL_SECONDS = 0.1
_SHELL_CANNOT_RUN = (126, 127)


def pipe_pieces(url: str, *, stall_seconds: float, stop: Stop) -> Generator[bytes, None, None]:
    """Run a `pipe:` URL's command and yield its output; it starts with the first piece and is killed on closing.

    Wrong if the command fails (with its last line of stderr), Refused if the shell cannot run it, Transient after
    `stall_seconds` without output, DownloadStopped if `stop` returned True.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            url.removeprefix(PIPE),
            shell=True,
            env=users_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # its own group, so that we can kill all of it
        )

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # data workers ignore SIGTERM, and children inherit this

        yield from _output(process, kill=kill, stall_seconds=stall_seconds, stop=stop)
        if process.returncode:
            reason = f"the command ended with exit status {process.returncode}{_last_line(errors, url)}"
            raise Refused(reason) if process.returncode in _SHELL_CANNOT_RUN else Wrong(reason)


def gopen_pieces(url: str, *, stall_seconds: float, stop: Stop) -> Generator[bytes, None, None]:
    """Yield the bytes `gopen` reads; raises as `pipe_pieces`. A handler that runs no program has its own timeouts."""
    with translate_errors():
        try:
            stream: Any = part("gopen").gopen(url, bufsize=0)
        except FileNotFoundError as error:
            if "/" in str(error.filename):
                raise
            raise Refused(f"{error.filename}, which gopen runs for {protocol(url)}://, is not installed") from None
    process: subprocess.Popen[bytes] | None = getattr(stream, "proc", None)
    if process is None:
        with contextlib.closing(stream):
            while True:
                if stop():
                    raise DownloadStopped
                with translate_errors():
                    piece = stream.read(_PIECE_BYTES)
                if not piece:
                    return
                yield piece
    yield from _output(process, kill=process.kill, stall_seconds=stall_seconds, stop=stop)
    if process.returncode:
        raise Wrong(f"the program of {protocol(url)}:// ended with exit status {process.returncode}")


def _output(
    process: subprocess.Popen[bytes], *, kill: Callable[[], None], stall_seconds: float, stop: Stop
) -> Generator[bytes, None, None]:
    """Read until the program has closed its output and ended; kill any processes left."""
    assert process.stdout is not None
    last = time.monotonic()
    try:
        while True:
            if stop():
                raise DownloadStopped
            if select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
                piece = os.read(process.stdout.fileno(), _PIECE_BYTES)
                if not piece:
                    break
                yield piece
                last = time.monotonic()
            elif time.monotonic() - last > stall_seconds:
                raise Transient(f"the command wrote nothing for {stall_seconds:g} s")
        process.wait(timeout=stall_seconds)
    except subprocess.TimeoutExpired:
        raise Transient(f"the command closed its output but did not end for {stall_seconds:g} s") from None
    finally:
        kill()
        process.stdout.close()
        process.wait()


def _last_line(errors: IO[bytes], url: str) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    lines = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({redact_text(last, url=url)[:300]})" if last else ""
