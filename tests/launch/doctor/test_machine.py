"""The machine's verdicts, each from facts that the test makes up; the real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardvit.launch.doctor import machine
from shardvit.launch.doctor.machine import (
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_python,
    check_shm,
    file_system,
    machine_checks,
)

PYTHONS = ">=3.11,<3.14"


@pytest.mark.parametrize(
    ("version", "verdict"), [("3.10.14", "problem"), ("3.11.0", "fine"), ("3.13.9", "fine"), ("3.14.0", "problem")]
)
def test_pythons_range(version: str, verdict: str):
    check = check_python(version, pythons=PYTHONS)
    assert check.verdict == verdict and check.found == version


@pytest.mark.parametrize(
    ("usable", "gpus", "free", "verdict", "words"),
    [
        (64, 8, 64, "fine", "64 for 8 GPUs"),
        (64, 0, 64, "fine", "64; 64.0 are free now"),
        (1.5, 0, 64, "fine", "1.5 of 64 (affinity or control group)"),
        (31, 8, 64, "note", "31 of 64 (affinity or control group) for 8 GPUs"),
        (64, 0, 31, "note", "31.0 are free now"),
    ],
)
def test_cores_that_may_be_used_and_are_free(usable: float, gpus: int, free: float, verdict: str, words: str):
    check = check_cores(64, usable=usable, free=free, gpus=gpus)
    assert check.verdict == verdict and words in check.found


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
    ("free", "access", "kind", "verdict", "words"),
    [
        (10**12, False, "ext4", "problem", "--runs"),
        (4 * 10**9, True, "nfs4", "problem", "checkpoint"),
        (10**12, True, "nfs4", "note", "MLFLOW_TRACKING_URI"),
        (10**12, True, "ext4", "fine", ""),
        (10**12, True, "", "fine", ""),
    ],
)
def test_the_disk_of_the_runs_is_that_of_the_folder_above_that_is_there(
    free: int, access: bool, kind: str, verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path) or access)
    monkeypatch.setattr(machine, "free_bytes", lambda folder: free)
    monkeypatch.setattr(machine, "file_system", lambda folder: kind)
    check = check_disk(tmp_path / "a" / "b")
    assert check.verdict == verdict and words in check.remedy and asked == [tmp_path]
    assert kind in check.found


def test_the_innermost_mount_tells_the_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    mounts = [("/", "ext4"), (str(tmp_path), "autofs"), (str(tmp_path), "nfs4"), (f"{tmp_path}/other", "tmpfs")]
    parts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: parts)
    assert file_system(tmp_path) == "nfs4"


@pytest.mark.parametrize(
    ("free", "gpus", "verdict"), [(64 * 2**20, 8, "problem"), (64 * 2**20, 1, "note"), (2 * 2**30, 8, "fine")]
)
def test_dockers_shared_memory_is_too_little_for_several_gpus(free: int, gpus: int, verdict: str):
    check = check_shm(free, total=4 * 2**30, gpus=gpus)
    assert check.verdict == verdict and ("--shm-size" in check.remedy) == (verdict != "fine")


def test_no_shared_memory_at_all():
    check = check_shm(None, total=0, gpus=0)
    assert check.verdict == "absent" and "worker_kind=thread" in check.remedy


@pytest.mark.parametrize(("limit", "verdict"), [(1024, "note"), (1_048_576, "fine"), (-1, "fine")])
def test_open_files(limit: int, verdict: str):
    check = check_open_files(limit)
    assert check.verdict == verdict and ("ulimit -Hn 4096" in check.remedy) == (verdict == "note")


def test_this_machine_can_be_read(tmp_path: Path):
    checks = machine_checks(runs=tmp_path / "not" / "there", gpus=0, pythons=PYTHONS)
    assert len(checks) == 6 and {check.name: check.verdict for check in checks}["Python"] == "fine"
