"""The machine: Python, cores, memory, disks, /dev/shm, and a process's limits, in milliseconds.

Thresholds are what the demo or a run of ViT-L/16 takes.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from data_shards.control_groups import core_quota, memory_limit_bytes
from data_shards.processes import num_cores
from data_shards.text import parse_bytes, show_bytes
from launch.doctor.findings import Check, judge
from launch.env import omp_num_threads
from pipeline.checkpoint.disk_space import free_bytes
from pipeline.recipe.data import CacheRecipe

_DEMO_BYTES = 3 * 10**9  # `make demo` takes 2.5 GiB
_CHECKPOINTS_BYTES = 30 * 10**9  # two of ViT-L/16 in bf16 (14 bytes a parameter) and a model, with room to spare
_ONE_CHECKPOINT_BYTES = 5 * 10**9
_SHM_BYTES = 2**30  # docker's 64 MB is what goes wrong; a batch of 256 images at 224 pixels in uint8 is 39 MB
_CORES_PER_GPU = 4  # 1,500 images/s, a GPU's pace with ViT-L/16, at 400 to 520 images/s a core
_OPEN_FILES = 4096  # a process may hold a shard of each of 256 lanes open, several workers' connections beside them
_LOOK_SECONDS = 0.3
_PROCESSES = 4096  # threads count: a rank has some 50 of its own and of its libraries
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p"}  # slow


@dataclass(frozen=True)
class DiskOf:
    """The disk of a folder that exists or will be made."""

    folder: Path
    free_bytes: int
    file_system: str
    access: Literal["writable", "read-only"]

    def __str__(self) -> str:
        kind = f" ({self.file_system})" if self.file_system else ""
        return f"{self.folder}: {show_bytes(self.free_bytes)} free{kind}"


def machine_checks(*, runs: Path, cache: Path, gpus: int, pythons: str) -> list[Check]:
    """All verdicts; `pythons` is pyproject.toml's range."""
    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
    usable, busy = min(num_cores(), core_quota() or cores), psutil.cpu_percent(_LOOK_SECONDS) / 100
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return [
        check_python(platform.python_version(), pythons=pythons),
        check_cores(cores, usable=usable, gpus=gpus),
        check_threads(omp_num_threads(), usable=usable, free=(1 - busy) * cores),
        check_memory(memory.total, available=memory.available, limit=memory_limit_bytes()),
        check_runs_disk(read_disk(runs)),
        check_cache_disk(read_disk(cache)),
        check_shm(shm.free if shm else None, total=shm.total if shm else 0, gpus=gpus),
        check_limits(
            open_files=_limit(resource.RLIMIT_NOFILE, "hard"),  # a rank raises the soft one by itself
            processes=_limit(resource.RLIMIT_NPROC, "soft"),
            locked_bytes=_limit(resource.RLIMIT_MEMLOCK, "soft"),
            has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        ),
    ]


def read_disk(folder: Path) -> DiskOf:
    """The disk of `folder`, or of the nearest folder above that exists."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    return DiskOf(folder, free_bytes(folder), file_system(folder), "writable" if writable else "read-only")


def file_system(folder: Path) -> str:
    """The file system of `folder`, such as "ext4" or "nfs4"; empty if unknown."""
    there = folder.absolute()
    kinds = [
        (len(Path(mount.mountpoint).parts), number, mount.fstype.removeprefix("fuse."))
        for number, mount in enumerate(psutil.disk_partitions(all=True))
        if there.is_relative_to(mount.mountpoint)
    ]
    return max(kinds)[-1] if kinds else ""  # the innermost; of the same folder the latest, which hides the others


def _limit(number: int, which: Literal["soft", "hard"]) -> int | None:
    limit = resource.getrlimit(number)[which == "hard"]
    return None if limit == resource.RLIM_INFINITY else limit


def check_python(version: str, *, pythons: str) -> Check:
    """Whether the version is in the range."""
    wrong = not SpecifierSet(pythons).contains(Version(version), prereleases=True)
    return judge("Python", version, (wrong, "problem", f"install shardvit with a Python {pythons}"))


def check_cores(cores: int, *, usable: float, gpus: int) -> Check:
    """Cores that this process may use, against what decoding takes."""
    found = f"{cores}" if usable >= cores else f"{usable:g} of {cores} (affinity or control group)"
    remedy = (
        f"decoding for one GPU takes some {_CORES_PER_GPU} cores: ask the batch system for more (--cpus-per-task), "
        "or pack the shards smaller (shardvit pack --resize-short)"
    )
    return judge(
        "cores", f"{found} for {gpus} GPUs" if gpus else found, (usable < gpus * _CORES_PER_GPU, "note", remedy)
    )


def check_threads(asked: int | None, *, usable: float, free: float) -> Check:
    """Torch's threads on a CPU, `asked` by OMP_NUM_THREADS, against cores that they may use, and that are free now."""
    found = f"OMP_NUM_THREADS is {'not set' if asked is None else asked}; {free:.1f} cores are free now"
    fewer = f"they would wait for one another: set it to {max(1, int(usable))} for one process on a CPU, or unset it"
    others = "other programs use the rest: on a CPU, fewer threads (OMP_NUM_THREADS) may be faster"
    return judge(
        "threads",
        found,
        (asked is not None and asked > max(1, usable), "note", fewer),
        (asked != 1 and free < usable / 2, "note", others),
    )


def check_memory(total: int, *, available: int, limit: int | None) -> Check:
    """Memory that may be taken."""
    bound = total if limit is None else min(limit, total)
    allowed = f", of which this process may use {show_bytes(bound)} (control group)" if bound < total else ""
    remedy = (
        f"the demo alone takes {show_bytes(_DEMO_BYTES)}: end other programs, or ask the batch system for more (--mem)"
    )
    found = f"{show_bytes(total)}{allowed}; {show_bytes(available)} available"
    return judge("memory", found, (min(bound, available) < _DEMO_BYTES, "problem", remedy))


def check_runs_disk(disk: DiskOf) -> Check:
    """The disk of the checkpoints."""
    return judge(
        "disk of runs",
        str(disk),
        (disk.access == "read-only", "problem", "not writable: let --runs name a folder that you may write to"),
        (
            disk.free_bytes < _ONE_CHECKPOINT_BYTES,
            "problem",
            "a checkpoint of ViT-L/16 takes 4.3 GB: make room, or let --runs name a folder on a larger disk",
        ),
        (
            disk.free_bytes < _CHECKPOINTS_BYTES,
            "note",
            "a run keeps several checkpoints, of ViT-L/16 4.3 GB each: make room",
        ),
        (
            disk.file_system in _NETWORK_FILE_SYSTEMS,
            "note",
            "good for checkpoints, but MLflow's default store is an SQLite file beside them, and SQLite's locks are "
            "unreliable on a network file system: set MLFLOW_TRACKING_URI to a server",
        ),
    )


def check_cache_disk(disk: DiskOf) -> Check:
    """The disk of downloaded shards; never a problem, as local shards need none."""
    limit = CacheRecipe().limit
    return judge(
        "disk of cache",
        str(disk),
        (disk.access == "read-only", "note", "not writable: set data.cache.folder if the shards are not local files"),
        (
            disk.file_system in _NETWORK_FILE_SYSTEMS,
            "note",
            "the cache must be on a disk of this machine: set data.cache.folder",
        ),
        (
            disk.free_bytes < parse_bytes(limit),
            "note",
            f"shards that are not local files are kept there up to {limit}: set data.cache.folder to a larger disk, or "
            "data.cache.limit",
        ),
    )


def check_shm(free: int | None, *, total: int, gpus: int) -> Check:
    """Shared memory: workers pass batches through it, and NCCL messages within a machine."""
    if free is None:
        return Check("/dev/shm", "absent", "there is none", "set data.worker_kind=thread")
    remedy = (
        "worker processes pass batches through it, NCCL its messages: give a container more (docker run --shm-size "
        "16g, or --ipc host; Kubernetes: an emptyDir of medium Memory), remove what dead programs left, or set "
        "data.worker_kind=thread"
    )
    verdict = "problem" if gpus > 1 else "note"  # worker threads, the default up to 4, do without
    return judge("/dev/shm", f"{show_bytes(free)} of {show_bytes(total)} free", (free < _SHM_BYTES, verdict, remedy))


def check_limits(
    *, open_files: int | None, processes: int | None, locked_bytes: int | None, has_infiniband: bool
) -> Check:
    """The limits of a process (ulimit); None: unlimited."""
    files, threads = ("unlimited" if limit is None else f"{limit:,}" for limit in (open_files, processes))
    locked = "unlimited" if locked_bytes is None else show_bytes(locked_bytes)
    advice = []
    if open_files is not None and open_files < _OPEN_FILES:
        advice.append(f"raise the hard limit of open files (ulimit -Hn {_OPEN_FILES})")
    if processes is not None and processes < _PROCESSES:
        advice.append(f"raise the processes, threads count too (ulimit -u {_PROCESSES})")
    if has_infiniband and locked_bytes is not None:
        advice.append(
            "NCCL over InfiniBand locks its buffers: ulimit -l unlimited; in a batch system its administrator sets it"
        )
    found = f"open files {files}, processes {threads}, locked memory {locked}"
    return judge("limits", found, (bool(advice), "note", "; ".join(advice)))
