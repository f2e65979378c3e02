"""How many cores this process may use."""

import os


def num_cores() -> int:
    """A container or a batch system may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
