"""The machine itself: Python, compilers, cores, memory, disks, /dev/shm, limits of processes, the clock.

`read_machine` asks the system once, in milliseconds (the clock's daemon: at most 5 seconds); the verdicts are pure
functions of what it found. Thresholds are what the demo or a run of ViT-L/16 takes, each with its reason.
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

from data_shards.text import parse_bytes, show_bytes
from launch.doctor.child import ask
from launch.doctor.limits import NETWORK_FILE_SYSTEMS, core_quota, file_system, memory_limit_bytes
from launch.doctor.result import Check
from pipeline.checkpoint.disk_space import free_bytes
from pipeline.recipe.data import CacheRecipe

_DEMO_BYTES = 3 * 10**9  # `make demo` takes 2.5 GiB
_CHECKPOINTS_BYTES = 30 * 10**9  # two of ViT-L/16 in bf16 (14 bytes a parameter) and a model, with room to spare
_ONE_CHECKPOINT_BYTES = 5 * 10**9
_SHM_BYTES = 2**30  # docker's 64 MB is what goes wrong; a batch of 256 images at 224 pixels in uint8 is 39 MB
_CORES_PER_GPU = 4  # 1,500 images/s, a GPU's pace with ViT-L/16, at 400 to 520 images/s a core
_OPEN_FILES = 4096  # a process may hold a shard of each of 256 lanes open, several workers' connections beside them
_PROCESSES = 4096  # threads count: a rank has some 50 of its own and of its libraries


@dataclass(frozen=True)
class Disk:
    """A folder that training writes to."""

    folder: Path
    free_bytes: int
    file_system: str
    access: Literal["writable", "read-only"]


@dataclass(frozen=True)
class Machine:
    """What the system says. None: it does not say, or there is no limit."""

    python: str
    c_compiler: str | None
    ninja: str | None
    cores: int
    usable_cores: float
    gpus: int
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    runs: Disk
    cache: Disk
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None
    locked_bytes: int | None
    processes: int | None
    infiniband: tuple[str, ...]
    clock: Literal["synchronised", "not synchronised", "unknown"]


def read_machine(*, runs: Path, cache: Path, gpus: int) -> Machine:
    """Ask the system."""
    cores = psutil.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    cards = Path("/sys/class/infiniband")
    return Machine(
        python=platform.python_version(),
        c_compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        ninja=shutil.which("ninja"),
        cores=cores,
        usable_cores=min(affinity, core_quota() or affinity),
        gpus=gpus,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit_bytes=memory_limit_bytes(),
        runs=read_disk(runs),
        cache=read_disk(cache),
        shm_bytes=usage.total if usage else None,
        shm_free_bytes=usage.free if usage else None,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        processes=_soft_limit(resource.RLIMIT_NPROC),
        infiniband=tuple(sorted(card.name for card in cards.iterdir())) if cards.is_dir() else (),
        clock=_clock(),
    )


def read_disk(folder: Path) -> Disk:
    """The disk that a folder is, or will be made, on."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    return Disk(folder, free_bytes(folder), file_system(folder), "writable" if writable else "read-only")


def machine_checks(machine: Machine, *, pythons: str) -> list[Check]:
    """All verdicts; `pythons` is the range that pyproject.toml gives."""
    return [
        check_python(machine.python, pythons=pythons),
        check_compilers(machine.c_compiler, ninja=machine.ninja),
        check_cores(machine.cores, usable=machine.usable_cores, gpus=machine.gpus),
        check_memory(machine.memory_bytes, available=machine.available_bytes, limit=machine.memory_limit_bytes),
        check_runs_disk(machine.runs),
        check_cache_disk(machine.cache),
        check_shm(machine.shm_bytes, free=machine.shm_free_bytes, gpus=machine.gpus),
        check_limits(
            open_files=machine.open_files,
            locked_bytes=machine.locked_bytes,
            processes=machine.processes,
            infiniband=machine.infiniband,
        ),
        check_clock(machine.clock),
    ]


def check_python(version: str, *, pythons: str) -> Check:
    """Whether the version is in the range."""
    if SpecifierSet(pythons).contains(Version(version), prereleases=True):
        return Check("Python", "fine", version)
    return Check("Python", "problem", version, f"install shardvit with a Python {pythons}")


def check_compilers(c_compiler: str | None, *, ninja: str | None) -> Check:
    """What torch.compile and DeepSpeed's operators are built with."""
    if c_compiler and ninja:
        return Check("compiler", "fine", f"{c_compiler}, {ninja}")
    missing = " and ".join(["no C compiler"] * (not c_compiler) + ["no ninja"] * (not ninja))
    return Check(
        "compiler",
        "note",
        f"{missing} on PATH",
        "runs do without; installing DeepSpeed, torch.compile and DeepSpeed's own operators need them: install gcc, "
        "pip install ninja, and have the environment's bin folder on PATH",
    )


def check_cores(cores: int, *, usable: float, gpus: int) -> Check:
    """Cores that this process may use, against what decoding takes."""
    found = f"{cores}" if usable >= cores else f"{usable:g} of {cores} (affinity or control group)"
    if gpus and usable < gpus * _CORES_PER_GPU:
        return Check(
            "cores",
            "note",
            f"{found} for {gpus} GPUs",
            f"decoding for one GPU takes some {_CORES_PER_GPU} cores: ask the batch system for more (--cpus-per-task), "
            "or pack the shards smaller (shardvit pack --resize-short)",
        )
    return Check("cores", "fine", found)


def check_memory(total: int, *, available: int, limit: int | None) -> Check:
    """Memory that may be taken."""
    bound = total if limit is None else min(limit, total)
    allowed = f", of which this process may use {show_bytes(bound)} (control group)" if bound < total else ""
    found = f"{show_bytes(total)}{allowed}; {show_bytes(available)} available"
    if min(bound, available) < _DEMO_BYTES:
        return Check(
            "memory",
            "problem",
            found,
            f"the demo alone takes {show_bytes(_DEMO_BYTES)}: end other programs, or ask the batch system for more "
            "(--mem)",
        )
    return Check("memory", "fine", found)


def check_runs_disk(disk: Disk) -> Check:
    """Room and kind of the folder that checkpoints are written to."""
    name, found = "disk of runs", _show_disk(disk)
    if disk.access == "read-only":
        return Check(name, "problem", f"{found}, not writable", "let --runs name a folder that you may write to")
    if disk.free_bytes < _ONE_CHECKPOINT_BYTES:
        return Check(
            name,
            "problem",
            found,
            "a checkpoint of ViT-L/16 takes 4.3 GB: make room, or let --runs name a folder on a larger disk",
        )
    if disk.free_bytes < _CHECKPOINTS_BYTES:
        return Check(name, "note", found, "a run keeps several checkpoints, of ViT-L/16 4.3 GB each: make room")
    if disk.file_system in NETWORK_FILE_SYSTEMS:
        return Check(
            name,
            "note",
            found,
            "checkpoints are well there, but MLflow's default store is an SQLite file beside them, which locks badly "
            "on a network: set MLFLOW_TRACKING_URI to a server",
        )
    return Check(name, "fine", found)


def check_cache_disk(disk: Disk) -> Check:
    """Room and kind of the folder that shards of other machines are kept in; local shards need none."""
    name, found = "disk of cache", _show_disk(disk)
    limit = CacheRecipe().limit
    if disk.access == "read-only":
        return Check(name, "note", f"{found}, not writable", "set data.cache.folder if the shards are not local files")
    if disk.file_system in NETWORK_FILE_SYSTEMS:
        return Check(name, "note", found, "the cache must be on a disk of this machine: set data.cache.folder")
    if disk.free_bytes < parse_bytes(limit):
        return Check(
            name,
            "note",
            found,
            f"shards that are not local files are kept there up to {limit}: set data.cache.folder to a larger disk, or "
            "data.cache.limit",
        )
    return Check(name, "fine", found)


def check_shm(total: int | None, *, free: int | None, gpus: int) -> Check:
    """Shared memory: worker processes hand batches over through it, and NCCL its messages within a machine."""
    purpose = "worker processes hand batches over through it, NCCL its messages"
    if total is None or free is None:
        return Check("/dev/shm", "absent", "there is none", "set data.worker_kind=thread")
    found = f"{show_bytes(free)} of {show_bytes(total)} free"
    if free < _SHM_BYTES:
        return Check(
            "/dev/shm",
            "problem" if gpus > 1 else "note",  # worker threads, the default up to 4, do without
            found,
            f"{purpose}: give a container more (docker run --shm-size 16g, or --ipc host; Kubernetes: an emptyDir of "
            "medium Memory), remove what dead programs left, or set data.worker_kind=thread",
        )
    return Check("/dev/shm", "fine", f"{found} ({purpose})")


def check_limits(
    *, open_files: int | None, locked_bytes: int | None, processes: int | None, infiniband: tuple[str, ...]
) -> Check:
    """The limits of a process (ulimit)."""
    found = (
        f"open files {_show(open_files)}, processes {_show(processes)}, "
        f"locked memory {'unlimited' if locked_bytes is None else show_bytes(locked_bytes)}"
    )
    advice = []
    if open_files is not None and open_files < _OPEN_FILES:
        advice.append(f"raise the open files (ulimit -n {_OPEN_FILES})")
    if processes is not None and processes < _PROCESSES:
        advice.append(f"raise the processes, threads count too (ulimit -u {_PROCESSES})")
    if infiniband and locked_bytes is not None:
        advice.append(
            f"NCCL over InfiniBand ({', '.join(infiniband)}) locks its buffers: ulimit -l unlimited, in a batch system "
            "its administrator's to set"
        )
    if advice:
        return Check("limits", "note", found, "; ".join(advice))
    return Check("limits", "fine", found)


def check_clock(clock: Literal["synchronised", "not synchronised", "unknown"]) -> Check:
    """Whether the clock follows a time server."""
    if clock == "unknown":
        return Check("clock", "absent", "timedatectl does not say whether it is synchronised")
    if clock == "synchronised":
        return Check("clock", "fine", clock)
    return Check(
        "clock",
        "note",
        clock,
        "logs and MLflow's times of several hosts will not fit together, and object stores refuse requests that are "
        "15 minutes off: switch NTP on (timedatectl set-ntp true)",
    )


def _show_disk(disk: Disk) -> str:
    return f"{disk.folder}: {show_bytes(disk.free_bytes)} free" + (f" ({disk.file_system})" if disk.file_system else "")


def _show(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"


def _soft_limit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _clock() -> Literal["synchronised", "not synchronised", "unknown"]:
    answer = ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    match answer.output.strip() if answer.is_success else "":
        case "yes":
            return "synchronised"
        case "no":
            return "not synchronised"
        case _:
            return "unknown"
