"""The limit of open files, raised at the start of a rank as far as it will need.

Many systems give a process 1,024 (the soft limit) and let it take more (the hard limit). Each reading thread holds up
to 128 shards open, of the training and of the held-out set; gloo and NCCL hold connections to other ranks. No torch.
"""

from __future__ import annotations

import resource

_SHARDS_OPEN = 2 * 128  # `ShardReader`'s limit, for two sets
_OWN = 512  # of Python, libraries, GPUs, MLflow, worker processes' pipes
_OF_A_PEER = 2  # connections to each other rank at the most: two process groups


def needed_open_files(*, world_size: int, reading_threads: int) -> int:
    """An upper bound for one rank; 0 `reading_threads`: its own thread reads, or worker processes do."""
    return _OWN + _OF_A_PEER * world_size + _SHARDS_OPEN * max(1, reading_threads)


def allow_open_files(needed: int) -> str:
    """Raise this process's soft limit to `needed`, or as far as the hard one lets it; returns what there is to say if
    that is less, else ""."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError):  # not every system lets one go as far as it says
            allowed = soft
    if allowed >= needed:
        return ""
    return (
        f"a rank may need {needed:,} open files, and {allowed:,} are allowed (ulimit -Hn): raise the hard limit "
        "(LimitNOFILE of the service that starts it, --ulimit nofile of a container, ulimit -n before sbatch), or "
        "lower data.workers"
    )
