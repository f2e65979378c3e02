"""What the tests of sources share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def listings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is remembered of archives."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
