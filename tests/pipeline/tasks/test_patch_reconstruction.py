"""Which patches a masked autoencoder hides, and what it is to predict: the same on any ranks, workers and resumes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.loading.batch import Batch, batch_of
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.pipeline.evaluation.evaluate import evaluate
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.stage.task import Example, Use
from shardvit.pipeline.tasks.patch_reconstruction import PatchReconstruction, draw_patches
from tests.data_shards.streams import SIZE, STEPS, micro_batches, pack_noise

PATCH_SIZE, PATCHES = 3, (SIZE // 3) ** 2
OTHERS = Normalisation(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


class Alone:
    """A single rank."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[None].double()


def task(outputs_of: Any = None, **options: Any) -> PatchReconstruction:
    module = SimpleNamespace(eval=lambda: None, train=lambda: None)
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), input_dtype=torch.float32, module=module, predict=outputs_of
    )
    options = {"mask_ratio": 0.75, "normalisation": OTHERS, **options}
    return PatchReconstruction(engine=engine, seed=3, patch_size=PATCH_SIZE, **options)


def batch(samples: range = range(100, 106), *, epoch: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (256, SIZE, SIZE, 3), dtype=torch.uint8, generator=draw)[list(samples)]
    made = batch_of(images, keys=[""] * len(samples))
    made.samples.copy_(torch.tensor(samples))
    made.epochs.fill_(epoch)
    return made


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return pack_noise(tmp_path_factory.mktemp("noise"), count=61, samples_per_shard=9)


def rows_of(example: Example) -> list[tuple[bytes, ...]]:
    tensors = (*example.inputs, example.targets)
    return [tuple(tensor[row].numpy().tobytes() for tensor in tensors) for row in range(len(example.targets))]


@pytest.mark.parametrize(("world_size", "accumulation_steps", "workers"), [(1, 4, 0), (2, 1, 2), (4, 2, 0)])
def test_the_stream_is_the_same_on_any_ranks_and_workers(
    shards: ShardSet, world_size: int, accumulation_steps: int, workers: int
):
    def stream(*, start_step: int = 0, **options: int) -> list[set[tuple[bytes, ...]]]:
        steps: list[set[tuple[bytes, ...]]] = [set() for _ in range(STEPS)]
        per_step = options.get("accumulation_steps", 1)
        for rank in range(options.get("world_size", 1)):
            found = micro_batches(shards, rank=rank, start_step=start_step, kind="thread", **options)
            for number, each in enumerate(found):
                steps[start_step + number // per_step] |= set(rows_of(task().example(each, use="train")))
        return steps

    undivided = stream()
    assert len({row for step in undivided for row in step}) == STEPS * 8  # no image looks twice the same
    options = {"world_size": world_size, "accumulation_steps": accumulation_steps, "workers": workers}
    assert stream(**options) == undivided
    assert stream(start_step=37, **options)[37:] == undivided[37:]  # resumed


@given(st.integers(2, 20), st.floats(0.05, 0.95), st.sampled_from(["train", "eval"]))
def test_each_patch_is_kept_or_hidden_and_as_many_in_each_image(grid: int, ratio: float, use: Use):
    kept, hidden = draw_patches(batch(), use=use, seed=1, num_patches=grid**2, mask_ratio=ratio)
    assert kept.shape[1] == max(1, int(grid**2 * (1 - ratio)))
    assert torch.equal(torch.cat([kept, hidden], dim=1).sort(dim=1).values, torch.arange(grid**2).expand(6, -1))


def test_training_draws_by_epoch_and_evaluations_do_not():
    options: dict[str, Any] = {"seed": 1, "num_patches": 64, "mask_ratio": 0.75}
    first, later = (batch(epoch=epoch) for epoch in (0, 1))
    trained = [draw_patches(each, use="train", **options)[0] for each in (first, later)]
    assert not torch.equal(*trained)
    held_out = [draw_patches(each, use="eval", **options)[0] for each in (first, later)]
    assert torch.equal(*held_out) and not torch.equal(held_out[0], trained[0])
    alone = draw_patches(batch(range(103, 104)), use="eval", **options)[0]
    assert torch.equal(alone[0], held_out[0][3])  # whoever is beside it
    shares = np.bincount(draw_patches(batch(range(256)), use="train", **options)[0].flatten().numpy(), minlength=64)
    assert np.abs(shares - 64).max() < 5 * (64 * 0.75) ** 0.5  # each as often as the others


@pytest.mark.parametrize("target", ["normalised", "pixels"])
def test_the_targets_are_the_pixels_of_what_the_model_is_shown(target: str):
    example = task(target=target).example(batch(), use="train")
    images, _, hidden = example.inputs
    assert torch.equal(
        images, model_input(batch(), device=torch.device("cpu"), dtype=torch.float32, normalisation=OTHERS)
    )
    side = SIZE // PATCH_SIZE
    for row, column in ((0, 0), (3, 2), (5, 1)):
        top, left = (PATCH_SIZE * each for each in divmod(int(hidden[row, column]), side))
        patch = images[row, :, top : top + PATCH_SIZE, left : left + PATCH_SIZE].permute(1, 2, 0).flatten().double()
        if target == "normalised":
            patch = (patch - patch.mean()) / (patch.var(correction=1) + 1e-6).sqrt()
        torch.testing.assert_close(example.targets[row, column].double(), patch, rtol=1e-5, atol=1e-5)


def test_an_evaluation_is_the_mean_over_hidden_patches_however_images_are_divided():
    def outputs_of(images: torch.Tensor, kept: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(1, 2, 3))[:, None, None] + hidden[..., None] * 0.1 + torch.zeros(3 * PATCH_SIZE**2)

    ledger: Any = SimpleNamespace(note=lambda *arguments, **options: None)
    mine, ranks = task(outputs_of), Alone()

    def evaluation(*batches: Batch) -> dict[str, float]:
        return evaluate(batches, task=mine, ranks=ranks, faults=ledger).metrics  # pyright: ignore[reportArgumentType]

    example = mine.example(batch(), use="eval")
    loss = mine.loss(outputs_of(*example.inputs), example.targets)
    once = evaluation(batch())
    assert set(once) == {"val/loss", "val/images"} and once["val/images"] == 6
    assert once["val/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert evaluation(batch(range(100, 104)), batch(range(104, 106))) == pytest.approx(once, rel=1e-6)
