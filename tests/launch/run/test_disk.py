"""A run folder that is deleted or renamed under a run: it is noticed, said once, and nothing is made in its place.

A whole run whose folder is renamed is in tests/integration/test_folder_gone.py.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.run.disk import Presence

ROOT = Path(__file__).resolve().parents[3]


def replaced(folder: Path) -> None:
    """Another folder has the name; the file system may use the number of the old one again."""
    shutil.rmtree(folder)
    folder.mkdir()


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("")


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda folder: shutil.rmtree(folder),
    "renamed": lambda folder: folder.rename(folder.with_name("other")),
    "its parent renamed": lambda folder: folder.parent.rename(folder.parent.with_name("other")),
    "replaced": replaced,
    "a file in its place": a_file,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("loss", LOSSES)
def test_what_fails_once_the_folder_is_gone_has_failed_because_of_that(folder: Path, loss: str) -> None:
    there = Presence(folder)
    there.demand()
    with pytest.raises(KeyError), there.demanded():
        raise KeyError  # it is there: another error
    LOSSES[loss](folder)
    assert there.is_gone()
    with pytest.raises(UserError, match=rf"{folder} is gone: .*deleted or renamed"):
        there.demand()
    with pytest.raises(UserError, match=rf"{folder} is gone"), there.demanded():
        raise KeyError
    with there.demanded():
        pass  # nothing has failed
    there.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_file_server_that_is_away_is_no_proof(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there, real = Presence(folder), os.stat

    def stat(path: object, **more: object) -> os.stat_result:
        if path == folder:
            raise OSError(number, os.strerror(number))
        return real(path, **more)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(os, "stat", stat)
    assert not there.is_gone()
    monkeypatch.undo()
    there.close()


OWNER = """
import sys, time
from pathlib import Path
from shardvit.launch.run import lock
lock._BEAT_SECONDS = 0.05
given, ended = float(sys.argv[2]), Path(sys.argv[1]).parents[1] / "others-ended"
with lock.locked(Path(sys.argv[1]), what="it", gone_seconds=given, end_others=ended.touch):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("loss", [*LOSSES, "its lock deleted"])
def test_who_holds_the_lock_of_a_folder_that_is_gone_says_so_and_ends(folder: Path, loss: str) -> None:
    command = [sys.executable, "-c", OWNER, str(folder / ".run.lock"), "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout and owner.stdout.readline() == "held\n"
        if loss in ("its lock deleted", "a file in its place"):
            for file in folder.iterdir():
                file.unlink()
        if loss in LOSSES:
            LOSSES[loss](folder)
        assert owner.wait(timeout=240) == 2  # its standard input stays open: it does not end by itself
        assert owner.stderr
        said = owner.stderr.read()
    assert said.count("\n") == 1 and f"{folder} is gone: it was deleted or renamed" in said
    assert loss == "its parent renamed" or (folder.parent / "others-ended").exists()
    if loss in ("deleted", "renamed"):
        assert not folder.exists()
    if loss == "renamed":
        assert any((folder.parent / "other").iterdir())


def test_who_ends_by_itself_is_left_to_it(folder: Path) -> None:
    """As `shardvit run`, whose ranks have said it."""
    command = [sys.executable, "-c", OWNER, str(folder / ".run.lock"), "240"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout and owner.stdout.readline() == "held\n"
        folder.rename(folder.with_name("other"))
        _, said = owner.communicate("\n", timeout=240)
    assert (owner.returncode, said) == (0, "") and not folder.exists()
