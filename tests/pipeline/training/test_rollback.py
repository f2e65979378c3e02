"""Going back between two attempts of the loop: which checkpoints go, and when. Real runs are in tests/faults."""

from dataclasses import replace
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState, Trouble
from shardvit.pipeline.training import stage_training
from shardvit.pipeline.training.after_step import TrainJob
from tests.pipeline.training import test_stage_training
from tests.pipeline.training.test_stage_training import TOTAL_STEPS, OwnStage
from tests.saving import state_at, steps

shards, stage, ends = test_stage_training.shards, test_stage_training.stage, test_stage_training.ends  # fixtures


@pytest.mark.parametrize(("older", "words"), [(True, "to go back to are damaged"), (False, "a rollback passes over")])
def test_a_rollback_without_a_checkpoint_to_go_back_to_removes_none(ends: OwnStage, older: bool, words: str) -> None:
    saver = ends.job(keep_checkpoints=3).saver
    for step in (10, 20) if older else (20,):
        saver.save(state_at(step))
    if older:
        with (ends.checkpoints / "step-00000010" / "state.json").open("a") as file:
            file.write(" ")
    ends.folder.update("pretrain", passed_over=[15], rollbacks=1)
    with pytest.raises(UserError, match=rf"{words}.*--restart pretrain"):
        ends.train(engine={"saving": "blocking"}, keep_checkpoints=3, rollback={})
    assert 20 in steps(ends.checkpoints)


def test_a_rollback_removes_what_it_leaves_behind_and_goes_on_from_before(
    ends: OwnStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"keep_checkpoints": 3, "rollback": {"steps_before": 10}}
    saver = ends.job(**keys).saver
    for step in (10, 20, 30):
        saver.save(state_at(step))
    seen: list[tuple[int, list[int], list[int], int]] = []

    def trained(job: TrainJob, state: TrainState) -> TrainState:
        saved_step = ends.folder.record("pretrain").last_saved_step
        seen.append((state.step, state.passed_over, steps(ends.checkpoints), saved_step))
        if len(seen) == 1:
            raise RollBack(Trouble(first=25, last=26, why="it spikes"))
        return replace(state, step=TOTAL_STEPS, evaluation={"val/loss": 1.0})

    monkeypatch.setattr(stage_training, "train", trained)
    ends.train(**keys)
    assert seen == [(30, [], [10, 20, 30], 30), (10, [*range(15, 27)], [10], 10)]
    assert ends.folder.record("pretrain").rollbacks == 1
