"""Checkpoints are whole or not there: what is committed in which order, damage anywhere, another run's folder."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint import store as checkpoint
from shardvit.pipeline.checkpoint.identity import STATE
from shardvit.pipeline.checkpoint.saver import SaveFailed
from shardvit.pipeline.checkpoint.store import MANIFEST, Retention, commit_checkpoint, open_beside, restore_checkpoint
from shardvit.pipeline.engine.saved_state import state_files
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from tests.saving import (
    EXACT,
    IDENTITY,
    TinyEngine,
    names,
    on_ranks,
    one_rank,
    restore,
    save,
    saver_of,
    state_at,
    steps,
)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    ranks = Ranks(Place(), timeout_seconds=60)
    yield ranks
    ranks.leave()


def test_what_is_saved_is_restored_to_the_last_bit(tmp_path: Path, alone: Ranks):
    root = tmp_path / "checkpoints"
    assert torch.distributed.is_initialized()  # these are real ranks
    assert restore(root, ranks=alone)[0] is None
    assert save(root, 1, ranks=alone) == root / "step-00000001"
    folder = save(root, 400, ranks=alone)
    restored, engine = restore(root, ranks=alone)
    assert restored is not None and restored.folder == folder and restored.notes == ()
    assert restored.state == state_at(400) and restored.state.losses_since_log[0] == EXACT
    assert restored.identity == IDENTITY and restored.written_by == {"torch": "2.0", "host": "here"}
    assert (folder / "recipe.yaml").read_text() == "name: test\n"
    assert engine.value == 400 % 256 and engine.loads == [folder]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000400"]


def test_the_manifest_lists_every_other_file_with_size_and_digest(tmp_path: Path, alone: Ranks):
    folder = save(tmp_path, 3, ranks=alone)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == there - {MANIFEST} == {STATE, "recipe.yaml", "deepspeed/rank0.pt", "deepspeed/shared.pt"}
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: (folder / name).stat().st_size for name in listed
    }


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_pruning(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1, ranks=alone)
    events: list[tuple[str, str]] = []
    fsync, rename, rmtree, digest_of = os.fsync, Path.rename, shutil.rmtree, state_files.digest_of

    def note_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    def note_rmtree(path: Path, *args: Any, **kwargs: Any) -> None:
        events.append(("remove", str(path)))
        rmtree(path, *args, **kwargs)

    def note_digest(path: Path) -> str:
        events.append(("read back", str(path)))
        return digest_of(path)

    def note_advice(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        events.append(("dropped from the page cache", os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "posix_fadvise", note_advice)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", note_rmtree)
    monkeypatch.setattr(state_files, "digest_of", note_digest)
    save(tmp_path, 2, ranks=alone, keep=1)

    beside, old = tmp_path / ".writing-step-00000002", tmp_path / "step-00000001"
    files = [str(beside / name) for name in (STATE, "recipe.yaml", "deepspeed/rank0.pt", "deepspeed/shared.pt")]
    manifest = events.index(("fsync", str(beside / MANIFEST)))
    for file in files:
        dropped = events.index(("dropped from the page cache", file))
        assert events.index(("fsync", file)) < dropped < events.index(("read back", file)) < manifest
    renamed = events.index(("rename", str(beside)))
    assert manifest < renamed
    assert {("fsync", str(folder)) for folder in (beside, beside / "deepspeed")} <= set(events[manifest:renamed])
    flushed_root = events.index(("fsync", str(tmp_path)))
    hidden = events.index(("rename", str(old)))
    removed = events.index(("remove", str(tmp_path / ".removing-step-00000001")), hidden)
    assert renamed < flushed_root < hidden < removed
    assert ("remove", str(old)) not in events
    assert names(tmp_path) == ["step-00000002"]


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
    """Either the checkpoint is skipped, or the bit bore on nothing and it is restored as it was saved."""
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
    digests = checkpoint.piece_digests

    def broken_disk(path: Path, **more: Any) -> list[str]:
        if "step-00000002" in str(path):
            raise OSError(5, "Input/output error")
        return digests(path, **more)

    monkeypatch.setattr(checkpoint, "piece_digests", broken_disk)
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


@pytest.mark.parametrize(
    ("key", "value"), [("recipe", "def"), ("stage", "finetune"), ("precision", "fp32"), ("backend", "accelerate")]
)
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
    assert listed == sorted(
        [STATE, "recipe.yaml", "deepspeed/shared.pt", *(f"deepspeed/rank{n}.pt" for n in range(num_ranks))]
    )
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


def test_the_engine_is_told_how_a_checkpoint_is_sharded(tmp_path: Path, alone: Ranks):
    save(tmp_path, 1, ranks=alone)
    for now in (IDENTITY, {**IDENTITY, "processes": 2}, {**IDENTITY, "zero_stage": 3}):
        restored, engine = restore(tmp_path, ranks=alone, identity=now)
        assert restored is not None and restored.identity == IDENTITY
        assert engine.written == [IDENTITY] and engine.value == 1


def test_what_a_killed_process_left_is_never_taken_for_a_checkpoint_and_goes_at_the_next_start(
    tmp_path: Path, alone: Ranks
):
    save(tmp_path, 1, ranks=alone)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".writing-step-00000002")  # whole, but not committed
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".removing-step-00000003")
    (tmp_path / "latest").write_text("step-00000009")  # nobody's business
    restored, _ = restore(tmp_path, ranks=alone)
    assert restored is not None and restored.state.step == 1 and restored.notes == ()
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_the_best_and_every_nth_outlive_the_last_ones_and_a_copy_of_the_users_is_not_touched(
    tmp_path: Path, alone: Ranks
):
    shutil.copytree(save(tmp_path, 1, ranks=alone), tmp_path / "step-00000001-mine")
    losses = {2: 0.5, 3: 0.2, 4: 0.7, 5: 0.1, 6: 0.9, 7: 0.8}
    saver = saver_of(
        tmp_path, ranks=alone, engine=TinyEngine(), retention=Retention(last=1, every_steps=4, best="val/loss")
    )
    for step, loss in losses.items():
        # The evaluation of step 5 is an older one's: it says nothing of the checkpoint.
        saver.save(state_at(step, evaluation={"val/loss": loss}, evaluation_step=4 if step == 5 else step))
    assert names(tmp_path) == ["step-00000001-mine", "step-00000003", "step-00000004", "step-00000007"]


def test_all_ranks_restore_what_rank_0_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a network file system another machine's list of names may be a minute old."""
    for step in (1, 2):
        on_ranks(2, lambda ranks, step=step: save(tmp_path, step, ranks=ranks))
    lists = {"rank 0": ["step-00000002", "step-00000001"], "rank 1": ["step-00000001"]}
    monkeypatch.setattr(
        checkpoint, "checkpoint_folders", lambda root: [root / name for name in lists[threading.current_thread().name]]
    )

    def restored(ranks: Any) -> Any:
        threading.current_thread().name = f"rank {ranks.place.rank}"
        return restore(tmp_path, ranks=ranks)

    for found, engine in on_ranks(2, restored):
        assert found.state.step == engine.value == 2


def test_what_is_not_on_rank_0s_disk_is_never_visible(tmp_path: Path):
    """As when the run folder is each machine's own."""
    open_beside(tmp_path, step=1)
    seals = {"rank1.pt": state_files.Seal(num_bytes=3, blake2b="0" * 32)}
    with pytest.raises(OSError, match=r"rank1.pt was written and is not there"):
        commit_checkpoint(tmp_path, step=1, seals=seals)
    assert names(tmp_path) == [".writing-step-00000001"]


def test_a_commit_that_fails_after_the_rename_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, ranks=one_rank())

    def flush(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(checkpoint, "flush", flush)
    with pytest.raises(SaveFailed, match=r"step 2 could not be written .*the disk is gone.*step-00000001 is kept"):
        save(tmp_path, 2, ranks=one_rank())
    assert names(tmp_path) == ["step-00000001"]
