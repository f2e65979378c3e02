"""Fixtures of the tests of packing."""

import pytest

from shardvit.data_shards import progress_line as progress


@pytest.fixture(autouse=True)
def _no_lines_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow disk adds lines to what is said; test_progress.py has the lines."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 1e9)
