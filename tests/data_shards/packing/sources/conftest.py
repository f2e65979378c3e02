"""Fixtures of the tests of sources."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def listings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folder for listings of archives."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
