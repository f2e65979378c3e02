"""How much more memory processes on this machine may take before they are killed. Linux; elsewhere what psutil says.

A batch system or a container often allows less than the machine has: the limits of the control groups (version 2) that
this process is in are read as well. File pages that the kernel can drop count as free.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 0.05  # of the memory; left for what training itself may still take


def spare_host_bytes(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that may be taken, some reserve left aside; 0 when there are none."""
    memory = psutil.virtual_memory()
    room = min([memory.available, *_rooms_in_groups(cgroups, own)])
    return max(0, room - max(_RESERVE_BYTES, round(_RESERVE_SHARE * memory.total)))


def _rooms_in_groups(cgroups: Path, own: Path) -> list[int]:
    """What each limited group around this process leaves."""
    try:
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    rooms: list[int] = []
    group = cgroups / name.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            droppable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        except (OSError, ValueError):  # the root has no limit, or the name is of another namespace
            continue
        if limit != "max":
            rooms.append(int(limit) - used + droppable)
    return rooms
