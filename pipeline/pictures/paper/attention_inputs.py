"""A model is shown some images, once, and all that the figures of its attention need is kept.

Takes a forward pass of each image, and about a half more for the probabilities. As many images as fit into some
seconds of a core: the paper's 128 for attention distance if the model is small, at least those that are shown. Memory:
the model, and 64 MiB of probabilities at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from data_shards.loading.batch import Batch
from data_shards.vocabulary import Normalisation
from model.counting.flops import account
from model.inspection import AttentionDistance, Rollout, look_at_attention, weights_of_tokens
from model.loss import probabilities as of_logits
from model.saved.model_folder import SavedModelMeta
from pipeline.stage.task import model_input

PAPERS_IMAGES = 128  # of attention distance: ViT paper, appendix D
SHOWN_IMAGES = 8
_MOST_FLOPS = 1e12  # of all forward passes: half a minute of a core or two
_MOST_BYTES = 64 << 20  # of probabilities held at once


@dataclass(frozen=True)
class LookedAt:
    """Attention over `images` images; `rollout` and `guesses` have rows for the first `SHOWN_IMAGES`."""

    images: int
    rollout: Tensor  # float32 [n, grid, grid]: how much of each patch is in what the head sees
    guesses: tuple[tuple[int, float], ...]  # most probable class and its probability; none: the model knows no classes
    maps: Tensor  # float32 [blocks, heads, grid, grid] of the first image: attention to patches
    distances: Tensor  # float64 [blocks, heads], pixels
    uniform_distance: float  # of a head that attends to all patches alike


def images_to_look_at(meta: SavedModelMeta) -> int:
    """Number of images that a CPU handles in about half a minute: `SHOWN_IMAGES` to `PAPERS_IMAGES`."""
    head = "linear" if meta.head == "masked_patch" else meta.head
    cost = account(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=head)
    return max(SHOWN_IMAGES, min(PAPERS_IMAGES, int(_MOST_FLOPS / cost.forward_flops)))


@torch.inference_mode()
def look(model: VisionTransformer, batch: Batch, *, meta: SavedModelMeta) -> LookedAt:
    """Show all images of `batch`, at least one, to the model, on the model's device."""
    device = next(model.parameters()).device
    grid = meta.model.grid_size(meta.image_size)
    distance = AttentionDistance(grid, patch_size=meta.model.sizes.patch_size)
    heads, tokens = meta.model.sizes.heads, grid**2 + model.num_prefix_tokens
    at_once = max(1, min(32, _MOST_BYTES // (heads * tokens**2 * 4)))
    normalisation = Normalisation(mean=meta.mean, std=meta.std)
    images = model_input(batch, device=device, dtype=torch.float32, normalisation=normalisation)
    rollouts: list[Tensor] = []
    logits: list[Tensor] = []
    maps: list[Tensor] = []
    for first in range(0, len(images), at_once):
        rollout, is_shown, of_first = Rollout(), first < SHOWN_IMAGES, list[Tensor]()

        def see(
            block: int,
            probabilities: Tensor,
            *,
            rollout: Rollout = rollout,
            is_shown: bool = is_shown,
            of_first: list[Tensor] | None = of_first if first == 0 else None,
        ) -> None:
            distance.add(block, probabilities)
            if is_shown:
                rollout.add(block, probabilities)
            if of_first is not None:
                of_first.append(_to_patches(model, probabilities[0], grid=grid).cpu())

        seen = look_at_attention(model, images[first : first + at_once], see=see)
        if is_shown:
            rollouts.append(rollout.to_patches(model, seen).cpu())
            if meta.head != "masked_patch":
                logits.append(model.forward_head(seen).float().cpu())
        maps += of_first
    guesses = []
    if logits:
        best = of_logits(torch.cat(logits)[:SHOWN_IMAGES], meta.loss).max(dim=1)
        guesses = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return LookedAt(
        images=len(images),
        rollout=torch.cat(rollouts)[:SHOWN_IMAGES],
        guesses=tuple(guesses),
        maps=torch.stack(maps),
        distances=distance.means(),
        uniform_distance=distance.of_uniform_attention,
    )


def _to_patches(model: VisionTransformer, probabilities: Tensor, *, grid: int) -> Tensor:
    """Attention from the class token to patches, or the mean over all patches, of one image's [heads, T, T]: [heads,
    grid, grid]."""
    prefix = model.num_prefix_tokens
    rows = probabilities[:, 0] if reads_class_token(model) else probabilities[:, prefix:].mean(dim=1)
    return rows[:, prefix:].unflatten(1, (grid, grid))


def reads_class_token(model: VisionTransformer) -> bool:
    """True if the head sees only the class token."""
    with torch.no_grad():
        tokens = next(model.parameters()).new_zeros(1, 1 + model.num_prefix_tokens, model.embed_dim)
        return model.num_prefix_tokens > 0 and bool(weights_of_tokens(model, tokens)[0, 0] == 1)
