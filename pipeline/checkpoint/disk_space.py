"""Check for space: checkpoints on disk, and a background save's copies in host memory.

Ignores disk quotas: the write fails, and the saver reports it. Memory limits include this process's cgroups (version 2,
Linux), as batch systems and containers set them; file pages the kernel can drop count as free.
"""

import shutil
from pathlib import Path

import psutil

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import show_bytes
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig
from shardvit.pipeline.recipe.vocabulary import AVERAGE_BYTES, MASTER_BYTES, WEIGHT_BYTES

_RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 0.05  # of memory, left for training itself


def estimate_bytes(
    num_parameters: int, *, engine: EngineConfig, optimizer: OptimizerConfig, ema: EmaConfig | None = None
) -> int:
    """Estimate one checkpoint's size over all processes; within 1 % of DeepSpeed's in bf16 under ZeRO 1."""
    optimizer_bytes = optimizer.bytes_per_parameter + (AVERAGE_BYTES if ema else 0)
    if engine.backend == "accelerate" or engine.zero_stage == 0:
        return round(num_parameters * (MASTER_BYTES + optimizer_bytes))  # float32 weights only
    return round(num_parameters * (WEIGHT_BYTES[engine.precision] + MASTER_BYTES + optimizer_bytes))


def free_bytes(root: Path) -> int:
    """Free bytes on the disk of `root`, which need not exist yet."""
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def check_free_space(root: Path, *, needed_bytes: int) -> None:
    """UserError if less than a checkpoint's `needed_bytes` is free."""
    free = free_bytes(root)
    if free < needed_bytes:
        raise UserError(
            f"a checkpoint needs about {show_bytes(needed_bytes)} in {root}, but {show_bytes(free)} are free: make "
            "room, or let --runs name a folder on a larger disk"
        )


def spare_host_bytes(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this machine's processes can still take before the OOM killer acts, less a reserve."""
    memory = psutil.virtual_memory()
    room = min([memory.available, *_rooms_in_groups(cgroups, own)])
    return max(0, room - max(_RESERVE_BYTES, round(_RESERVE_SHARE * memory.total)))


def _rooms_in_groups(cgroups: Path, own: Path) -> list[int]:
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
        except (OSError, ValueError):  # the root has no limit; the name may belong to another namespace
            continue
        if limit != "max":
            rooms.append(int(limit) - used + droppable)
    return rooms
