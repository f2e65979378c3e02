"""Read CPU and memory limits from Linux control groups (versions 1 and 2), and the user's name."""

import getpass
import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as a multiple of a page just below 2**63


def core_quota(root: Path = Path("/")) -> float | None:
    """CPU limit in cores; None: no limit."""
    limits = [_read(group / "cpu.max").split() for group in _groups(root, "")]
    limits += [[_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")] for group in _groups(root, "cpu")]
    # "max" (-1 in version 1) means no limit.
    return min((int(limit[0]) / int(limit[1]) for limit in limits if limit and limit[0].isdigit()), default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory limit, above which the kernel kills a process; None: no limit."""
    limits = [_read(group / "memory.max") for group in _groups(root, "")]
    limits += [_read(group / "memory.limit_in_bytes") for group in _groups(root, "memory")]
    return min((int(text) for text in limits if text.isdigit() and int(text) < _NO_LIMIT_BYTES), default=None)


def user_name() -> str:
    """Return the user's name, or the uid in a container without names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup folders, innermost first; controller "" is version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) != 3 or controller not in words[1].split(","):
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / words[2].strip("/")
        while group != top:
            yield group
            group = group.parent
        yield top  # in a container that name is often the host's, and this folder is the container's own group


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
