"""What a batch system or a container allows of this machine: cores and memory of the control groups, and mounts.

Both versions of control groups, the outer groups included: the smallest limit of all counts. A few small reads; Linux,
and elsewhere no limit is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 1 << 60

# File systems of another machine: slow to lock, slow for small files, and shared.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p"})


def core_quota(root: Path = Path("/")) -> float | None:
    """How many cores' worth of time processes here may use; None: no limit but the cores themselves."""
    quotas: list[float] = []
    for group in _groups(root, ""):
        words = _read(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    for group in _groups(root, "cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1: none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """How much memory processes here may take before the kernel kills one; None: what the machine has."""
    limits = [_read(group / "memory.max") for group in _groups(root, "")]
    limits += [_read(group / "memory.limit_in_bytes") for group in _groups(root, "memory")]
    return min((int(text) for text in limits if text.isdigit() and int(text) < _NO_LIMIT_BYTES), default=None)


def file_system(folder: Path, *, root: Path = Path("/")) -> str:
    """The kind of file system that `folder` is, or will be, on: "ext4", "nfs4"; empty where that is not told."""
    there = folder.absolute()
    best, kind = -1, ""
    for line in _read(root / "proc/self/mounts").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " "))
        if (there == point or point in there.parents) and len(point.parts) >= best:  # a later mount hides an earlier
            best, kind = len(point.parts), words[2]
    return kind.removeprefix("fuse.")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the group that this process is in and of those around it; "" is version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) != 3 or controller not in words[1].split(","):
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / words[2].strip("/")
        while group != top:
            yield group
            group = group.parent
        yield top  # in a container the name above is often the host's, and this folder the container's own group


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
