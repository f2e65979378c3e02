"""Going back to a checkpoint from before trouble, and past the batches that led to it: what is decided, and its record.

The loop raises `GoBack`; the stage writes into stage.json which steps are passed over from now on, and resumes from the
newest checkpoint that is old enough. Since every step is a function of its number, training goes on exactly as if those
batches had never been there, whichever checkpoint it was and whatever was killed in between. PaLM was trained so (arXiv
2204.02311, section 5.1: from about 100 steps before a spike, past 200 to 500 batches).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.identity import read_state_file
from pipeline.checkpoint.store import remove_checkpoint
from pipeline.checkpoint.train_state import TrainState
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.run_folder import checkpoint_folders
from pipeline.stage.context import StageContext


@dataclass(frozen=True)
class Trouble:
    """Steps that a run has to do without, counted from 0."""

    first: int
    last: int
    why: str  # a clause


class GoBack(Exception):
    """Training goes back to a checkpoint from before `trouble`."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        super().__init__(trouble.why)


def note_rollback(context: StageContext, *, stage: StageName, trouble: Trouble) -> None:
    """Write down in stage.json what is passed over from now on; collective."""
    config = context.recipe.train_stage(stage).rollback
    assert config is not None

    def note() -> str:
        record = context.folder.record(stage)
        first = max(0, trouble.first - config.steps_before)
        passed_over = sorted({*record.passed_over, *range(first, trouble.last + 1)})
        context.folder.update(stage, passed_over=passed_over, rollbacks=record.rollbacks + 1)
        return (
            f"{stage}: {trouble.why}; going back to before step {first + 1:,}, to pass over the batches up to step "
            f"{trouble.last + 1:,} (rollback {record.rollbacks + 1} of {config.times})"
        )

    context.say(context.on_main(note) or "")


def abandoned_checkpoints(context: StageContext, *, stage: StageName) -> list[Path]:
    """Those that have trained on what is passed over now; collective, and empty above rank 0. Damaged ones are left to
    whoever restores."""

    def find() -> list[Path]:
        passed_over, found = set(context.folder.record(stage).passed_over), list[Path]()
        for folder in checkpoint_folders(context.folder.checkpoints(stage)):
            try:
                state = read_state_file(folder)["state"]
                step, had_passed_over = int(state["step"]), set(state["passed_over"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if {each for each in passed_over if each < step} != {each for each in had_passed_over if each < step}:
                found.append(folder)
        return found

    return context.on_main(find) or []


def remove_abandoned(
    context: StageContext, abandoned: Iterable[Path], *, stage: StageName, restored: TrainState
) -> None:
    """Remove them, once an older one is restored: before that, they may be all that is left; collective."""

    def remove() -> None:
        for folder in abandoned:
            remove_checkpoint(folder)
            context.folder.update(stage, last_saved_step=restored.step, images_seen=restored.images_seen)

    context.on_main(remove)
