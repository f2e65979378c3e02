"""The machine's verdicts, each from facts that the test makes up; the real one."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from launch.doctor.machine import (
    DiskOf,
    check_cache_disk,
    check_cores,
    check_limits,
    check_memory,
    check_python,
    check_runs_disk,
    check_shm,
    check_threads,
    file_system,
    machine_checks,
    read_disk,
)

PYTHONS = ">=3.11,<3.14"


@pytest.mark.parametrize(
    ("version", "verdict"), [("3.10.14", "problem"), ("3.11.0", "fine"), ("3.13.9", "fine"), ("3.14.0", "problem")]
)
def test_pythons_range(version: str, verdict: str):
    check = check_python(version, pythons=PYTHONS)
    assert check.verdict == verdict and check.found == version


@pytest.mark.parametrize(
    ("usable", "gpus", "verdict", "found"),
    [
        (64, 8, "fine", "64 for 8 GPUs"),
        (64, 0, "fine", "64"),
        (1.5, 0, "fine", "1.5 of 64 (affinity or control group)"),
        (31, 8, "note", "31 of 64 (affinity or control group) for 8 GPUs"),
    ],
)
def test_cores_that_may_be_used_against_gpus(usable: float, gpus: int, verdict: str, found: str):
    check = check_cores(64, usable=usable, gpus=gpus)
    assert (check.verdict, check.found) == (verdict, found)


@pytest.mark.parametrize(
    ("asked", "free", "verdict", "remedy"),
    [
        (None, 8, "fine", ""),
        (8, 5, "fine", ""),
        (9, 8, "note", "set it to 8"),
        (None, 3.9, "note", "OMP_NUM_THREADS"),
        (4, 0, "note", "OMP_NUM_THREADS"),
        (1, 0, "fine", ""),
    ],
)
def test_threads_against_the_cores_that_are_there_and_free(asked: int | None, free: float, verdict: str, remedy: str):
    check = check_threads(asked, usable=8, free=free)
    assert check.verdict == verdict and remedy in check.remedy and "OMP_NUM_THREADS" in check.found


@pytest.mark.parametrize(
    ("available", "limit", "verdict"),
    [
        (400 * 10**9, None, "fine"),
        (400 * 10**9, 16 * 10**9, "fine"),
        (400 * 10**9, 2 * 10**9, "problem"),
        (2 * 10**9, None, "problem"),
    ],
)
def test_memory_is_what_the_control_group_and_the_others_leave(available: int, limit: int | None, verdict: str):
    check = check_memory(512 * 10**9, available=available, limit=limit)
    assert check.verdict == verdict
    assert ("(control group)" in check.found) == (limit is not None)


@pytest.mark.parametrize(
    ("disk", "verdict", "words"),
    [
        (DiskOf(Path("r"), 10**12, "ext4", "read-only"), "problem", "--runs"),
        (DiskOf(Path("r"), 4 * 10**9, "ext4", "writable"), "problem", "checkpoint"),
        (DiskOf(Path("r"), 20 * 10**9, "ext4", "writable"), "note", "several checkpoints"),
        (DiskOf(Path("r"), 10**12, "nfs4", "writable"), "note", "MLFLOW_TRACKING_URI"),
        (DiskOf(Path("r"), 10**12, "", "writable"), "fine", ""),
    ],
)
def test_the_disk_of_the_runs(disk: DiskOf, verdict: str, words: str):
    check = check_runs_disk(disk)
    assert check.verdict == verdict and words in check.remedy and check.found.startswith("r: ")


@pytest.mark.parametrize(
    ("disk", "verdict", "words"),
    [
        (DiskOf(Path("c"), 10**12, "lustre", "writable"), "note", "on a disk of this machine"),
        (DiskOf(Path("c"), 10**12, "ext4", "read-only"), "note", "data.cache.folder"),
        (DiskOf(Path("c"), 99 * 10**9, "ext4", "writable"), "note", "100 GB"),
        (DiskOf(Path("c"), 101 * 10**9, "tmpfs", "writable"), "fine", ""),
    ],
)
def test_the_disk_of_the_cache_is_never_a_problem_since_local_shards_need_none(disk: DiskOf, verdict: str, words: str):
    check = check_cache_disk(disk)
    assert check.verdict == verdict and words in check.remedy


@pytest.mark.parametrize(
    ("free", "gpus", "verdict"), [(64 * 2**20, 8, "problem"), (64 * 2**20, 1, "note"), (2 * 2**30, 8, "fine")]
)
def test_dockers_shared_memory_is_too_little_for_several_gpus(free: int, gpus: int, verdict: str):
    check = check_shm(free, total=4 * 2**30, gpus=gpus)
    assert check.verdict == verdict and ("--shm-size" in check.remedy) == (verdict != "fine")


def test_no_shared_memory_at_all():
    check = check_shm(None, total=0, gpus=0)
    assert check.verdict == "absent" and "worker_kind=thread" in check.remedy


LIMITS = {"open_files": 1_048_576, "processes": None, "locked_bytes": None, "has_infiniband": True}


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({}, ""),
        ({"open_files": 1024}, "ulimit -Hn 4096"),
        ({"processes": 1000}, "ulimit -u 4096"),
        ({"locked_bytes": 65536}, "ulimit -l unlimited"),
        ({"locked_bytes": 65536, "has_infiniband": False}, ""),
    ],
)
def test_limits_that_are_low(change: dict[str, Any], advice: str):
    check = check_limits(**LIMITS | change)
    assert check.verdict == ("note" if advice else "fine") and advice in check.remedy
    assert ("65.5 kB" if "locked_bytes" in change else "locked memory unlimited") in check.found


def test_this_machine_can_be_read(tmp_path: Path):
    checks = machine_checks(runs=tmp_path / "not" / "there", cache=tmp_path, gpus=0, pythons=PYTHONS)
    assert len(checks) == 8 and {check.name: check.verdict for check in checks}["Python"] == "fine"
    disk = read_disk(tmp_path / "not" / "there")
    assert disk.access == "writable" and disk.free_bytes > 0 and disk.file_system


def test_a_folder_to_be_made_is_judged_by_the_one_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    assert read_disk(tmp_path / "a" / "b").access == "read-only"
    assert asked == [tmp_path]


def test_the_innermost_mount_tells_the_file_system(monkeypatch: pytest.MonkeyPatch):
    mount = namedtuple("mount", "mountpoint fstype")
    mounts = [
        mount("/", "ext4"),
        mount("/users", "nfs4"),
        mount("/users/me/local disk", "xfs"),
        mount("/over", "tmpfs"),
        mount("/over", "fuse.s3fs"),  # hides the one before
    ]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    kinds = {
        "/opt/x": "ext4",
        "/users/me/runs": "nfs4",
        "/users/me/local disk/runs": "xfs",
        "/usersland": "ext4",
        "/over/x": "s3fs",
    }
    assert {folder: file_system(Path(folder)) for folder in kinds} == kinds
    mounts.clear()
    assert file_system(Path("/x")) == ""
