"""Restore a stage, or roll back: resume from before trouble and skip the batches that led to it.

After `RollBack`, stage.json names the steps to skip, and the stage resumes from the newest checkpoint before them. A
step is a function of its number, so the result does not depend on that checkpoint, nor on kills. PaLM restarts about
100 steps before a spike and skips 200 to 500 batches (arXiv 2204.02311, section 5.1).
"""

from collections.abc import Iterable
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.identity import checkpoint_identity, read_state_file
from shardvit.pipeline.checkpoint.store import Restored, remove_checkpoint, restore_checkpoint
from shardvit.pipeline.checkpoint.train_state import TrainState, Trouble
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.runs.run_folder import StageRecord, checkpoint_folders
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.stage_data import Stage


def restore(context: StageContext, stage: Stage, *, engine: Engine) -> tuple[Restored | None, TrainState]:
    """Load the newest whole checkpoint that has trained on no skipped batch, or make a new state; collective. UserError
    if checkpoints were saved, but none is left."""
    ranks = context.ranks
    abandoned = context.on_main(lambda: _abandoned_checkpoints(stage)) or []
    record: StageRecord = ranks.from_main(stage.record)
    identity = checkpoint_identity(stage.recipe, stage=stage.name, processes=ranks.place.world_size)
    restored = restore_checkpoint(stage.checkpoints, engine=engine, ranks=ranks, identity=identity, without=abandoned)
    again = f"or begin again with --restart {stage.name}"
    if restored is None and ranks.from_main(len(abandoned)):
        raise UserError(
            f"all checkpoints in {stage.checkpoints} have trained on batches that a rollback passes over: bring an "
            f"older one back, {again}"
        )
    if restored is None and (step := record.last_saved_step) > 0:
        raise UserError(
            f"{stage.checkpoints} holds no checkpoint, but one was saved at step {step}: bring it back, {again}"
        )
    state = restored.state if restored else TrainState()
    ranks.barrier()  # every rank has read stage.json before it changes
    # Not earlier: until an older one is restored, they may be all that is left.
    context.on_main(lambda: _remove(abandoned, stage=stage, restored=state))
    state.passed_over, state.rollbacks = list(record.passed_over), record.rollbacks
    return restored, state


def record_rollback(context: StageContext, stage: Stage, trouble: Trouble) -> None:
    """Write the steps to skip into stage.json; collective."""
    config = stage.config.rollback
    assert config is not None

    def write() -> str:
        record = stage.record
        first = max(0, trouble.first - config.steps_before)
        passed_over = sorted({*record.passed_over, *range(first, trouble.last + 1)})
        stage.update(passed_over=passed_over, rollbacks=record.rollbacks + 1)
        return (
            f"{stage.name}: {trouble.why}; going back to before step {first + 1:,}, to pass over the batches up to "
            f"step {trouble.last + 1:,} (rollback {record.rollbacks + 1} of {config.times})"
        )

    context.say(context.on_main(write) or "")


def _abandoned_checkpoints(stage: Stage) -> list[Path]:
    """List checkpoints that have trained on steps to skip, except damaged ones (see `restore_checkpoint`)."""
    passed_over, found = set(stage.record.passed_over), list[Path]()
    for folder in checkpoint_folders(stage.checkpoints):
        try:
            state = read_state_file(folder)["state"]
            step, had_passed_over = int(state["step"]), set(state["passed_over"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if {each for each in passed_over if each < step} != {each for each in had_passed_over if each < step}:
            found.append(folder)
    return found


def _remove(abandoned: Iterable[Path], *, stage: Stage, restored: TrainState) -> None:
    for folder in abandoned:
        remove_checkpoint(folder)
        stage.update(last_saved_step=restored.step, images_seen=restored.images_seen)
