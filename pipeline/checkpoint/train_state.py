"""The state that the training loop carries from step to step, and checkpoints across restarts.

Plain values, exact in JSON. The position in the data is `step`. Needs no random generator: every step is seeded from
(seed, step, rank), and dropout masks depend on the place in the global batch (`dropout_masks`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.vocabulary import RandomStream


@dataclass
class TrainState:
    """`step` counts attempted optimizer steps, including skipped ones."""

    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0  # in total
    skipped_in_a_row: int = 0
    substituted_images: int = 0  # damaged images replaced by others
    training_seconds: float = 0.0  # in this stage, over all saved attempts
    process_seconds: float = 0.0  # summed over each attempt's processes
    losses_since_log: list[float] = field(default_factory=list)  # global means, steps not logged yet
    scores_since_log: list[float] = field(default_factory=list)  # of the same steps
    evaluation: dict[str, float] = field(default_factory=dict)  # the last one
    evaluation_step: int = 0  # its step
    curve: dict[str, float] = field(default_factory=dict)  # the training curve's last point, without times
    recent_losses: list[float] = field(default_factory=list)  # for spike detection
    passed_over: list[int] = field(default_factory=list)  # steps, from 0, that a rollback skips
    rollbacks: int = 0
    own: dict[str, Any] = field(default_factory=dict)  # states of the user's task and callbacks, by name

    def advance(self, *, images: int) -> None:
        self.step += 1
        self.images_seen += images

    def settle(self, *, applied: bool) -> None:
        """Count the next step's outcome; `applied` is False if its gradients were not finite."""
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
    """Seed torch's generators of the CPU and of this process's GPU for one step: `dropout_masks: process` draws from
    them, and the user's model, task, loss and callbacks may. As `torch.manual_seed`, which seeds every GPU of the
    machine, too, and before CUDA is in use formats a stack trace in each call: five times the cost of all this."""
    word = int(hash_words(RandomStream.DROPOUT, seed, step, rank)[0]) >> 1
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(word)
