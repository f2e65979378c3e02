"""Processes that help with a command: how many are of use, and how they leave Ctrl-C to the one that the user sees."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def num_cores() -> int:
    """A container or a batch system may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started meanwhile never get SIGINT, which a terminal sends to all of a command's; this one does, after.

    Ignoring it is too late for them: while Python starts, each would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
