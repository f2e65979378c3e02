"""A terminal of any size, for what draws on one."""

import os
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def terminal(*, lines: int, columns: int) -> Iterator[tuple[TextIO, bytearray]]:
    """A stream that is a terminal, and what it has been given, whole once the context is left."""
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (lines, columns))
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(leader, 4096):
                shown.extend(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(follower, "w") as stream:
            yield stream, shown
    finally:
        reader.join()  # until all is read that was written: the other end is closed
        os.close(leader)
