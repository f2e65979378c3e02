"""What a disk can do to a checkpoint after it was written: noticed before anything is loaded, on all ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import Case
from tests.faults.rows import Row

KILLED_AT = 36  # steps 20 and 30 are saved
FALLS_BACK = "A damaged checkpoint is noticed before anything is loaded, named, and the one before it is used."
LATEST = "No file but a checkpoint's own manifest decides which one is restored: a wrong `latest` changes nothing."
ALL_DAMAGED = (
    "When every checkpoint is damaged the run refuses to start, with one sentence; it never begins again by itself, "
    "and continues as soon as one is brought back."
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Case:
    """A run that was killed after `KILLED_AT` steps; to be copied."""
    case = Case(tmp_path_factory.mktemp("killed") / "case", shards)
    case.run_until_killed(step=KILLED_AT)
    assert case.saved()[-1] == 30
    return case


@pytest.fixture
def copy(killed: Case, new_case: NewCase) -> Case:
    """The same run folder, to be damaged."""
    case = new_case()
    shutil.copytree(killed.run, case.run)
    return case


def newest(case: Case) -> Path:
    return case.stage / "checkpoints" / f"step-{case.saved()[-1]:08d}"


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    path = largest(folder)
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard_of(folder: Path, *, rank: int) -> Path:
    (path,) = folder.rglob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    return path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "checkpoint file truncated": truncate,
    "one bit of the model flipped": lambda folder: flip(next(folder.rglob("*model_states.pt"))),
    "one bit of rank 1's optimizer flipped": lambda folder: flip(shard_of(folder, rank=1)),
    "one bit of state.json flipped": lambda folder: flip(folder / "state.json"),
    "rank 1's shard missing": lambda folder: shard_of(folder, rank=1).unlink(),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest empty": lambda folder: (folder / "manifest.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_checkpoint_is_damaged(damage: str, copy: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(damage, FALLS_BACK)
    folder, baseline = newest(copy), undisturbed()
    DAMAGES[damage](folder)
    ended = copy.start().wait()
    row.ends(ended, code=0, says=f"{folder.name} is damaged")
    row.recovers(copy, baseline, ended, reached=30)


@pytest.mark.parametrize("content", ["empty", "pointing nowhere"])
def test_a_latest_file_of_deepspeeds_kind(content: str, copy: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"`latest` {content}", LATEST)
    baseline = undisturbed()
    for folder in (newest(copy), newest(copy).parent):
        (folder / "latest").write_text("" if content == "empty" else "global_step999")
    ended = copy.start().wait()
    row.ends(ended, code=0, says="resuming from")
    row.recovers(copy, baseline, ended, reached=30, at_most=0, besides=["checkpoints/latest"])


def test_every_checkpoint_is_damaged(copy: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("every checkpoint damaged, one brought back", ALL_DAMAGED)
    baseline, aside = undisturbed(), copy.folder / "aside"
    shutil.copytree(newest(copy), aside)
    for path in newest(copy).parent.glob("step-*"):
        flip(shard_of(path, rank=0))
    row.ends(copy.start().wait(), code=2, says="all 2 checkpoints .* are damaged .*--restart pretrain")
    shutil.rmtree(newest(copy))
    aside.rename(copy.stage / "checkpoints" / "step-00000030")
    row.recovers(copy, baseline, reached=30, at_most=0)


def test_the_folder_of_checkpoints_is_gone(copy: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("the folder of checkpoints gone, then brought back", ALL_DAMAGED)
    baseline, aside = undisturbed(), copy.folder / "aside"
    newest(copy).parent.rename(aside)
    row.ends(copy.start().wait(), code=2, says="holds no checkpoint, but one was saved at step 30")
    shutil.rmtree(copy.stage / "checkpoints", ignore_errors=True)
    aside.rename(copy.stage / "checkpoints")
    row.recovers(copy, baseline, reached=30, at_most=0)
