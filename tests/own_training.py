"""What somebody else might write into a file of his own: a loss, an augmentation, metrics, a callback, and so on."""

from pathlib import Path

EXAMPLE = """
import numpy as np
import torch
from torch.nn import functional as F

from shardvit.pipeline.stage.task import Classification, Example


def focal(logits, targets):
    share = logits.softmax(1)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    return -(targets * (1 - share) ** 2 * share.clamp(min=1e-9).log()).sum(1)


def noise(image, generator):
    changed = image + generator.integers(-8, 9, image.shape)
    return np.clip(changed, 0, 255).astype(np.uint8)


def hits(logits, targets):
    return (logits.argmax(1) == targets).float()


class Hits:
    def __init__(self):
        self.right = self.all = torch.zeros((), dtype=torch.int64)

    def update(self, logits, targets):
        self.right = self.right + (logits.argmax(1) == targets).sum()
        self.all = self.all + len(targets)

    def merge(self, other):
        self.right, self.all = self.right + other.right, self.all + other.all

    def compute(self):
        return self.right / self.all


class Rotations(Classification):
    outputs = ("0", "90", "180", "270")

    def example(self, batch, *, use):
        (images,) = super().example(batch, use=use).inputs
        turns = torch.from_numpy(self.random(batch, use=use, draws=1)[: len(images), 0] * 4).long()
        images = torch.stack([image.rot90(turn, (1, 2)) for image, turn in zip(images, turns.tolist())])
        return Example((images,), turns.to(images.device))


class Total:
    def __init__(self):
        self.total = 0.0

    def after_step(self, at):
        self.total += at.curve.get("train/loss", 0.0)

    def before_saving(self, at):
        at.log("mine/total", self.total)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def nadam(groups, lr):
    return torch.optim.NAdam(groups, lr=lr, decoupled_weight_decay=True)
"""


def write_example(folder: Path) -> str:
    """Write FOLDER/mine.py; returns its path."""
    (folder / "mine.py").write_text(EXAMPLE)
    return str(folder / "mine.py")
