"""Parameters, FLOPs and activation memory of a model per image, by formula and without torch.

Parameters and FLOPs equal the modules' and torch's FlopCounterMode's exactly (tests/oracles/test_flop_counter.py). A
training step multiplies each weight three times: forward, for the weight's gradient and for the input's (not in the
first convolution). Recomputation is not counted.

Activation bytes are those autograd keeps of one image, in bf16, with fused attention, without dropout: images, all
layers' inputs, statistics of norms and attention; 32 * tokens * width for a usual block. Not included: weights,
gradients, optimizer state, loss, dropout masks, kernel workspace.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardvit.model.config import DecoderConfig, ModelConfig, Regularisation, kept_patches
from shardvit.model.counting.cost import (
    NOTHING,
    Chain,
    Cost,
    convolution,
    fused_attention,
    learned,
    linear,
    norm,
    resnet_cost,
    saved,
    stem_cost,
)
from shardvit.model.variants import VitSizes
from shardvit.model.vocabulary import HeadKind

_PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class Accounting:
    """Cost of one model at one image size."""

    parameters: int  # head included
    forward_flops: int  # per image
    training_flops: int  # forward and backward
    tokens: int  # seen by the blocks, class token included; 0 in a pure ResNet
    activation_bytes: int  # kept per image until its backward pass
    checkpointed_activation_bytes: (
        int  # with checkpointing: recomputed blocks' inputs, all activations of the others and of one
    )

    def describe(self, activations: Literal["all", "checkpointed"] = "all", *, precision: str = "bf16") -> str:
        """One line with four significant digits, for the `activations` kept in `precision`."""
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        kept_bytes, which = self.activation_bytes, "activations"
        if activations == "checkpointed":
            kept_bytes, which = self.checkpointed_activation_bytes, "checkpointed activations"
        return (
            f"{_short(self.parameters)} parameters, {_short(self.forward_flops)}FLOP forward and "
            f"{_short(self.training_flops)}FLOP training per image{tokens}, {_short(kept_bytes)}B {which} per image "
            f"in {precision}"
        )


def account(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    patch_dropout: float = 0.0,
    checkpointed_every: int = 1,
) -> Accounting:
    """Cost per image of `build_model` with these arguments and training's `patch_dropout`, recomputing every
    `checkpointed_every`-th block in the checkpointed figure. ValueError for arguments that the model would refuse."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    Regularisation(patch_dropout=patch_dropout).check(config)
    config.grid_size(image_size)
    if config.custom is not None:
        from shardvit.model.own.custom import measure

        parameters, flops, kept_bytes = measure(config, image_size=image_size, num_classes=num_classes)
        return Accounting(parameters, flops, 3 * flops, 0, kept_bytes, kept_bytes)
    logits = _head(config.num_features, num_classes=num_classes, head=head)
    if config.kind == "resnet":
        resnet = resnet_cost(config.resnet, image_size=image_size, image_channels=config.channels)
        ends = resnet.ends + logits
        return _accounting(resnet.units, ends=ends, first=resnet.first, tokens=0, every=checkpointed_every)

    sizes = config.sizes
    patches = config.grid_size(image_size) ** 2
    prefix = config.prefix_tokens
    tokens = prefix + kept_patches(patches, mask_ratio=patch_dropout)
    embedding, first, chain = _embedding(config, image_size=image_size)
    ends = (
        embedding
        + learned(prefix * sizes.width)  # class token, registers and distillation token
        + learned(_position_parameters(config, patches=patches))
        + norm(1 if config.final_norm == "pooled" else tokens, sizes.width, kind=config.norm)
        + _pooling(config, tokens=tokens)
        + logits
        + (logits if config.distillation_token == "learned" else NOTHING)
    )
    chain = chain.then(_block(config, tokens=tokens), input_elements=tokens * sizes.width, times=sizes.depth)
    return _accounting(chain, ends=ends, first=first, tokens=tokens, every=checkpointed_every)


def account_autoencoder(
    config: ModelConfig, *, image_size: int, decoder: DecoderConfig, mask_ratio: float, checkpointed_every: int = 1
) -> Accounting:
    """Cost per image of `build_masked_autoencoder` in training; `tokens` are the encoder's."""
    sizes, patches = config.sizes, config.grid_size(image_size) ** 2
    prefix, kept = config.prefix_tokens, kept_patches(patches, mask_ratio=mask_ratio)
    tokens, every, hidden = prefix + kept, prefix + patches, patches - kept
    own = ModelConfig(width=decoder.width, depth=decoder.depth, heads=decoder.heads, patch_size=sizes.patch_size)
    embedding, first, chain = _embedding(config, image_size=image_size)
    ends = (
        embedding
        + learned(prefix * sizes.width)
        + norm(tokens, sizes.width, kind=config.norm)
        + linear(tokens, sizes.width, decoder.width)
        + learned(decoder.width)
        + norm(hidden, decoder.width, kind="layer")
        + linear(hidden, decoder.width, config.channels * sizes.patch_size**2)
    )
    chain = chain.then(_block(config, tokens=tokens), input_elements=tokens * sizes.width, times=sizes.depth)
    chain = chain.then(_block(own, tokens=every), input_elements=every * decoder.width, times=decoder.depth)
    return _accounting(chain, ends=ends, first=first, tokens=tokens, every=checkpointed_every)


def _embedding(config: ModelConfig, *, image_size: int) -> tuple[Cost, Cost, Chain]:
    """Cost of all before the tokens, that of its first convolution, and a hybrid's units."""
    sizes = config.sizes
    if sizes.resnet_layers is None:
        first = _patch_embedding(image_size, config.channels, sizes)
        return first, first, Chain()
    stem = stem_cost(
        sizes.resnet_layers,
        width_factor=sizes.resnet_width_factor,
        image_size=image_size,
        image_channels=config.channels,
    )
    return stem.ends + _patch_embedding(stem.size, stem.channels, sizes), stem.first, stem.units


def _accounting(chain: Chain, *, ends: Cost, first: Cost, tokens: int, every: int) -> Accounting:
    total = ends + chain.cost
    return Accounting(
        parameters=total.parameters,
        forward_flops=total.flops,
        training_flops=3 * total.flops - first.flops,
        tokens=tokens,
        activation_bytes=total.saved_bytes,
        checkpointed_activation_bytes=ends.saved_bytes + chain.checkpointed_bytes(every=every),
    )


def _patch_embedding(size: int, channels: int, sizes: VitSizes) -> Cost:
    """[channels, size, size], pixels or the stem's features, to tokens."""
    patch_size = sizes.stem_patch_size
    return convolution(size, channels, sizes.width, kernel=patch_size, stride=patch_size, bias=True)


def _block(config: ModelConfig, *, tokens: int) -> Cost:
    """Attention and MLP, each behind a norm; a sum keeps nothing."""
    sizes = config.sizes
    width = sizes.width
    scale = learned(width) + saved(tokens * width) if config.layer_scale is not None else NOTHING
    return (
        norm(tokens, width, kind=config.norm)
        + linear(tokens, width, 3 * width)
        + fused_attention(tokens, tokens, width=width, heads=sizes.heads)
        + (_relative(sizes, tokens=tokens) if config.position == "relative" else NOTHING)
        + _of_queries_and_keys(config, tokens=tokens)
        + linear(tokens, width, width)
        + scale
        + norm(tokens, width, kind=config.norm)
        + (_mlp(tokens, sizes.width, sizes.mlp_dim) if config.mlp == "gelu" else _swiglu(config, tokens=tokens))
        + scale
    )


def _mlp(rows: int, width: int, hidden: int) -> Cost:
    return linear(rows, width, hidden) + saved(rows * hidden) + linear(rows, hidden, width)


def _swiglu(config: ModelConfig, *, tokens: int) -> Cost:
    """One layer makes gate and value; both are kept, and the activated gate."""
    width, hidden = config.sizes.width, config.sizes.mlp_dim
    kept = saved(3 * tokens * hidden)
    inner = norm(tokens, hidden, kind=config.norm) if config.mlp == "swiglu_norm" else NOTHING
    return linear(tokens, width, 2 * hidden) + kept + inner + linear(tokens, hidden, width)


def _of_queries_and_keys(config: ModelConfig, *, tokens: int) -> Cost:
    """Norms of each head, then rotations: attention keeps q and k besides what `qkv` made, and its output twice, as its
    layout is theirs; learned rotations keep what they turn."""
    width, is_normed, turns = config.sizes.width, config.qk_norm == "per_head", config.rope != "none"
    normed = norm(tokens, width, kind=config.norm, groups=config.sizes.heads).times(2) if is_normed else NOTHING
    copies = (1 if is_normed else 3) if turns else is_normed
    if config.rope != "mixed":
        return normed + saved(copies * tokens * width)
    return normed + saved((copies + (4 if is_normed else 2)) * tokens * width) + learned(width)


def _relative(sizes: VitSizes, *, tokens: int) -> Cost:
    """Relative positions: a table of offsets, queries times it, a bias per pair. Keeps the queries once more, and the
    bias in rows of a multiple of 8, for torch's memory-efficient kernel."""
    offsets = 2 * tokens - 1
    bias = saved(tokens * sizes.width + sizes.heads * tokens * (tokens + -tokens % 8))
    return Cost(parameters=offsets * (sizes.width // sizes.heads), flops=2 * tokens * offsets * sizes.width) + bias


def _position_parameters(config: ModelConfig, *, patches: int) -> int:
    """Without relative positions, which belong to the blocks."""
    sizes = config.sizes
    prefix = config.prefix_rows
    match config.position:
        case "learned_1d":  # one row for each token that has one
            once = (prefix + patches) * sizes.width
        case "learned_2d":  # half the width from the row, half from the column
            once = prefix * sizes.width + 2 * math.isqrt(patches) * (sizes.width // 2)
        case "relative" | "sincos_2d" | "none":
            once = 0
    return once * (sizes.depth if config.position_at == "every_layer" else 1)


def _pooling(config: ModelConfig, *, tokens: int) -> Cost:
    """Normed tokens to the head's input, with the part that the head's first layer keeps."""
    sizes = config.sizes
    width = sizes.width
    match config.pool:
        case "cls":  # a view, which keeps all normed tokens
            return saved((tokens - 1) * width)
        case "gap":  # a sum keeps nothing
            return NOTHING
        case "map":
            patches = tokens - config.prefix_tokens
            hidden = sizes.mlp_dim * (1 if config.mlp == "gelu" else 2)  # timm's, of SwiGLU's ratio but without gates
            return (
                learned(width)  # the one query
                + linear(1, width, width)
                + linear(patches, width, 2 * width)
                + fused_attention(1, patches, width=width, heads=sizes.heads)
                + linear(1, width, width)
                + norm(1, width, kind=config.norm)
                + _mlp(1, width, hidden)
            )


def _head(width: int, *, num_classes: int, head: HeadKind) -> Cost:
    last = linear(1, width, num_classes)
    match head:
        case "linear":
            return last
        case "mlp":  # tanh keeps its output, which the last layer keeps too
            return linear(1, width, width) + last


def _short(number: int) -> str:
    """86567656 as "86.57 M"."""
    for size, prefix in _PREFIXES:
        if number >= size:
            return f"{number / size:#.4g} {prefix}"
    return f"{number} "
