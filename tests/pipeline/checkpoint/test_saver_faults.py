"""Every way that saving can fail: no room, a disk that refuses, our own mistakes, a kill at any moment."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint import saver
from shardvit.pipeline.checkpoint.saver import SaveFailed
from shardvit.pipeline.checkpoint.store import Retention, damage_of
from shardvit.pipeline.engine.saved_state import state_files
from shardvit.pipeline.engine.saved_state.state_files import StateFile, write_file
from tests.pipeline.checkpoint.test_killed_anywhere import killed_everywhere
from tests.saving import (
    Gate,
    TensorEngine,
    names,
    on_ranks,
    one_rank,
    restore,
    save,
    saver_of,
    state_at,
    steps,
)

MODES = ("background", "blocking")


@pytest.mark.parametrize("mode", MODES)
def test_without_room_on_the_disk_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any):
    """All ranks' bytes count."""
    single = sum(file.num_bytes for file in TensorEngine(0).snapshot())

    def train(ranks: Any) -> None:
        one = saver_of(tmp_path, ranks=ranks, engine=TensorEngine(1, rank=ranks.place.rank), mode=mode)
        one.save(state_at(1))
        one.finish()
        ranks.barrier()
        monkeypatch.setattr(saver, "free_bytes", lambda root: 2 * single)
        one.save(state_at(2))

    errors = on_ranks(2, train)
    assert len({str(error) for error in errors}) == 1 and all(isinstance(error, UserError) for error in errors)
    assert "the checkpoint of step 2 could not be written" in str(errors[0]) and "are free" in str(errors[0])
    assert str(tmp_path) in str(errors[0]) and "step-00000001 is kept" in str(errors[0])
    assert names(tmp_path) == ["step-00000001"] and damage_of(tmp_path / "step-00000001") == ""


@pytest.mark.parametrize("of", ["free_bytes", "collect_leftovers"])
def test_a_disk_that_rank_0_cannot_even_look_at_ends_all_ranks_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
):
    on_ranks(2, lambda ranks: save(tmp_path, 1, ranks=ranks))

    def fail(root: Path) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(saver, "free_bytes", fail)
    monkeypatch.setattr(saver, of, fail)
    errors = on_ranks(2, lambda ranks: save(tmp_path, 2, ranks=ranks))
    assert len({str(error) for error in errors}) == 1 and all(isinstance(error, SaveFailed) for error in errors)
    expected = "step-00000001 is kept" if of == "free_bytes" else "the earlier ones cannot be read"
    assert "(Stale file handle)" in str(errors[0]) and expected in str(errors[0])


class FullDisk:
    """Refuses the operation number `at` of those that change the disk, on paths with `part` in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, code: int, part: str) -> None:
        self.count, self.failed = 0, False
        self._at, self._code, self._part = at, code, part
        self._lock = threading.Lock()
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the waiting is no part of this test
        for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "open"), (Path, "rename")):
            self._guard(monkeypatch, owner, name)
        guard, buffered = self._check, state_files.io.BufferedWriter

        class Writer(buffered):
            def write(self, content: Any) -> int:
                guard(self.raw.name)
                return super().write(content)

        monkeypatch.setattr(state_files.io, "BufferedWriter", Writer)

    def _guard(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def guarded(target: Any, *args: Any, **keywords: Any) -> Any:
            self._check(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
            return real(target, *args, **keywords)

        monkeypatch.setattr(owner, name, guarded)

    def _check(self, path: object) -> None:
        if self._part not in str(path):
            return
        with self._lock:
            self.count += 1
            if self.count == self._at:
                self.failed = True
                raise OSError(self._code, os.strerror(self._code))


CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@pytest.mark.parametrize("mode", MODES)
def test_whatever_operation_on_the_disk_fails_all_ranks_end_alike_and_earlier_ones_stand(tmp_path: Path, mode: Any):
    moment, ended = 0, []
    while True:
        moment += 1
        root, code = tmp_path / str(moment), CODES[moment % len(CODES)]
        on_ranks(2, lambda ranks, root=root: save(root, 1, ranks=ranks))
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, at=moment, code=code, part=".writing-step-00000002")

            def train(ranks: Any, root: Path = root) -> None:
                engine = TensorEngine(2, rank=ranks.place.rank)
                one = saver_of(root, ranks=ranks, engine=engine, mode=mode, retention=Retention(last=1))
                one.save(state_at(2))
                one.finish()

            results = on_ranks(2, train)
        if not disk.failed:
            assert results == [None, None] and steps(root) == [2] and moment > 5
            break
        words = {str(error) for error in results}
        kind = SaveFailed if code == errno.EIO else UserError  # the one may pass, the others somebody has to mend
        assert len(words) == 1 and all(isinstance(error, kind) for error in results), results
        (text,) = words
        assert os.strerror(code) in text and "step-00000001 is kept" in text and str(root) in text
        assert names(root) == ["step-00000001"] and damage_of(root / "step-00000001") == ""
        ended.append(text)
    for rank in (0, 1):
        assert any(f"(rank {rank}: " in text for text in ended)


@pytest.mark.parametrize("mode", MODES)
def test_what_reads_back_otherwise_is_not_committed_and_nothing_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
):
    save(tmp_path, 1, ranks=one_rank())
    real = state_files.digest_of
    monkeypatch.setattr(state_files, "digest_of", lambda path: "0" * 32 if path.name == "shared.pt" else real(path))
    with pytest.raises(SaveFailed, match=r"shared.pt reads back different .*step-00000001 is kept"):
        save(tmp_path, 2, ranks=one_rank(), keep=1, mode=mode)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("mode", MODES)
def test_a_mistake_of_ours_on_one_rank_is_told_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, mode: Any
):
    def write(folder: Path, file: StateFile, **keywords: Any) -> Any:
        if "rank1" in file.path:
            raise ZeroDivisionError("of ours")
        return write_file(folder, file, **keywords)

    monkeypatch.setattr(saver, "write_file", write)
    errors = on_ranks(2, lambda ranks: save(tmp_path, 1, ranks=ranks, mode=mode))
    assert all(isinstance(error, SaveFailed) for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])} and "rank 1: ZeroDivisionError: of ours" in str(
        errors[0]
    )
    assert "there is no earlier one" in str(errors[0]) and names(tmp_path) == []
    assert "Traceback" in capfd.readouterr().err


def test_a_save_that_is_called_off_is_never_visible_and_training_may_go_on_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)
    one = saver_of(tmp_path, ranks=one_rank(), engine=TensorEngine(1), mode="background")
    one.save(state_at(1))
    assert gate.reached.wait(240)
    threading.Timer(0.2, gate.opened.set).start()
    one.close()
    assert names(tmp_path) == [".writing-step-00000001"] and not [
        t for t in threading.enumerate() if t.name == "checkpoint"
    ]
    save(tmp_path, 2, ranks=one_rank())
    assert names(tmp_path) == ["step-00000002"]


@contextlib.contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("free", ["as it is", "not seen"])
def test_on_a_disk_that_is_too_small_saving_ends_in_words_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, free: str
):
    """A quota does not show in the free space: then it is the write that fails, wherever it happens to be."""
    if free == "not seen":
        monkeypatch.setattr(saver, "free_bytes", lambda root: 1 << 40)
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        saved = 0
        one = saver_of(disk / "checkpoints", ranks=one_rank(), engine=TensorEngine(1), mode=mode)
        one._engine.flat = torch.zeros(30_000)
        one._engine.state = {"average": torch.zeros(30_000)}

        def fill() -> None:
            nonlocal saved
            for step in range(1, 100):
                one.save(state_at(step))
                one.finish()
                saved = step

        with pytest.raises(UserError, match="could not be written to") as caught:
            fill()
        assert 1 < saved < 99 and f"step-{saved:08d} is kept" in str(caught.value)
        assert ("No space left on device" if free == "not seen" else "are free") in str(caught.value)
        assert names(disk / "checkpoints") == [f"step-{step:08d}" for step in range(1, saved + 1)]
        assert all(damage_of(folder) == "" for folder in (disk / "checkpoints").iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_killed_before_any_operation_on_the_disk_every_checkpoint_that_is_visible_is_whole(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that the kernel has

    def prepare(folder: Path) -> None:
        save(folder, 1, ranks=one_rank())
        (folder / ".writing-step-00000007" / "deepspeed").mkdir(parents=True)  # of an earlier kill
        shutil.copytree(folder / "step-00000001", folder / ".removing-step-00000000")

    def look(folder: Path) -> str:
        assert all(damage_of(path) == "" for path in folder.glob("step-*"))
        restored, engine = restore(folder, ranks=one_rank())
        assert restored is not None and restored.state.step == engine.value and restored.notes == ()
        assert set(names(folder)) <= {"step-00000001", "step-00000002"}  # leftovers go at the start
        return {1: "old", 2: "new"}[engine.value]

    seen = killed_everywhere(
        tmp_path,
        prepare=prepare,
        work=lambda folder: save(folder, 2, ranks=one_rank(), keep=1, mode=mode) and None,
        look=look,
    )
    assert list(dict.fromkeys(seen)) == ["old", "new"] and len(seen) > 30
