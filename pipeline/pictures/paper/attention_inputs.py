"""Read images for the attention figures, and run them through the model once.

Reads files, or evenly spaced images of a set, decoded and cropped as in the model's evaluation; skips damaged ones.
Takes as many as a core handles in half a minute: at most the paper's 128 for attention distance, at least those shown.
Costs 1.5 forward passes an image, and 64 MiB of probabilities at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images.channels import open_image
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit
from shardvit.data_shards.images.transforms import EvalTransform, Pixels
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch, batch_of
from shardvit.data_shards.text import one_line
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.counting.flops import account
from shardvit.model.inspection import AttentionDistance, Rollout, look_at_attention
from shardvit.model.loss import probabilities as of_logits
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.pictures.held_out_images import read_samples
from shardvit.pipeline.pictures.paper.weight_figures import evenly
from shardvit.pipeline.stage.pixels import model_input

PAPERS_IMAGES = 128  # of attention distance: ViT paper, appendix D
SHOWN_IMAGES = 8
_MOST_FLOPS = 1e12  # for all forward passes: half a minute on one or two cores
_MOST_BYTES = 64 << 20  # of probabilities held at once


@dataclass(frozen=True)
class SeenAttention:
    """Attention over `images` images; `rollout` and `guesses` cover the first `SHOWN_IMAGES`."""

    images: int
    rollout: Tensor  # float32 [n, grid, grid]: each patch's share of the head's input
    guesses: tuple[tuple[int, float], ...]  # top class and its probability; empty: the model has no classes
    maps: Tensor  # float32 [blocks, heads, grid, grid] of the first image: attention to patches
    distances: Tensor  # float64 [blocks, heads], pixels
    uniform_distance: float  # pixels, for a head with uniform attention


def images_to_look_at(meta: SavedModelMeta) -> int:
    """Number of images a CPU handles in about half a minute: `SHOWN_IMAGES` to `PAPERS_IMAGES`."""
    cost = account(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=meta.class_head)
    return max(SHOWN_IMAGES, min(PAPERS_IMAGES, int(_MOST_FLOPS / cost.forward_flops)))


def images_of_shards(access: Access, *, meta: SavedModelMeta, count: int, fetch: Literal["never", "missing"]) -> Batch:
    """Read at most `count` undamaged, evenly spaced images; `fetch` as in `read_samples`. UserError if there are
    none."""
    samples = evenly(access.shards.num_samples, most=count)
    batch = read_samples(access, samples=samples, transform=_transform(meta), fetch=fetch)
    if not batch.keys:
        raise UserError(f"{access.shards.source}: of its images none can be read on this machine")
    return batch


def images_of_files(
    files: Sequence[Path], *, meta: SavedModelMeta, limit: PixelLimit = USUAL_LIMIT
) -> tuple[Batch, list[str]]:
    """Read image files; also return a sentence for each unreadable one. UserError if all are."""
    transform, squares, names, faults = _transform(meta), list[Pixels](), list[str](), list[str]()
    for file in files:
        try:
            squares.append(transform(open_image(file.read_bytes(), channels=meta.raw_channels, limit=limit)))
            names.append(file.name)
        except UnreadableImage as error:
            faults.append(f"{one_line(str(file))}: {error}")
        except OSError as error:
            faults.append(f"{one_line(str(file))}: cannot be read ({error.strerror})")
    if not squares:
        raise UserError(faults[0])
    return batch_of(torch.from_numpy(np.stack(squares)), keys=names), faults


def _transform(meta: SavedModelMeta) -> EvalTransform:
    return EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)


@torch.inference_mode()
def look(model: VisionTransformer, batch: Batch, *, meta: SavedModelMeta) -> SeenAttention:
    """Run all images of `batch` (at least one) through the model, on its device."""
    device = next(model.parameters()).device
    grid = meta.model.grid_size(meta.image_size)
    distance = AttentionDistance(grid, patch_size=meta.model.sizes.patch_size)
    heads, prefix = meta.model.sizes.heads, model.num_prefix_tokens
    at_once = max(1, min(32, _MOST_BYTES // (4 * heads * (grid**2 + prefix) ** 2)))
    reads_class_token = meta.model.pool == "cls" and meta.has_classes
    normalisation = Normalisation(mean=meta.mean, std=meta.std)
    images = model_input(batch, device=device, dtype=torch.float32, normalisation=normalisation)
    rollouts, logits, maps = list[Tensor](), list[Tensor](), list[Tensor]()
    for first in range(0, len(images), at_once):
        rollout = Rollout()

        def see(block: int, probabilities: Tensor, *, first: int = first, rollout: Rollout = rollout) -> None:
            distance.add(block, probabilities)
            if first < SHOWN_IMAGES:
                rollout.add(block, probabilities)
            if first == 0:
                own = probabilities[0]  # [heads, T, T]
                rows = own[:, 0] if reads_class_token else own[:, prefix:].mean(dim=1)
                maps.append(rows[:, prefix:].unflatten(1, (grid, grid)).cpu())

        seen = look_at_attention(model, images[first : first + at_once], see=see)
        if first < SHOWN_IMAGES:
            rollouts.append(rollout.to_patches(model, seen).cpu())
            if meta.has_classes:
                logits.append(model.forward_head(seen).float().cpu())
    guesses = ()
    if logits:
        best = of_logits(torch.cat(logits)[:SHOWN_IMAGES], meta.loss).max(dim=1)
        guesses = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SeenAttention(
        images=len(images),
        rollout=torch.cat(rollouts)[:SHOWN_IMAGES],
        guesses=guesses,
        maps=torch.stack(maps),
        distances=distance.means(),
        uniform_distance=distance.of_uniform_attention,
    )
