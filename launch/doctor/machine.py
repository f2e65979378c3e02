"""Check Python, cores, memory, the disk of the runs, /dev/shm and open files, in milliseconds.

Thresholds: needs of the demo or a ViT-L/16 run. torch's collect_env, printed with them, has the other facts.
"""

import os
import platform
import resource
import shutil
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from shardvit.data_shards.control_groups import core_quota, memory_limit_bytes
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.text import show_bytes
from shardvit.launch.doctor.findings import Check, judge
from shardvit.pipeline.checkpoint.disk_space import free_bytes

_DEMO_BYTES = 3 * 10**9  # `make demo` needs 2.5 GiB
_ONE_CHECKPOINT_BYTES = 5 * 10**9  # ViT-L/16 in bf16 (14 bytes per parameter)
_SHM_BYTES = 2**30  # docker's 64 MB is too little; a batch of 256 images at 224 pixels in uint8 is 39 MB
_CORES_PER_GPU = 4  # a GPU trains ViT-L/16 at 1,500 images/s, a core decodes 400 to 520 images/s
_OPEN_FILES = 4096  # a process may have shards of 256 lanes open, and connections of several workers
_LOOK_SECONDS = 0.3
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p"}


def machine_checks(*, runs: Path, gpus: int, pythons: str) -> list[Check]:
    """Run all checks; `pythons` is pyproject.toml's range."""
    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
    usable, busy = min(num_cores(), core_quota() or cores), psutil.cpu_percent(_LOOK_SECONDS) / 100
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return [
        check_python(platform.python_version(), pythons=pythons),
        check_cores(cores, usable=usable, free=(1 - busy) * cores, gpus=gpus),
        check_memory(memory.total, available=memory.available, limit=memory_limit_bytes()),
        check_disk(runs),
        check_shm(shm.free if shm else None, total=shm.total if shm else 0, gpus=gpus),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),  # a rank raises its own soft limit
    ]


def check_python(version: str, *, pythons: str) -> Check:
    """Check the version against the range."""
    wrong = not SpecifierSet(pythons).contains(Version(version), prereleases=True)
    return judge("Python", version, (wrong, "problem", f"install shardvit with a Python {pythons}"))


def check_cores(cores: int, *, usable: float, free: float, gpus: int) -> Check:
    """Check the usable cores against what decoding needs, and how many are free now."""
    found = f"{cores}" if usable >= cores else f"{usable:g} of {cores} (affinity or control group)"
    decoding = (
        f"decoding for one GPU takes some {_CORES_PER_GPU} cores: ask the batch system for more (--cpus-per-task), "
        "or pack the shards smaller (shardvit pack --resize-short)"
    )
    others = "other programs use the rest: on a CPU, fewer threads (OMP_NUM_THREADS) may be faster"
    return judge(
        "cores",
        f"{found}{f' for {gpus} GPUs' if gpus else ''}; {free:.1f} are free now",
        (usable < gpus * _CORES_PER_GPU, "note", decoding),
        (free < usable / 2, "note", others),
    )


def check_memory(total: int, *, available: int, limit: int | None) -> Check:
    """Check the usable memory against the demo's need."""
    bound = total if limit is None else min(limit, total)
    allowed = f", of which this process may use {show_bytes(bound)} (control group)" if bound < total else ""
    remedy = (
        f"the demo alone takes {show_bytes(_DEMO_BYTES)}: end other programs, or ask the batch system for more (--mem)"
    )
    found = f"{show_bytes(total)}{allowed}; {show_bytes(available)} available"
    return judge("memory", found, (min(bound, available) < _DEMO_BYTES, "problem", remedy))


def check_disk(runs: Path) -> Check:
    """Check the disk of `runs`, or of its nearest existing parent: room for checkpoints, reliable SQLite locks."""
    there = next(path for path in (runs, *runs.absolute().parents) if path.exists())
    free, kind = free_bytes(runs), file_system(there)
    return judge(
        "disk of runs",
        f"{runs}: {show_bytes(free)} free{f' ({kind})' if kind else ''}",
        (
            not os.access(there, os.W_OK | os.X_OK),
            "problem",
            "not writable: let --runs name a folder that you may write to",
        ),
        (
            free < _ONE_CHECKPOINT_BYTES,
            "problem",
            "a checkpoint of ViT-L/16 takes 4.3 GB: make room, or let --runs name a folder on a larger disk",
        ),
        (
            kind in _NETWORK_FILE_SYSTEMS,
            "note",
            "good for checkpoints, but MLflow's default store is an SQLite file beside them, whose locks are "
            "unreliable on a network file system: set MLFLOW_TRACKING_URI to a server",
        ),
    )


def file_system(folder: Path) -> str:
    """The file system of an existing folder, such as "ext4" or "nfs4"; empty if unknown."""
    there = folder.resolve()
    kinds = [
        (len(Path(mount.mountpoint).parts), number, mount.fstype.removeprefix("fuse."))
        for number, mount in enumerate(psutil.disk_partitions(all=True))
        if there.is_relative_to(mount.mountpoint)
    ]
    return max(kinds)[-1] if kinds else ""  # the innermost; for the same folder the latest, which hides the others


def check_shm(free: int | None, *, total: int, gpus: int) -> Check:
    """Check shared memory: workers pass batches through it, NCCL its messages within a machine."""
    if free is None:
        return Check("/dev/shm", "absent", "there is none", "set data.worker_kind=thread")
    remedy = (
        "worker processes pass batches through it, NCCL its messages: give a container more (docker run --shm-size "
        "16g, or --ipc host; Kubernetes: an emptyDir of medium Memory), remove what dead programs left, or set "
        "data.worker_kind=thread"
    )
    verdict = "problem" if gpus > 1 else "note"  # worker threads, the default up to 4, do not need it
    return judge("/dev/shm", f"{show_bytes(free)} of {show_bytes(total)} free", (free < _SHM_BYTES, verdict, remedy))


def check_open_files(limit: int) -> Check:
    """Check the hard limit (ulimit -Hn)."""
    is_low = limit != resource.RLIM_INFINITY and limit < _OPEN_FILES
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}"
    return judge("open files", found, (is_low, "note", f"raise the hard limit (ulimit -Hn {_OPEN_FILES})"))
