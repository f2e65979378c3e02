"""Inspect a trained model: attention maps, rollout and distance; first filters and position similarity (ViT, Figure 7).

Fused kernels never hold attention probabilities, so they are recomputed in float32 from each block's `qkv` output,
relative positions included. Hooks catch it during the model's own forward pass, whose features stay bit for bit; heads
x T x T numbers an image are held for one block at a time. Costs a second product of queries and keys.

The model must be in evaluation mode, on any device. A pure ResNet has no attention; a masked patch model sees whole
images.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers import AttentionPoolLatent, HybridEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from model.masked_patch import MaskedPatchVit
from model.positions.embedding import Learned1d, Learned2d, RelativeAttention, SinCos2d, by_key
from model.resnet import BitResnet, StandardisedConv2d, standardise
from model.vit import PositionedVit

PAPERS_COMPONENTS = 28  # Figure 7, left

SeeBlock = Callable[[int, Tensor], None]


@torch.no_grad()
def look_at_attention(model: VisionTransformer, images: Tensor, *, see: SeeBlock) -> Tensor:
    """Run a forward pass on normalised images [B, 3, S, S]; returns the normed tokens.

    `see` gets each block's number and probabilities, float32 [B, heads, T, T] (class token first; the last axis, keys,
    sums to 1), which it may change in place. Raises ValueError if the model is in training mode.
    """
    if model.training:
        raise ValueError("attention is looked at in evaluation mode: call model.eval() first")
    assert isinstance(model.blocks, nn.Sequential)
    with ExitStack() as hooks:
        for number, block in enumerate(model.blocks):
            attention = block.get_submodule("attn")
            assert isinstance(attention, Attention)

            def hook(
                _: nn.Module, __: object, packed: Tensor, number: int = number, attention: Attention = attention
            ) -> None:
                see(number, _probabilities(attention, packed))

            hooks.enter_context(attention.qkv.register_forward_hook(hook))  # which removes itself at the end
        return model.forward_features(images)


def _probabilities(attention: Attention, packed: Tensor) -> Tensor:
    """The output [B, T, 3 D] of an attention's `qkv` -> its probabilities [B, heads, T, T]."""
    batch, tokens, _ = packed.shape
    by_head = packed.float().reshape(batch, tokens, 3, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
    queries, keys, _ = by_head
    logits = (attention.scale * queries) @ keys.transpose(-2, -1)
    if isinstance(attention, RelativeAttention):
        logits += by_key(queries @ (attention.scale * attention.relative.float()).T)
    return logits.softmax(dim=-1)


@torch.no_grad()
def weights_of_tokens(model: VisionTransformer, tokens: Tensor) -> Tensor:
    """Share of each normed token [B, T, D] in what the head sees: [B, T], sums to 1.

    The class token has all of it, or patches have equal shares ("gap", and a masked patch model, which has no pooling)
    or those of attention pooling ("map"), averaged over its heads.
    """
    batch, count, _ = tokens.shape
    pool = model.attn_pool
    if isinstance(pool, AttentionPoolLatent):
        keys = pool.kv(tokens).reshape(batch, count, 2, pool.num_heads, pool.head_dim).permute(2, 0, 3, 1, 4)[0]
        query = pool.q(pool.latent).reshape(1, pool.latent_len, pool.num_heads, pool.head_dim).transpose(1, 2)
        logits = (pool.scale * query) @ keys.transpose(-2, -1)
        return logits.float().softmax(dim=-1).mean(dim=(1, 2))
    weights = tokens.new_zeros(batch, count, dtype=torch.float32)
    if model.global_pool == "token" and not isinstance(model, MaskedPatchVit):
        weights[:, 0] = 1.0
    else:
        weights[:, model.num_prefix_tokens :] = 1.0 / (count - model.num_prefix_tokens)
    return weights


class Rollout:
    """Attention rollout (Abnar & Zuidema, arXiv 2005.00928), as in the ViT paper's Figure 6 (appendix D).

    Multiplies each block's mean attention over heads A onto that of the blocks before it. The paper does not mention
    residual connections; its authors (google-research/vision_transformer, issue 18) take 0.5 A + 0.5 I, as Abnar &
    Zuidema do. Layer norms and MLPs are left out. `add` is a `see` of `look_at_attention`. Costs T x T numbers each.
    """

    joint: Tensor | None = None  # [B, T, T]: how much of each input token is in each output token; rows sum to 1

    def add(self, block: int, probabilities: Tensor) -> None:
        """Multiply the next block's probabilities [B, heads, T, T] on."""
        mixed = 0.5 * probabilities.mean(dim=1)
        mixed.diagonal(dim1=-2, dim2=-1).add_(0.5)
        self.joint = mixed if self.joint is None else mixed @ self.joint

    def to_patches(self, model: VisionTransformer, tokens: Tensor) -> Tensor:
        """Share of each patch in what the head sees: [B, grid, grid], without the class token's own; for the tokens of
        `look_at_attention`. Attention pooling has no residual connection: its shares are multiplied on as they are."""
        assert self.joint is not None, "no block was seen"
        shares = (weights_of_tokens(model, tokens)[:, None] @ self.joint)[:, 0, model.num_prefix_tokens :]
        grid = round(shares.shape[1] ** 0.5)
        return shares.unflatten(1, (grid, grid))


def patch_distances(grid: int, *, patch_size: float) -> Tensor:
    """Distances in pixels between the centres of all patches of a square grid: float32 [grid^2, grid^2]."""
    place = torch.arange(grid, dtype=torch.float32)
    centres = torch.cartesian_prod(place, place)
    return patch_size * torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


class AttentionDistance:
    """Mean attention distance of each head (ViT paper, Figure 7 right, and appendix D; over 128 images there).

    Averages a query patch's distances in pixels to all patches, itself included, weighted by its attention; then over
    queries and images. The class token is neither query nor key, and weights on patches are scaled to sum to 1 (else a
    head that attends to the class token would look near-sighted).
    """

    def __init__(self, grid: int, *, patch_size: float) -> None:
        self._distances = patch_distances(grid, patch_size=patch_size)
        self._sums: list[Tensor] = []  # float64 [heads], of each block
        self.images = 0  # seen so far

    @property
    def of_uniform_attention(self) -> float:
        """Mean attention distance of a head that attends to all patches alike."""
        return self._distances.mean(dtype=torch.float64).item()

    def add(self, block: int, probabilities: Tensor) -> None:
        """Take in a block's probabilities [B, heads, T, T] of the next images; block 0 comes first."""
        patches = len(self._distances)
        weights = probabilities[..., -patches:, -patches:]
        distances = self._distances.to(weights.device)
        spans = torch.einsum("bhqk,qk->bhq", weights, distances)
        means = (spans / weights.sum(dim=-1).clamp_min(torch.finfo(weights.dtype).tiny)).mean(dim=-1)
        of_heads = means.double().sum(dim=0).cpu()
        if block == 0:
            self.images += len(probabilities)
        if block < len(self._sums):
            self._sums[block] += of_heads
        else:
            self._sums.append(of_heads)

    def means(self) -> Tensor:
        """Pixels, float64 [blocks, heads]."""
        return torch.stack(self._sums) / self.images


@dataclass(frozen=True)
class FirstFilters:
    """Filters over RGB, float32 [n, 3, side, side], in units of their own; 0 means no weight."""

    kind: Literal["components", "kernels"]  # principal components of a patch embedding; or a ResNet's own kernels
    filters: Tensor
    shares: tuple[float, ...] = ()  # of the embedding's variance, of each component


@torch.no_grad()
def first_filters(model: VisionTransformer | BitResnet, *, most: int = PAPERS_COMPONENTS) -> FirstFilters:
    """The first `most` principal components of the patch embedding's D filters around their mean (float64, by
    descending variance, signed so that the largest weight is positive); or, of a hybrid or a ResNet, the first `most`
    kernels of its root convolution, standardised as they are applied."""
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
    """The patches' position embeddings, float32 [tables, N, D]: one table, or one for each block that has its own.
    None: no patch has one (`position: none` or `relative`, whose offsets belong to pairs)."""
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
