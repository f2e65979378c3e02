"""Filters of the first layer and similarity of position embeddings, from the weights alone (ViT paper, Figure 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from model.positions.embedding import Learned1d, Learned2d, SinCos2d
from model.resnet.bit import BitResnet
from model.resnet.standardised_conv import StandardisedConv2d, standardise
from model.vit import PositionedVit

PAPERS_COMPONENTS = 28  # Figure 7, left


@dataclass(frozen=True)
class FirstFilters:
    """Filters over RGB, float32 [n, 3, side, side], in units of their own; 0 means no weight."""

    kind: Literal["components", "kernels"]  # principal components of a patch embedding; or a ResNet's own kernels
    filters: Tensor
    shares: tuple[float, ...] = ()  # of the embedding's variance, of each component


@torch.no_grad()
def first_filters(model: VisionTransformer | BitResnet, *, most: int = PAPERS_COMPONENTS) -> FirstFilters:
    """The first `most` principal components of the patch embedding's D filters; or, of a hybrid or a ResNet, the first
    `most` kernels of its root convolution, standardised as they are applied.

    The components are those of the D filters around their mean, in float64, by descending variance; there are as many
    as filters or weights, if these are fewer. Of either sign, that is taken whose largest weight is positive.
    """
    if isinstance(model, BitResnet) or isinstance(model.patch_embed, HybridEmbed):
        resnet = model if isinstance(model, BitResnet) else model.get_submodule("patch_embed.backbone")
        root = resnet.get_submodule("stem.conv")
        assert isinstance(root, StandardisedConv2d)
        return FirstFilters("kernels", standardise(root.weight.float())[:most].cpu())
    kernels = model.patch_embed.proj.weight
    rows = kernels.flatten(1).double().cpu()
    _, singular, components = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    variances = singular**2
    shares = (variances / variances.sum().clamp_min(torch.finfo(torch.float64).tiny))[:most]
    components = components[:most]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = torch.where(largest < 0, -components, components)
    return FirstFilters("components", components.unflatten(1, kernels.shape[1:]).float(), tuple(shares.tolist()))


@torch.no_grad()
def patch_positions(model: VisionTransformer) -> Tensor | None:
    """The position embeddings of the patches, float32 [tables, N, D]: one table, or one for each block that has its
    own. None: the model adds none (`position: none`), or its positions are offsets (`relative`), which belong to pairs
    of patches: no patch has an embedding to compare."""
    if not isinstance(model, PositionedVit):
        return None if model.pos_embed is None else _of_patches(model, model.pos_embed)
    kinds = (Learned1d, Learned2d, SinCos2d)
    tables = [each for each in model.position.tables if isinstance(each, kinds)]
    if not tables:
        return None
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    nothing = next(model.parameters()).new_zeros(1, tokens, model.embed_dim)
    return torch.cat([_of_patches(model, table(nothing)) for table in tables])


def _of_patches(model: VisionTransformer, embedding: Tensor) -> Tensor:
    return embedding[:, -model.patch_embed.num_patches :].detach().float().cpu()


def position_similarity(positions: Tensor) -> Tensor:
    """Cosine similarity of each patch's position embedding with all others': [..., N, D] -> [..., N, N], -1 to 1."""
    directions = nn.functional.normalize(positions, dim=-1)
    return directions @ directions.transpose(-2, -1)
