"""Inspect a trained model: attention maps, rollout and distance; first filters and position similarity (ViT, Figure 7).

Fused kernels never hold attention probabilities, so hooks recompute them in float32 from each block's `qkv` output,
relative positions, norms and rotations included; the forward pass stays bit-identical. Costs a second product of
queries and keys, and holds heads x T x T numbers an image for one block at a time. The model must be in evaluation
mode. A pure ResNet has no attention; self-supervised models see whole images.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers import AttentionPoolLatent, HybridEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from shardvit.model.positions.embedding import Learned1d, Learned2d, RelativeAttention, SinCos2d, by_key
from shardvit.model.positions.rotary import RotaryAttention
from shardvit.model.resnet import BitResnet, StandardisedConv2d, standardise
from shardvit.model.self_supervised.masked_autoencoder import MaskedAutoencoderVit
from shardvit.model.self_supervised.masked_patch import MaskedPatchVit
from shardvit.model.vit import DistilledVit, PositionedVit

PAPERS_COMPONENTS = 28  # Figure 7, left

SeeBlock = Callable[[int, Tensor], None]
Looked = Attention | RotaryAttention


@torch.no_grad()
def look_at_attention(model: VisionTransformer, images: Tensor, *, see: SeeBlock) -> Tensor:
    """Run a forward pass on normalised images [B, 3, S, S]; returns the normed tokens. ValueError in training mode.
    `see` gets (and may change) each block's number and probabilities, float32 [B, heads, T, T], class token first."""
    if model.training:
        raise ValueError("attention is looked at in evaluation mode: call model.eval() first")
    assert isinstance(model.blocks, nn.Sequential)
    with ExitStack() as hooks:
        for number, block in enumerate(model.blocks):
            attention = block.get_submodule("attn")
            assert isinstance(attention, Attention | RotaryAttention)

            def hook(
                _: nn.Module, __: object, packed: Tensor, number: int = number, attention: Looked = attention
            ) -> None:
                see(number, _probabilities(attention, packed))

            hooks.enter_context(attention.get_submodule("qkv").register_forward_hook(hook))  # removed on exit
        return model.forward_features(images)


def _probabilities(attention: Looked, packed: Tensor) -> Tensor:
    """`qkv` output [B, T, 3 D] -> probabilities [B, heads, T, T]."""
    batch, tokens, _ = packed.shape
    by_head = packed.float().reshape(batch, tokens, 3, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
    queries, keys = attention.q_norm(by_head[0]), attention.k_norm(by_head[1])
    if isinstance(attention, RotaryAttention):
        queries, keys = attention.rotated(queries), attention.rotated(keys)
    logits = (attention.scale * queries) @ keys.transpose(-2, -1)
    if isinstance(attention, RelativeAttention):
        logits += by_key(queries @ (attention.scale * attention.relative.float()).T)
    return logits.softmax(dim=-1)


@torch.no_grad()
def weights_of_tokens(model: VisionTransformer, tokens: Tensor) -> Tensor:
    """Share of each normed token [B, T, D] in the head's input: [B, T], sums to 1. The class token has all, or
    half beside a distillation token; patches share equally ("gap", or a model without labels), or by attention pooling
    ("map"), averaged over its heads."""
    batch, count, _ = tokens.shape
    pool = model.attn_pool
    weights = tokens.new_zeros(batch, count, dtype=torch.float32)
    if isinstance(pool, AttentionPoolLatent):
        packed = pool.kv(tokens[:, model.num_prefix_tokens :])
        keys = packed.unflatten(2, (2, pool.num_heads, pool.head_dim)).permute(2, 0, 3, 1, 4)[0]
        query = pool.q(pool.latent).reshape(1, pool.latent_len, pool.num_heads, pool.head_dim).transpose(1, 2)
        logits = (pool.scale * query) @ keys.transpose(-2, -1)
        weights[:, model.num_prefix_tokens :] = logits.float().softmax(dim=-1).mean(dim=(1, 2))
        return weights
    if isinstance(model, DistilledVit):
        weights[:, :2] = 0.5
    elif model.global_pool == "token" and not isinstance(model, MaskedPatchVit | MaskedAutoencoderVit):
        weights[:, 0] = 1.0
    else:
        weights[:, model.num_prefix_tokens :] = 1.0 / (count - model.num_prefix_tokens)
    return weights


class Rollout:
    """Attention rollout (Abnar & Zuidema, arXiv 2005.00928), as in the ViT paper's Figure 6 (appendix D).

    Multiplies the head-averaged attention A of all blocks. The paper does not mention residual connections; its authors
    (google-research/vision_transformer, issue 18) take 0.5 A + 0.5 I, as Abnar & Zuidema do. Layer norms and MLPs are
    ignored. Costs T x T numbers an image.
    """

    joint: Tensor | None = None  # [B, T, T]: share of each input token (column) in each output token

    def add(self, block: int, probabilities: Tensor) -> None:
        mixed = 0.5 * probabilities.mean(dim=1)
        mixed.diagonal(dim1=-2, dim2=-1).add_(0.5)
        self.joint = mixed if self.joint is None else mixed @ self.joint

    def to_patches(self, model: VisionTransformer, tokens: Tensor) -> Tensor:
        """[B, grid, grid]: share of each patch in the head's input; `tokens` are those of `look_at_attention`."""
        assert self.joint is not None, "no block was seen"
        shares = (weights_of_tokens(model, tokens)[:, None] @ self.joint)[:, 0, model.num_prefix_tokens :]
        grid = round(shares.shape[1] ** 0.5)
        return shares.unflatten(1, (grid, grid))


def patch_distances(grid: int, *, patch_size: float) -> Tensor:
    """Distances in pixels between patch centres of a square grid: float32 [grid^2, grid^2]."""
    place = torch.arange(grid, dtype=torch.float32)
    centres = torch.cartesian_prod(place, place)
    return patch_size * torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


class AttentionDistance:
    """Mean attention distance of each head (ViT paper, Figure 7 right, and appendix D; over 128 images there).

    Averages a query patch's distances in pixels to all patches, itself included, weighted by attention, then over
    queries and images. Weights are rescaled without the class token (else heads that attend to it look local).
    """

    def __init__(self, grid: int, *, patch_size: float) -> None:
        self._distances = patch_distances(grid, patch_size=patch_size)
        self._sums: list[Tensor] = []  # float64 [heads] for each block
        self.images = 0

    @property
    def of_uniform_attention(self) -> float:
        return self._distances.mean(dtype=torch.float64).item()

    def add(self, block: int, probabilities: Tensor) -> None:
        """Add a block's probabilities [B, heads, T, T] for the next images; start at block 0."""
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
    """Filters over channels, float32 [n, channels, side, side], in units of their own; 0 means no weight."""

    kind: Literal["components", "kernels"]  # principal components of a patch embedding, or a ResNet's kernels
    filters: Tensor
    shares: tuple[float, ...] = ()  # each component's share of the embedding's variance


@torch.no_grad()
def first_filters(model: VisionTransformer | BitResnet, *, most: int = PAPERS_COMPONENTS) -> FirstFilters:
    """At most `most` principal components of the patch embedding's D filters around their mean (float64, by variance,
    largest weight positive), or standardised kernels of a hybrid's or ResNet's root convolution."""
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
    """The patches' position embeddings, float32 [tables, N, D]; None for `none` and `relative` (offsets of pairs)."""
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
    """Cosine similarity of all pairs of patches' position embeddings: [..., N, D] -> [..., N, N], -1 to 1."""
    directions = nn.functional.normalize(positions, dim=-1)
    return directions @ directions.transpose(-2, -1)
