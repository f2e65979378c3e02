import json
import os
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.logs import MetricsLog
from shardvit.pipeline.runs.read import RunReader, read_run, run_folder_at
from shardvit.pipeline.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "digits")
    folder.open(load_recipe("digits"))
    folder.update("pretrain", state="done", images_seen=640, seconds=2.5, results={"val/top1": 0.75})
    with MetricsLog(folder.stage("pretrain") / "metrics.jsonl", resume_step=-1) as log:
        for step in range(1, 11):
            log.append(step=step, images_seen=64 * step, metrics={"train/loss": 1 / step})
        log.append(step=10, images_seen=640, metrics={"val/top1": 0.75})
    return folder


def test_a_run_is_read_with_the_stages_that_have_not_begun(folder: RunFolder) -> None:
    run = read_run(folder)
    assert run.recipe == load_recipe("digits") and run.notes == ()
    assert [(stage.record, stage.rows) for stage in read_run(folder, parts="records").stages] == [
        (stage.record, ()) for stage in run.stages
    ]
    assert [stage.name for stage in run.stages] == ["pretrain", "swap_head", "finetune"]
    pretrain = run.stages[0]
    assert pretrain.record.results == {"val/top1": 0.75} and list(pretrain.latest) == ["train/loss", "val/top1"]
    assert pretrain.points("train/loss") == [(step, 1 / step) for step in range(1, 11)]
    assert pretrain.latest == {"train/loss": 0.1, "val/top1": 0.75}
    assert run.stages[2].record.state == "new" and run.stages[2].rows == ()


def test_what_is_damaged_is_named_and_the_rest_is_read(folder: RunFolder) -> None:
    file = folder.stage("pretrain") / "metrics.jsonl"
    huge = json.dumps({"step": 10**400, "images_seen": 1, "time": 1.0, "metrics": {}})
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b"\xff\xfe{\n", huge.encode() + b"\n", *lines[3:], b'{"step": 11']))
    (folder.stage("pretrain") / "stage.json").write_text("[]")
    (folder.path / "recipe.yaml").write_text("name: [\x1b[2J")
    os.mkfifo(folder.path / "fifo")
    folder.stage("finetune").mkdir()
    os.mkfifo(folder.stage("finetune") / "metrics.jsonl")
    run = read_run(folder)
    assert run.recipe is None
    assert [stage.name for stage in run.stages] == ["pretrain", "finetune"]
    assert len(run.stages[0].points("train/loss")) == 10  # the torn last line is still being written
    assert len(run.notes) == 4
    assert all(note.isprintable() for note in run.notes)
    for note, name in zip(run.notes, ("recipe.yaml", "stage.json", "metrics.jsonl", "metrics.jsonl"), strict=True):
        assert name in note
    assert "2 damaged lines" in run.notes[2]


def test_a_stage_that_is_a_link_is_read_if_it_leads_to_a_run_of_the_same_sweep(
    tmp_path: Path, folder: RunFolder
) -> None:
    sweep = tmp_path / "digits-sweep"
    for name, to in (("inside", "../pretrain-1a2b/pretrain"), ("outside", "../../digits/pretrain")):
        point = RunFolder(sweep, name)
        point.open(load_recipe("digits"))
        point.stage("pretrain").symlink_to(to)
    (sweep / "sweep.json").write_text("{}")
    (sweep / "pretrain-1a2b").mkdir()
    folder.stage("pretrain").rename(sweep / "pretrain-1a2b/pretrain")
    folder.stage("pretrain").symlink_to(sweep / "pretrain-1a2b/pretrain")
    inside, outside, alone = (read_run(each) for each in (RunFolder(sweep, "inside"), point, folder))
    assert inside.stages[0].name == "pretrain" and inside.notes == ()
    assert inside.stages[0].latest["val/top1"] == 0.75
    (sweep / "sweep.json").unlink()
    for run in (read_run(RunFolder(sweep, "inside")), alone):
        assert [stage.name for stage in run.stages] == ["swap_head", "finetune"]
        assert "pretrain is a link out of the run" in run.notes[0]
    assert outside.stages[0].name == "pretrain"  # it leads back into the sweep


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, folder: RunFolder) -> None:
    assert run_folder_at(folder.path) == RunFolder(tmp_path.resolve(), "digits")
    with pytest.raises(UserError, match="no run"):
        run_folder_at(tmp_path)


def test_read_again_has_what_is_new_and_forgets_what_a_resumed_stage_takes_back(folder: RunFolder) -> None:
    reader, file = RunReader(folder), folder.stage("pretrain") / "metrics.jsonl"
    assert len(reader.read().stages[0].rows) == 11
    with MetricsLog(file, resume_step=10) as log:
        log.append(step=11, images_seen=704, metrics={"train/loss": 1 / 11})
        with file.open("ab") as torn:
            torn.write(b'{"step": 12')
        assert [row.step for row in reader.read().stages[0].rows][-2:] == [10, 11]
    with MetricsLog(file, resume_step=4) as log:
        log.append(step=5, images_seen=320, metrics={"train/loss": 9.0})
        assert reader.read().stages[0].points("train/loss") == [*((step, 1 / step) for step in range(1, 5)), (5, 9.0)]
    file.unlink()
    assert reader.read().stages[0].rows == ()
