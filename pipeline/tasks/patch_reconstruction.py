"""A masked autoencoder as a task: hidden patches and their pixels. See `model.self_supervised.masked_autoencoder`."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation, RandomStream
from shardvit.model.config import kept_patches
from shardvit.model.self_supervised.masked_autoencoder import patches_of, standardised
from shardvit.model.vocabulary import PIXELS
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.stage.pixels import flipped, normalised, to_device
from shardvit.pipeline.stage.task import Example, Tally, Use


@dataclass
class PatchReconstruction:
    """Predict the pixels of each hidden patch from the visible ones. The loss is all that there is to judge it by."""

    engine: Engine
    seed: int
    patch_size: int
    mask_ratio: float
    target: Literal["normalised", "pixels"] = "normalised"
    normalisation: Normalisation = GOOGLES
    step: int = 0

    outputs = PIXELS
    kind_of_output = "pixels of hidden patches"
    score = "loss"
    train_metric = "train/loss"

    def example(self, batch: Batch, *, use: Use) -> Example:
        """Make images, kept and hidden patches, and pixels [n, M, C * patch_size^2] of the hidden ones, in float32."""
        engine = self.engine
        images = normalised(flipped(batch, device=engine.device), self.normalisation)
        patches = patches_of(images, patch_size=self.patch_size)
        drawn = draw_patches(batch, use=use, seed=self.seed, num_patches=patches.shape[1], mask_ratio=self.mask_ratio)
        kept, hidden = (to_device(each, engine.device) for each in drawn)
        targets = patches.gather(1, hidden[..., None].expand(-1, -1, patches.shape[-1]))
        if self.target == "normalised":
            targets = standardised(targets)
        return Example((images.to(engine.input_dtype), kept, hidden), targets)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean squared error over the hidden patches, in float32; M is the same for every image."""
        return (outputs.float() - targets).square().mean()

    def train_score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """NaN, which is not logged."""
        return outputs.new_full((), torch.nan, dtype=torch.float32)

    def tally(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tally:
        """Count patches, not images."""
        loss = (outputs.float() - targets).square().double().mean(dim=-1).sum(dim=1)
        return Tally(loss, torch.zeros_like(loss), torch.full_like(loss, targets.shape[1]))


def draw_patches(
    batch: Batch, *, use: Use, seed: int, num_patches: int, mask_ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw kept [n, K] and hidden [n, M] patches, int64: in training by (seed, epoch, sample), independent of world
    size, workers and resumes; in evaluations by (seed, sample), the same each time."""
    samples = batch.samples.numpy()
    if use == "train":
        drawn = uniforms(RandomStream.HIDDEN_TRAIN, seed, batch.epochs.numpy(), samples, draws=num_patches)
    else:
        drawn = uniforms(RandomStream.HIDDEN_HELD_OUT, seed, samples, draws=num_patches)
    order = np.argsort(drawn, axis=1, kind="stable")
    kept = kept_patches(num_patches, mask_ratio=mask_ratio)
    return torch.from_numpy(order[:, :kept].copy()), torch.from_numpy(order[:, kept:].copy())
