"""The machine's verdicts, each from facts that the test makes up; and the reading of the real one."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.doctor.machine import (
    Disk,
    Machine,
    check_clock,
    check_compilers,
    check_cores,
    check_memory,
    check_python,
    machine_checks,
    read_disk,
    read_machine,
)
from launch.doctor.result import Check

PYTHONS = ">=3.11,<3.14"
GOOD = Machine(
    python="3.12.4",
    c_compiler="/usr/bin/cc",
    ninja="/usr/bin/ninja",
    cores=64,
    usable_cores=64,
    gpus=8,
    memory_bytes=512 * 10**9,
    available_bytes=400 * 10**9,
    memory_limit_bytes=None,
    runs=Disk(Path("runs"), 10**12, "ext4", "writable"),
    cache=Disk(Path("cache"), 10**12, "xfs", "writable"),
    shm_bytes=256 * 10**9,
    shm_free_bytes=256 * 10**9,
    open_files=1_048_576,
    locked_bytes=None,
    processes=None,
    infiniband=("mlx5_0",),
    clock="synchronised",
)


def verdicts(machine: Machine) -> dict[str, Check]:
    return {check.name: check for check in machine_checks(machine, pythons=PYTHONS)}


def test_a_good_machine_is_fine_in_everything():
    assert {check.verdict for check in verdicts(GOOD).values()} == {"fine"}
    assert len(verdicts(GOOD)) == 9


@pytest.mark.parametrize(
    ("version", "verdict"), [("3.10.14", "problem"), ("3.11.0", "fine"), ("3.13.9", "fine"), ("3.14.0", "problem")]
)
def test_pythons_range(version: str, verdict: str):
    check = check_python(version, pythons=PYTHONS)
    assert check.verdict == verdict and check.found == version


@pytest.mark.parametrize(
    ("compiler", "ninja", "missing"),
    [(None, "/n", "no C compiler on"), ("/c", None, "no ninja on"), (None, None, "no C compiler and no ninja")],
)
def test_a_missing_compiler_is_a_note(compiler: str | None, ninja: str | None, missing: str):
    check = check_compilers(compiler, ninja=ninja)
    assert check.verdict == "note" and missing in check.found


@pytest.mark.parametrize(
    ("usable", "gpus", "verdict", "found"),
    [
        (64, 8, "fine", "64"),
        (64, 0, "fine", "64"),
        (1.5, 0, "fine", "1.5 of 64 (affinity or control group)"),
        (31, 8, "note", "31 of 64 (affinity or control group) for 8 GPUs"),
    ],
)
def test_cores_that_may_be_used_against_gpus(usable: float, gpus: int, verdict: str, found: str):
    check = check_cores(64, usable=usable, gpus=gpus)
    assert (check.verdict, check.found) == (verdict, found)


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
        (Disk(Path("r"), 10**12, "ext4", "read-only"), "problem", "--runs"),
        (Disk(Path("r"), 4 * 10**9, "ext4", "writable"), "problem", "checkpoint"),
        (Disk(Path("r"), 20 * 10**9, "ext4", "writable"), "note", "several checkpoints"),
        (Disk(Path("r"), 10**12, "nfs4", "writable"), "note", "MLFLOW_TRACKING_URI"),
        (Disk(Path("r"), 10**12, "", "writable"), "fine", ""),
    ],
)
def test_the_disk_of_the_runs(disk: Disk, verdict: str, words: str):
    check = verdicts(replace(GOOD, runs=disk))["disk of runs"]
    assert check.verdict == verdict and words in check.remedy and check.found.startswith("r: ")


@pytest.mark.parametrize(
    ("disk", "verdict", "words"),
    [
        (Disk(Path("c"), 10**12, "lustre", "writable"), "note", "on a disk of this machine"),
        (Disk(Path("c"), 10**12, "ext4", "read-only"), "note", "data.cache.folder"),
        (Disk(Path("c"), 99 * 10**9, "ext4", "writable"), "note", "100 GB"),
        (Disk(Path("c"), 101 * 10**9, "tmpfs", "writable"), "fine", ""),
    ],
)
def test_the_disk_of_the_cache_is_never_a_problem_since_local_shards_need_none(disk: Disk, verdict: str, words: str):
    check = verdicts(replace(GOOD, cache=disk))["disk of cache"]
    assert check.verdict == verdict and words in check.remedy


@pytest.mark.parametrize(
    ("free", "gpus", "verdict"), [(64 * 2**20, 8, "problem"), (64 * 2**20, 1, "note"), (2 * 2**30, 8, "fine")]
)
def test_dockers_shared_memory_is_too_little_for_several_gpus(free: int, gpus: int, verdict: str):
    check = verdicts(replace(GOOD, shm_bytes=4 * 2**30, shm_free_bytes=free, gpus=gpus))["/dev/shm"]
    assert check.verdict == verdict
    assert "NCCL" in check.found + check.remedy  # what for


def test_no_shared_memory_at_all():
    check = verdicts(replace(GOOD, shm_bytes=None, shm_free_bytes=None))["/dev/shm"]
    assert check.verdict == "absent" and "worker_kind=thread" in check.remedy


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"open_files": 1024}, "ulimit -n 4096"),
        ({"processes": 1000}, "ulimit -u 4096"),
        ({"locked_bytes": 65536}, "ulimit -l unlimited"),
    ],
)
def test_limits_that_are_low(change: dict[str, int], advice: str):
    check = verdicts(replace(GOOD, **change))["limits"]
    assert check.verdict == "note" and advice in check.remedy


def test_locked_memory_matters_only_with_infiniband():
    check = verdicts(replace(GOOD, locked_bytes=65536, infiniband=()))["limits"]
    assert check.verdict == "fine" and "65.5 kB" in check.found


def test_the_clock():
    assert [check_clock(each).verdict for each in ("synchronised", "not synchronised", "unknown")] == [
        *("fine", "note", "absent")
    ]


def test_this_machine_can_be_read(tmp_path: Path):
    machine = read_machine(runs=tmp_path / "not" / "there", cache=tmp_path, gpus=0)
    assert machine.cores >= machine.usable_cores > 0 and machine.memory_bytes >= machine.available_bytes > 0
    assert machine.runs.access == "writable" and machine.runs.free_bytes > 0
    assert len(machine_checks(machine, pythons=PYTHONS)) == 9


def test_a_folder_to_be_made_is_judged_by_the_one_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    assert read_disk(tmp_path / "a" / "b").access == "read-only"
    assert asked == [tmp_path]
