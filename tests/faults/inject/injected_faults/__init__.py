"""Faults that a test wants in a process of the product, told by the environment variable SHARDVIT_FAULT.

SHARDVIT_FAULT is a JSON list of objects, see `Fault`. They strike in two ways: at calls of the product's functions
(`calls`, which wraps them when their modules are imported) and at operations on files (`files`, which goes by paths
alone). A fault that no process has reached has no effect: a test looks for its `once` file, or for what it did.
"""

from injected_faults import calls, files
from injected_faults.fault import planned


def install() -> None:
    """Put all faults of this process's environment in place."""
    points = {fault.point for fault in planned()}
    if points & calls.POINTS:
        calls.install()
    if points & files.POINTS:
        files.install()
    if unknown := points - calls.POINTS - files.POINTS:
        raise ValueError(f"SHARDVIT_FAULT names points that there are not: {', '.join(sorted(unknown))}")
