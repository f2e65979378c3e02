"""The key `q` while a page is drawn: letters come one by one and unseen, and the terminal is left as it was found."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from launch.local.processes import handled

_STDIN = 0


@contextmanager
def leaving_by_q() -> Iterator[Callable[[float], bool] | None]:
    """Yield a function that waits so many seconds for `q` and returns whether it was typed; None: no terminal of ours.
    SIGTERM and SIGHUP become KeyboardInterrupt, so that the terminal is put back."""
    with handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        if not _is_ours():
            yield None
            return
        import termios
        import tty

        before = termios.tcgetattr(_STDIN)
        try:
            tty.setcbreak(_STDIN)
            yield _typed
        finally:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


def _is_ours() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # closed, no terminal, or another session's
        return False


def _typed(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while select.select([_STDIN], [], [], max(0.0, until - time.monotonic()))[0]:
        if (keys := os.read(_STDIN, 1024).lower()) == b"" or b"q" in keys:
            return True
    return False
