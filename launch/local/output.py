"""Survive failing stdout and stderr: a closed pipe (`| head`), a closed terminal, a full disk.

Call `guard` first in every process. It opens closed streams on /dev/null, also for children and C libraries; otherwise
the next opened file gets their number and the prints. A failed write to stdout ends a command whose product is its
output (`OutputLost`); after `go_on`, and always on stderr, it is dropped. Python itself ignores SIGPIPE.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

from shardvit.data_shards.text import printable

_PATIENCE_SECONDS = 1.0  # for a non-blocking terminal or pipe


def say(text: str) -> None:
    """Print a sentence for the user on stderr."""
    print(f"shardvit: {printable(text)}", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line of progress on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def say_model(asked: object, *, origin: str, notes: Iterable[str]) -> None:
    """Report which model was used, unless it is the path `asked` itself, and any assumptions."""
    if origin != str(asked):
        say(f"the model is {origin}")
    for note in notes:
        say(f"note: {note}")


class OutputLost(Exception):
    """Stdout cannot be written. `why`: the system's reason; empty: its reader has closed the pipe."""

    def __init__(self, error: OSError) -> None:
        self.why = "" if error.errno == errno.EPIPE else (error.strerror or str(error))
        super().__init__(f"standard output cannot be written: {self.why}")


class _Stream(io.RawIOBase):
    def __init__(self, descriptor: int, *, name: str, when_lost: Literal["raise", "drop"]) -> None:
        self.name, self.when_lost = f"<{name}>", when_lost
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        left = memoryview(content).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                if not select.select([], [self._descriptor], [], _PATIENCE_SECONDS)[1]:
                    break
            except OSError as error:
                if self.when_lost == "raise":
                    self.when_lost = "drop"  # flushing buffers at exit must not raise again
                    raise OutputLost(error) from error
                break
        return size


def guard() -> None:
    """Open closed descriptors, and replace sys.stdout and sys.stderr, except streams that tests put there."""
    for descriptor in (0, 1, 2):  # in order: open takes the lowest free number
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    _guard("stdout", descriptor=1, when_lost="raise")
    _guard("stderr", descriptor=2, when_lost="drop")


def go_on() -> None:
    """Drop failed writes to stdout from now on."""
    guard()
    stream = _stream_of(sys.stdout)
    if stream is not None:
        stream.when_lost = "drop"


def _guard(name: Literal["stdout", "stderr"], *, descriptor: int, when_lost: Literal["raise", "drop"]) -> None:
    before: Any = getattr(sys, name)
    if before is not getattr(sys, f"__{name}__") or _stream_of(before) is not None:
        return
    if before is not None:
        with suppress(OSError):
            before.flush()
    stream = _Stream(descriptor, name=name, when_lost=when_lost)
    through = before is not None and before.write_through  # python -u
    errors = "backslashreplace" if before is None or before.errors == "strict" else before.errors
    after = io.TextIOWrapper(
        stream if through else io.BufferedWriter(stream),
        encoding="utf-8" if before is None else before.encoding,
        errors=errors,
        line_buffering=before is None or before.line_buffering,
        write_through=through,
    )
    setattr(sys, name, after)
    setattr(sys, f"__{name}__", after)


def _stream_of(text: Any) -> _Stream | None:
    buffer = getattr(text, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Stream) else None
