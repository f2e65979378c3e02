"""Checkpoints are whole or not there: a kill at any moment, a damaged byte anywhere, another run's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from data_shards.errors import UserError
from launch.env import free_port
from pipeline import checkpoint
from pipeline.checkpoint import MANIFEST, Restored, restore_checkpoint, save_checkpoint
from pipeline.identity import STATE
from pipeline.process import Place
from pipeline.ranks import Ranks
from pipeline.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
IDENTITY: dict[str, Any] = {"stage": "pretrain", "recipe": "abc", "processes": 1}
EXACT = 0.1 + 0.2  # 0.30000000000000004: no short decimal


@dataclass
class TinyEngine:
    """One number as the model, saved like DeepSpeed's: files in a folder below, one a rank, and a shared one."""

    value: int = 0
    rank: int = 0
    fails: bool = False
    loads: list[Path] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        inner = folder / "deepspeed"
        inner.mkdir(exist_ok=True)
        (inner / f"rank{self.rank}.pt").write_bytes(bytes([self.value]) * 300)
        if self.fails:
            raise RuntimeError("no space left on device")
        if self.rank == 0:
            (inner / "shared.pt").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.loads.append(folder)
        (self.value,) = set((folder / "deepspeed" / f"rank{self.rank}.pt").read_bytes())
        assert self.value == int((folder / "deepspeed" / "shared.pt").read_text())


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    ranks = Ranks(Place(master_port=free_port()), timeout_seconds=60)
    yield ranks
    ranks.leave()


class ThreadRanks:
    """`Ranks` for several ranks in the threads of one process."""

    def __init__(self, place: Place, *, barrier: threading.Barrier, board: list[object]) -> None:
        self.place, self._barrier, self._board = place, barrier, board

    def barrier(self) -> None:
        self._barrier.wait(timeout=20)

    def gather_objects(self, value: object) -> list[object]:
        self._board[self.place.rank] = value
        self.barrier()
        everyone = list(self._board)
        self.barrier()
        return everyone


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` returned or raised on each rank."""
    barrier, board = threading.Barrier(num_ranks), [None] * num_ranks
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(Place(rank=rank, world_size=num_ranks), barrier=barrier, board=board))
        except Exception as error:  # noqa: BLE001 - shown by the assertions on it
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save(root: Path, step: int, *, ranks: Any, keep: int = 9, engine: TinyEngine | None = None) -> Path:
    state = TrainState(step=step, images_seen=64 * step, losses_since_log=[EXACT, 1 / 3], training_seconds=EXACT)
    engine = engine or TinyEngine(value=step % 256, rank=ranks.place.rank)
    return save_checkpoint(root, engine=engine, state=state, ranks=ranks, identity=IDENTITY, keep=keep)


def restore(root: Path, *, ranks: Any, identity: dict[str, Any] = IDENTITY) -> tuple[Restored | None, TinyEngine]:
    engine = TinyEngine(value=255, rank=ranks.place.rank)
    return restore_checkpoint(root, engine=engine, ranks=ranks, identity=identity), engine


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_what_is_saved_is_restored_to_the_last_bit(tmp_path: Path, alone: Ranks):
    root = tmp_path / "stage" / "checkpoints"
    assert torch.distributed.is_initialized()  # these are real ranks
    assert restore(root, ranks=alone)[0] is None
    assert save(root, 1, ranks=alone) == root / "step-00000001"
    folder = save(root, 400, ranks=alone)
    restored, engine = restore(root, ranks=alone)
    assert restored is not None and restored.folder == folder and restored.notes == ()
    assert restored.state == TrainState(
        step=400, images_seen=25600, losses_since_log=[EXACT, 1 / 3], training_seconds=EXACT
    )
    assert engine.value == 400 % 256 and engine.loads == [folder]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000400"]


def test_the_manifest_lists_every_other_file_with_size_and_digest(tmp_path: Path, alone: Ranks):
    folder = save(tmp_path, 3, ranks=alone)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == there - {MANIFEST} == {STATE, "deepspeed/rank0.pt", "deepspeed/shared.pt"}
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: (folder / name).stat().st_size for name in listed
    }


def test_a_failed_save_leaves_nothing_visible_and_the_last_one_as_it_was(tmp_path: Path, alone: Ranks):
    save(tmp_path, 1, ranks=alone)
    with pytest.raises(RuntimeError, match="no space left"):
        save(tmp_path, 2, ranks=alone, engine=TinyEngine(value=2, fails=True), keep=1)
    assert steps(tmp_path) == [1]
    restored, engine = restore(tmp_path, ranks=alone)
    assert restored is not None and restored.state.step == 1 and restored.notes == () and engine.value == 1
    save(tmp_path, 3, ranks=alone)  # another step: the leftover of step 2 is collected all the same
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_pruning(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1, ranks=alone)
    events: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def note_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    def note_rmtree(path: Path, *args: Any, **kwargs: Any) -> None:
        events.append(("remove", str(path)))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", note_rmtree)
    save(tmp_path, 2, ranks=alone, keep=1)
    beside = tmp_path / ".writing-step-00000002"
    renamed = events.index(("rename", str(beside)))
    names = ["", STATE, MANIFEST, "deepspeed", "deepspeed/rank0.pt", "deepspeed/shared.pt"]
    assert {("fsync", str(beside / name)) for name in names} <= set(events[:renamed])
    flushed_root = events.index(("fsync", str(tmp_path)))
    assert renamed < flushed_root < events.index(("remove", str(tmp_path / "step-00000001")))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_older_ones_are_pruned(tmp_path: Path, alone: Ranks, keep: int):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, ranks=alone, keep=keep)
        assert steps(tmp_path) == [n for n in (8, 9, 10, 11) if n <= step][-keep:]


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage to one file of a checkpoint."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


RANK0 = "deepspeed/rank0.pt"
damage_flip = edit(RANK0, lambda content: content[:150] + bytes([content[150] ^ 1]) + content[151:])
DAMAGES = {
    "flipped bit": (damage_flip, f"{RANK0} has changed since it was written"),
    "another step": (edit(STATE, lambda text: text.replace(b'"step": ', b'"step":3')), f"{STATE} has changed since"),
    "cut": (edit(RANK0, lambda content: content[:-1]), f"{RANK0} has 299 bytes instead of 300"),
    "grown": (edit(RANK0, lambda content: content + b"x"), f"{RANK0} has 301 bytes instead of 300"),
    "a file missing": (lambda folder: (folder / RANK0).unlink(), f"{RANK0} is missing"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "no readable manifest.json"),
    "manifest cut": (edit(MANIFEST, lambda content: content[:60]), "no readable manifest.json"),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "no readable manifest.json"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(
    tmp_path: Path, alone: Ranks, damage: Callable[[Path], None], said: str
):
    save(tmp_path, 1, ranks=alone)
    damage(save(tmp_path, 2, ranks=alone))
    restored, engine = restore(tmp_path, ranks=alone)
    assert restored is not None and restored.state.step == 1 and engine.value == 1
    assert engine.loads == [tmp_path / "step-00000001"]  # the damaged one was never handed to the engine
    (note,) = restored.notes
    assert said in note and "step-00000002 is damaged" in note
    damage(tmp_path / "step-00000001")
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are damaged .*--restart pretrain") as caught:
        restore(tmp_path, ranks=alone)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_anywhere_in_the_manifest_is_harmless(tmp_path: Path, alone: Ranks):
    """Either the checkpoint is passed over, or the bit bore on nothing and it is restored as it was saved."""
    save(tmp_path, 1, ranks=alone)
    path = save(tmp_path, 2, ranks=alone) / MANIFEST
    good = path.read_bytes()
    passed_over = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        restored, engine = restore(tmp_path, ranks=alone)
        assert restored is not None
        assert (restored.state.step, engine.value) in {(1, 1), (2, 2)}
        passed_over += restored.state.step == 1
    assert passed_over > len(good) / 2


def test_a_file_that_the_disk_cannot_read_counts_as_damaged(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1, ranks=alone)
    save(tmp_path, 2, ranks=alone)
    digest = checkpoint._digest

    def broken_disk(path: Path) -> str:
        if "step-00000002" in str(path):
            raise OSError(5, "Input/output error")
        return digest(path)

    monkeypatch.setattr(checkpoint, "_digest", broken_disk)
    restored, _ = restore(tmp_path, ranks=alone)
    assert restored is not None and restored.state.step == 1
    assert "step-00000002 is damaged" in restored.notes[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_after_falling_back_the_new_checkpoints_outlive_the_damaged_one(tmp_path: Path, alone: Ranks, keep: int):
    save(tmp_path, 100, ranks=alone)
    damage_flip(save(tmp_path, 200, ranks=alone))
    for step in (150, 160, 170):
        save(tmp_path, step, ranks=alone, keep=keep)
        restored, _ = restore(tmp_path, ranks=alone)
        assert restored is not None and restored.state.step == step
    whole = [step for step in steps(tmp_path) if step != 200]
    assert whole == [150, 160, 170][-keep:]
    save(tmp_path, 200, ranks=alone, keep=keep)  # redone, and whole now
    restored, _ = restore(tmp_path, ranks=alone)
    assert restored is not None and restored.state.step == 200 and restored.notes == ()


@pytest.mark.parametrize(("key", "value"), [("recipe", "def"), ("stage", "finetune"), ("processes", 2)])
def test_another_runs_checkpoint_is_refused_before_anything_is_loaded(
    tmp_path: Path, alone: Ranks, key: str, value: object
):
    save(tmp_path, 1, ranks=alone)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    engine = TinyEngine(value=7)
    with pytest.raises(UserError, match=key):
        restore_checkpoint(tmp_path, engine=engine, ranks=alone, identity={**IDENTITY, key: value})
    assert engine.loads == [] and engine.value == 7
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks_share_the_digests_and_agree_on_the_damage(tmp_path: Path, num_ranks: int):
    for step in (1, 2):
        on_ranks(num_ranks, lambda ranks, step=step: save(tmp_path, step, ranks=ranks))
    newest = tmp_path / "step-00000002"
    listed = sorted(json.loads((newest / MANIFEST).read_text())["files"])
    assert listed == sorted([STATE, "deepspeed/shared.pt", *(f"deepspeed/rank{n}.pt" for n in range(num_ranks))])
    for name in listed:  # each file is somebody's share
        kept = (newest / name).read_bytes()
        (newest / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        results = on_ranks(num_ranks, lambda ranks: restore(tmp_path, ranks=ranks))
        for restored, engine in results:
            assert restored.state.step == engine.value == 1
            assert "step-00000002 is damaged" in restored.notes[0] and Path(name).name in restored.notes[0]
        (newest / name).write_bytes(kept)
    for restored, engine in on_ranks(num_ranks, lambda ranks: restore(tmp_path, ranks=ranks)):
        assert restored.state.step == engine.value == 2 and restored.notes == ()


KILL_EVERYWHERE = """
import importlib.util, json, os, shutil, signal, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("under_test", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
sys.modules["under_test"] = tests
spec.loader.exec_module(tests)
top = Path(sys.argv[2])

class Alone:
    place = tests.Place()
    def barrier(self): pass
    def gather_objects(self, value): return [value]

WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate", "os.listdir"}

def run(folder, moment):
    "Save step 2 over step 1, and die before the operation number `moment` on the file system."
    count = 0
    def hook(event, args):
        nonlocal count
        if event in WRITING:
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
    sys.addaudithook(hook)
    tests.save(folder, 2, ranks=Alone(), keep=1)
    os._exit(0)

moment, report = 0, []
while True:
    folder = top / f"{moment:03d}"
    tests.save(folder, 1, ranks=Alone())
    (folder / ".writing-step-00000007" / "deepspeed").mkdir(parents=True)  # of an earlier kill
    child = os.fork()
    if child == 0:
        run(folder, moment)
    status = os.waitpid(child, 0)[1]
    restored, engine = tests.restore(folder, ranks=Alone())
    seen = {
        "killed": os.WIFSIGNALED(status),
        "step": restored and restored.state.step,
        "value": engine.value,
        "notes": list(restored.notes) if restored else [],
    }
    tests.save(folder, 3, ranks=Alone(), keep=1)
    seen["after"] = sorted(path.name for path in folder.iterdir())
    report.append(seen)
    shutil.rmtree(folder)
    if not seen["killed"] or moment > 500:
        assert status == 0, status
        break
    moment += 1
print(json.dumps(report))
"""


def test_killed_before_any_operation_on_the_disk_one_whole_checkpoint_remains(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, __file__, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report) > 15 and not report[-1]["killed"] and all(seen["killed"] for seen in report[:-1])
    for seen in report:
        assert seen["step"] == seen["value"] and seen["notes"] == []  # the newest folder is whole
        assert seen["after"] == ["step-00000003"]  # what the kill left is collected by the next save
    reached = [seen["step"] for seen in report]
    assert reached == sorted(reached) and set(reached) == {1, 2}
