"""Limits of control groups, as batch systems and containers set them."""

from pathlib import Path

import pytest

from shardvit.data_shards.control_groups import core_quota, memory_limit_bytes


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def test_version_2_the_smallest_of_all_groups_around_counts(tmp_path: Path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job7/step0\n",
            "sys/fs/cgroup/slurm/job7/step0/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slurm/job7/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/slurm/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/slurm/job7/step0/memory.max": "8000\n",
            "sys/fs/cgroup/slurm/job7/memory.max": "4000\n",
            "sys/fs/cgroup/slurm/memory.max": "max\n",
        },
    )
    assert core_quota(root) == 2.5 and memory_limit_bytes(root) == 4000


def test_version_1(tmp_path: Path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
        },
    )
    assert core_quota(root) == 1.5 and memory_limit_bytes(root) == 7000


def test_version_1_writes_no_limit_as_a_number(tmp_path: Path):
    limit = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    root = write(tmp_path, {"proc/self/cgroup": "5:memory:/\n", **limit})
    assert memory_limit_bytes(root) is None


def test_in_a_container_the_top_folder_is_its_own_group(tmp_path: Path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod7\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/memory.max": "1000\n",
        },
    )
    assert core_quota(root) == 4 and memory_limit_bytes(root) == 1000


@pytest.mark.parametrize("content", ["", "0::/\n", "nonsense\n"])
def test_no_limit(tmp_path: Path, content: str):
    root = write(tmp_path, {"proc/self/cgroup": content})
    assert core_quota(root) is None and memory_limit_bytes(root) is None
