"""The training state that the loop carries from step to step, and checkpoints from attempt to attempt.

Plain values, which survive JSON to the last bit. Weights and optimizer are the engine's; the position in the data is
`step`. No random generator is saved: every step is seeded from (seed, step, rank), and dropout's masks depend on the
place in the global batch (`dropout_masks`).
"""

from dataclasses import dataclass, field

import torch

from data_shards.order.randomness import hash_words
from data_shards.vocabulary import RandomStream


@dataclass
class TrainState:
    """`step` counts attempted optimizer steps, including skipped ones."""

    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0  # in all
    skipped_in_a_row: int = 0
    substituted_images: int = 0  # damaged ones that another image took the place of
    training_seconds: float = 0.0  # spent in this stage, over all attempts that were saved
    process_seconds: float = 0.0  # the same times the processes of each attempt
    losses_since_log: list[float] = field(default_factory=list)  # global means of steps not yet in the curve
    scores_since_log: list[float] = field(default_factory=list)  # of the same steps
    evaluation: dict[str, float] = field(default_factory=dict)  # the last one
    evaluation_step: int = 0  # when that was
    recent_losses: list[float] = field(default_factory=list)  # of the last steps, to tell a spike by
    passed_over: list[int] = field(default_factory=list)  # steps, from 0, that a rollback skips
    rollbacks: int = 0

    def advance(self, *, images: int) -> None:
        """Count an optimizer step, or one that a rollback skips."""
        self.step += 1
        self.images_seen += images

    def settle(self, *, applied: bool) -> None:
        """Count the next step's outcome; not `applied`: its gradients were not finite."""
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        self.skipped_steps += not applied


@dataclass(frozen=True)
class Trouble:
    """Steps to skip, counted from 0."""

    first: int
    last: int
    why: str  # a clause


class RollBack(Exception):
    """Resume from a checkpoint before `trouble`, and skip its steps."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        super().__init__(trouble.why)


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Seed torch's generators for one step; the masks of `dropout_masks: process` are drawn from them."""
    torch.manual_seed(int(hash_words(RandomStream.DROPOUT, seed, step, rank)[0]) >> 1)
