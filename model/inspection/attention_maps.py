"""Attention probabilities of a Transformer's blocks, and what they say of all blocks together: rollout and distance.

Fused kernels never hold probabilities, so they are computed again, in float32, from the queries and keys that pass
through each block's `qkv`, relative positions included. The model is not changed: it runs its own forward pass, hooked
for as long as that takes, and its features stay bit for bit. Block by block: heads x T x T numbers an image are held
for one block at a time. Costs, beside the forward pass, the products of queries and keys once more.

It is for models in evaluation mode, on any device; a pure ResNet attends to nothing. A masked patch model is shown
whole images.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from timm.layers import AttentionPoolLatent
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from model.masked_patch import MaskedPatchVit
from model.positions.relative_attention import RelativeAttention, by_key

SeeBlock = Callable[[int, Tensor], None]


@torch.no_grad()
def look_at_attention(model: VisionTransformer, images: Tensor, *, see: SeeBlock) -> Tensor:
    """Run a forward pass and call `see(block, probabilities)` for each block in order; returns the normed tokens.

    Args:
        model: one of `model.vit` or `model.masked_patch`, in evaluation mode (ValueError: it is in training mode).
        images: normalised, [B, 3, S, S].
        see: gets the block's number and its probabilities, float32 [B, heads, T, T], whose last axis (keys) sums to 1;
            tokens before the patches (the class token) come first. They are its own: it may change them in place.
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

    The class token all; or, of patches, equal shares (the mean, "gap"), or those that attention pooling ("map") gives
    them, mean over its heads. A masked patch model has no pooling: equal shares.
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
    """Attention rollout (Abnar & Zuidema, arXiv 2005.00928), as the ViT paper has it for its Figure 6 (appendix D).

    The mean over heads of each block's attention A is multiplied onto that of the blocks before it. The paper does not
    mention the residual connections; its authors (google-research/vision_transformer, issue 18) add the identity and
    make rows sum to 1 again, as Abnar & Zuidema do, which is 0.5 A + 0.5 I. Layer norms and MLPs are left out.
    Give `add` to `look_at_attention` as `see`, or call it there. Costs T x T numbers an image.
    """

    joint: Tensor | None = None  # [B, T, T]: how much of each input token is in each output token; rows sum to 1

    def add(self, block: int, probabilities: Tensor) -> None:
        """Multiply the next block's probabilities [B, heads, T, T] on."""
        mixed = 0.5 * probabilities.mean(dim=1)
        mixed.diagonal(dim1=-2, dim2=-1).add_(0.5)
        self.joint = mixed if self.joint is None else mixed @ self.joint

    def to_patches(self, model: VisionTransformer, tokens: Tensor) -> Tensor:
        """Share of each patch in what the head sees: [B, grid, grid], without the class token's own.

        `tokens`: what `look_at_attention` returned. Attention pooling has no residual connection, so its shares are
        multiplied on as they are.
        """
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
    """Mean attention distance of each head (ViT paper, Figure 7 right, and the like of it in appendix D).

    For a query patch: the mean of its distances in pixels to all patches, itself included, weighted by its attention;
    then the mean over queries and images. The class token is neither query nor key: what a query gives to it is left
    out, and its weights on patches count as if they summed to 1 (else a head that looks at the class token would look
    near-sighted). The paper's own figure has 128 images.
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
