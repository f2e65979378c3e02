"""Spare memory is what the machine and every control group around the process leave, less a reserve."""

from pathlib import Path

import psutil
import pytest

from pipeline.checkpoint.host_memory import spare_host_bytes

GIB = 1 << 30


def group(folder: Path, *, limit: str, current: int, droppable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\nactive_file 0\n")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def spare(tmp_path: Path, name: str) -> int:
    (tmp_path / "own").write_text(f"12:cpu:/elsewhere\n0::{name}\n")
    return spare_host_bytes(cgroups=tmp_path / "cgroups", own=tmp_path / "own")


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    reserve = round(0.05 * 64 * GIB)
    assert spare_host_bytes(cgroups=tmp_path, own=tmp_path / "none") == 40 * GIB - reserve
    group(tmp_path / "cgroups" / "job", limit="max", current=30 * GIB, droppable=0)
    assert spare(tmp_path, "/job") == spare(tmp_path, "/no/such/group") == 40 * GIB - reserve


def test_the_tightest_group_decides_and_pages_of_files_count_as_free(tmp_path):
    reserve = round(0.05 * 64 * GIB)
    group(tmp_path / "cgroups" / "job", limit=str(20 * GIB), current=12 * GIB, droppable=2 * GIB)
    group(tmp_path / "cgroups" / "job" / "step", limit=str(18 * GIB), current=6 * GIB, droppable=0)
    assert spare(tmp_path, "/job/step") == 10 * GIB - reserve
    group(tmp_path / "cgroups" / "job", limit=str(11 * GIB), current=10 * GIB, droppable=0)
    assert spare(tmp_path, "/job/step") == 0
