"""Masked patch prediction as a task: corrupted patches and their colours. See `model.self_supervised.masked_patch`."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import GOOGLES, RandomStream
from shardvit.model.loss import image_losses, softmax_cross_entropy
from shardvit.model.self_supervised.masked_patch import colour_classes
from shardvit.model.vocabulary import COLOURS
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.stage.pixels import flipped, normalised, to_device
from shardvit.pipeline.stage.task import Example, Tally, Use

_MASK_SHARE, _OTHER_SHARE = 0.8, 0.1  # of the corrupted patches; the rest keep their embeddings


@dataclass
class MaskedPatches:
    """Predict the mean colour of each corrupted patch from the others: see `model.self_supervised.masked_patch`."""

    engine: Engine
    seed: int
    patch_size: int
    step: int = 0

    outputs = COLOURS
    kind_of_output = "colours"
    score = "accuracy"
    train_metric = "train/accuracy"

    def example(self, batch: Batch, *, use: Use) -> Example:
        """Make images, their corruption, and colours [n, K] of the corrupted patches."""
        engine = self.engine
        pixels = flipped(batch, device=engine.device)
        colours = colour_classes(pixels.permute(0, 2, 3, 1), patch_size=self.patch_size)

        corruption_of = {"train": corruption_in_training, "eval": corruption_held_out}[use]
        corruption = corruption_of(batch, seed=self.seed, num_patches=colours.shape[1])
        source = to_device(corruption.source, engine.device)
        corrupted = to_device(corruption.corrupted, engine.device)
        images = normalised(pixels, GOOGLES).to(engine.input_dtype)
        return Example((images, source, corrupted), colours.gather(1, corrupted))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over all corrupted patches for logits [n, K, 512]; K is the same for every image."""
        return softmax_cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def train_score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.detach().argmax(dim=-1) == targets).float().mean()

    def tally(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tally:
        """Count patches, not images."""
        losses = image_losses(outputs.flatten(0, 1), targets.flatten(), kind="softmax")
        loss = losses.double().view(targets.shape).sum(dim=1)
        right = (outputs.argmax(dim=-1) == targets).sum(dim=1).double()
        return Tally(loss, right, torch.full_like(loss, targets.shape[1]))


@dataclass(frozen=True)
class Corruption:
    """Corruption of the N patches of n images."""

    source: torch.Tensor  # int64 [n, N]: the patch whose embedding each patch gets; N for the mask's
    corrupted: torch.Tensor  # int64 [n, N // 2]: the patches to predict


def corruption_in_training(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """Corrupt by (seed, epoch, sample), independent of world size, workers and resumes."""
    return draw_corruption(
        RandomStream.CORRUPTION_TRAIN, seed, batch.epochs.numpy(), batch.samples.numpy(), num_patches=num_patches
    )


def corruption_held_out(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """Corrupt by (seed, sample), the same in every evaluation."""
    return draw_corruption(RandomStream.CORRUPTION_HELD_OUT, seed, batch.samples.numpy(), num_patches=num_patches)


def draw_corruption(*key: ArrayLike, num_patches: int) -> Corruption:
    """Corrupt a random half (rounded down) of each image's patches: 80 % get the mask's embedding, 10 % that of another
    patch of the image, 10 % keep theirs. `key`: words of `randomness.uniforms`; arrays have an entry per image."""
    count = num_patches // 2
    draws = uniforms(*key, draws=num_patches + count)
    corrupted = np.argsort(draws[:, :num_patches], axis=1, kind="stable")[:, :count]
    kind = draws[:, num_patches:]
    # The draw's position within the share selects a patch of the same image, so its loss ignores the rest of the batch.
    steps = np.floor((kind - _MASK_SHARE) / _OTHER_SHARE * (num_patches - 1)).astype(np.int64).clip(0, num_patches - 2)
    other = (corrupted + 1 + steps) % num_patches
    given = np.where(kind < _MASK_SHARE, num_patches, np.where(kind < _MASK_SHARE + _OTHER_SHARE, other, corrupted))
    source = np.tile(np.arange(num_patches), (len(draws), 1))
    np.put_along_axis(source, corrupted, given, axis=1)
    return Corruption(source=torch.from_numpy(source), corrupted=torch.from_numpy(corrupted))
