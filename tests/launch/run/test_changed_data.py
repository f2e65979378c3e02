"""`shardvit run` looks at a stage's data before it starts anything."""

import os
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.launch.local.start import Launch
from shardvit.launch.run import pipeline_run
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED
from shardvit.pipeline.stage.data_record import check_data, keep_data
from shardvit.pipeline.stage.stage_data import open_data
from tests.data_shards.small_set import touch_up
from tests.launch.machine import Machine


def test_data_that_have_changed_since_a_stage_began_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = Machine(tmp_path)
    monkeypatch.setattr(pipeline_run, "run_stage_locally", machine.start)
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 0)
    pack("digits", machine.root / "shards", holdout=0.2, samples_per_shard=200, report=lambda line: None)

    def begin(launch: Launch) -> int:
        data = open_data(launch.recipe, stage=launch.stage, report=lambda line: None)
        record = check_data(machine.folder, stage=launch.stage, data=data)
        keep_data(machine.folder, record, stage=launch.stage)
        machine.folder.update(launch.stage, state="running", data_digest=record.digest)
        return EXIT_STOPPED

    machine.outcome = begin
    assert machine.open().execute() == EXIT_STOPPED
    tar = sorted((machine.root / "shards" / "train").glob("*.tar"))[3]
    touch_up(tar)
    with pytest.raises(UserError, match=rf"pretrain was begun with other data .*{tar.name}"):
        machine.open()
    machine.open(restart="pretrain")
    touch_up(tar)
    os.utime(tar)
    assert machine.open().execute() == EXIT_STOPPED and machine.started == ["pretrain", "pretrain"]
