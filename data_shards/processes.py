"""Helper processes of a command: how many are useful, and how to leave Ctrl-C to the command itself."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def num_cores() -> int:
    """Cores that this process may use: a container or a batch system may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Block SIGINT, which a terminal sends to all processes of a command, for processes started meanwhile.

    This process gets it afterwards. Ignoring it in the children is too late: they would print a traceback on startup.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
