"""Who wrote a checkpoint: what is kept, and what counts as a change; MLflow's source tags."""

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from shardvit.pipeline.runs.written_by import changed_since, git_tags, source_tags, written_by


def test_changes_are_named_and_neither_host_nor_time_is_one():
    now = written_by()
    assert now["torch"] == version("torch") and all(isinstance(value, str) and value for value in now.values())
    assert changed_since(now, now) == changed_since({}, now) == []
    before = now | {"torch": "2.0.0", "host": "elsewhere", "time": "2020-01-01T00:00:00+0000"}
    assert changed_since(before, now) == [f"torch 2.0.0 -> {now['torch']}"]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "package" / "code.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    git(tmp_path, "init", "-q", "-b", "trunk")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    return file


def test_the_commit_the_branch_and_whether_files_differ(source: Path) -> None:
    tags = git_tags(source)
    assert tags["mlflow.source.git.commit"] == git(source.parent, "rev-parse", "HEAD")
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["shardvit.git.dirty"] == "false"
    source.write_text("x = 2\n")
    assert git_tags(source)["shardvit.git.dirty"] == "true"


def test_another_repository_around_an_installed_package_is_not_ours(source: Path) -> None:
    installed = source.parent / "installed.py"
    installed.write_text("")
    assert git_tags(installed) == {}


def test_no_repository_and_no_git_mean_no_tags(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_tags(Path("/dev/null")) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_tags(source) == {}


def test_a_user_without_a_name_has_no_user_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise KeyError("uid not found")

    source_tags.cache_clear()
    monkeypatch.setattr("getpass.getuser", no_name)
    tags = source_tags()
    source_tags.cache_clear()
    assert "mlflow.user" not in tags
    assert tags["mlflow.source.name"]
