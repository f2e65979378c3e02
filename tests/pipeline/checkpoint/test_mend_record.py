"""A stage.json that cannot be read is rebuilt from the checkpoints; without any, a sentence; nothing is lost."""

import json
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.mend_record import mend_records
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord
from tests.saving import one_rank, save

BROKEN = [
    "",
    "[]",
    '{"state": "done", "images_seen": "many"}',
    '{"state": "done", "last_saved_step": ' + "9" * 5000 + "}",
    "[" * 3000,
    '{"state": "done", "key_of_a_newer_version": 1}',
]
BIT_FLIP = 1


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A stage with checkpoints at the steps 10 and 20."""
    folder = RunFolder(tmp_path, "a")
    folder.stage("pretrain").mkdir(parents=True)
    for step in (10, 20):
        save(folder.checkpoints("pretrain"), step, ranks=one_rank())
    return folder


def break_it(folder: RunFolder, text: str = "{") -> Path:
    path = folder.stage("pretrain") / "stage.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_record_says_what_the_newest_checkpoint_says_and_never_that_the_stage_is_done(
    folder: RunFolder, text: str
) -> None:
    path = break_it(folder, text)
    (note,) = mend_records(folder, ["pretrain"])
    state = json.loads((folder.checkpoints("pretrain") / "step-00000020" / "state.json").read_text())["state"]
    assert folder.record("pretrain") == StageRecord(
        state="running", last_saved_step=20, images_seen=64 * 20, seconds=state["training_seconds"]
    )
    assert (path.parent / "stage.json.broken").read_text() == text
    assert str(path) in note and "step-00000020" in note and "stage.json.broken" in note and len(note) < 500
    assert mend_records(folder, ["pretrain"]) == []


def test_each_broken_file_is_kept(folder: RunFolder) -> None:
    for text in ("1", "2", "3"):
        break_it(folder, text)
        mend_records(folder, ["pretrain"])
    kept = folder.stage("pretrain").glob("stage.json.broken*")
    assert sorted(path.read_text() for path in kept) == ["1", "2", "3"]


def test_a_damaged_checkpoint_is_not_asked(folder: RunFolder) -> None:
    file = folder.checkpoints("pretrain") / "step-00000020" / "deepspeed" / "rank0.pt"
    content = bytearray(file.read_bytes())
    content[0] ^= BIT_FLIP
    file.write_bytes(content)
    break_it(folder)
    mend_records(folder, ["pretrain"])
    assert folder.record("pretrain").last_saved_step == 10


def test_without_a_checkpoint_it_is_a_sentence_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.stage("pretrain").mkdir(parents=True)
    path = break_it(folder)
    with pytest.raises(UserError, match=rf"{path} is broken .*no undamaged checkpoint.*--restart pretrain"):
        mend_records(folder, ["pretrain"])
    assert path.read_text() == "{" and [each.name for each in path.parent.iterdir()] == ["stage.json"]


def test_what_merely_looks_writes_nothing(folder: RunFolder) -> None:
    path = break_it(folder)
    with pytest.raises(UserError, match=rf"{path} is broken .*shardvit run"):
        folder.record("pretrain")
    assert folder.peek("pretrain").state == "running"
    assert path.read_text() == "{" and not (path.parent / "stage.json.broken").exists()


def test_the_head_swap_is_simply_made_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.stage("swap_head").mkdir(parents=True)
    (folder.stage("swap_head") / "stage.json").write_text("null")
    assert len(mend_records(folder, ["swap_head"])) == 1
    assert folder.record("swap_head") == StageRecord()
