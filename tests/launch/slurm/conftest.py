"""A folder from which jobs are submitted."""

from pathlib import Path

import pytest

from tests.launch.machine import make_shards


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with shards."""
    for split in ("train", "val"):
        make_shards(tmp_path / "shards" / split)
    monkeypatch.chdir(tmp_path)
    return tmp_path
