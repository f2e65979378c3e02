"""What a run was computed with, without what nobody else is to see."""

import subprocess
from pathlib import Path

import pytest

from shardvit.pipeline.tracking import environment
from shardvit.pipeline.tracking.environment import git_diff, without_secrets, write_environment, write_if_changed


def test_packages_are_named_and_an_equal_file_keeps_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "tracking"
    write_environment(folder)
    text = (folder / "environment.txt").read_text()
    assert "python 3." in text and "\ntorch==" in text and "\nmlflow==" in text
    before = (folder / "environment.txt").stat().st_mtime_ns
    write_if_changed(folder / "environment.txt", text)
    assert (folder / "environment.txt").stat().st_mtime_ns == before


def test_changes_of_the_checkout_are_kept_without_secrets_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    source = tmp_path / "source.py"
    source.write_text("one = 1\n")
    git("init")
    assert git_diff(source) == ""
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "one")
    assert git_diff(source) == ""
    source.write_text('one = 2\napi_key = "abc"\nurl = "https://me:abc@host/x"\n')
    diff = git_diff(source)
    assert "+one = 2" in diff and "abc" not in diff and "https://***@host/x" in diff
    monkeypatch.setattr(environment, "_MOST_DIFF_BYTES", 20)
    assert len(git_diff(source)) < 100 and "cut" in git_diff(source)


def test_words_that_tell_of_secrets_hide_what_follows() -> None:
    for text in ("token: x1", "PASSWORD=x1", "'secret': 'x1'", "https://u:x1@host"):
        assert "x1" not in without_secrets(text)
    assert without_secrets("tokens per image") == "tokens per image"
