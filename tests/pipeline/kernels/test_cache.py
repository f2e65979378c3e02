"""Compiled code is kept in the run folder, under a name that nobody else knows."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardvit.pipeline.kernels.cache import keep_compiled_code

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")


def test_one_secret_name_for_all_processes_runs_and_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool:
        from shardvit.pipeline.kernels.cache import _users_name

        names = set(pool.map(_users_name, [tmp_path / "home" / "name"] * 32))
    assert len(names) == 1 and [path.name for path in (tmp_path / "home").iterdir()] == ["name"]
    assert stat.S_IMODE((tmp_path / "home" / "name").stat().st_mode) == 0o600

    planted = tmp_path / "run" / "compiled" / "0123456789abcdef0123456789abcdef"
    planted.mkdir(parents=True)  # as somebody else's folder may have it
    found = set[str]()
    for run in ("run", "run", "other"):
        monkeypatch.setenv(NAME, "")
        folder = keep_compiled_code(tmp_path / run, own_cache=tmp_path)
        assert folder is not None and folder.parent == tmp_path / run / "compiled" and folder != planted
        assert os.environ[NAME] == str(folder)
        found.add(folder.name)
    assert len(found) == 1
    monkeypatch.setenv(NAME, "")
    elsewhere = keep_compiled_code(tmp_path / "run", own_cache=tmp_path / "another user")
    assert elsewhere is not None and elsewhere.name not in found


def test_what_the_user_set_stays_and_a_home_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shardvit").write_text("a file where a folder should be")
    assert keep_compiled_code(tmp_path / "run", own_cache=tmp_path) is None and not os.environ[NAME]
    monkeypatch.setenv(NAME, "/somewhere")
    assert (
        keep_compiled_code(tmp_path / "run", own_cache=tmp_path / "fine") is None and os.environ[NAME] == "/somewhere"
    )


@pytest.mark.parametrize("text", ["", "../../../elsewhere", "a" * 31])
def test_a_damaged_name_is_not_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "shardvit" / "compiled.name"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert keep_compiled_code(tmp_path / "run", own_cache=tmp_path) is None and not os.environ[NAME]
