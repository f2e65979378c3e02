"""Build any model: timm's VisionTransformer with the semantics of Google's ViT (hybrids too), or a pure ResNet.

The paper leaves most of these semantics to google-research/vision_transformer, `models_vit.py`:
- GELU in its tanh form, flax's default; timm, torchvision and transformers default to erf.
- LayerNorm epsilon 1e-6, flax's default; torch's is 1e-5.
- Class token first, then one learned 1-D position embedding added to all 1 + N tokens (with class_token_position none
  to the N patches, as big_vision); q, k, v and out have biases.
- Dropout after that addition, the attention's output projection, the GELU and the MLP; never on attention probabilities
  or pooled features.
- Final LayerNorm over all tokens, then pooling: class token, mean of the normed tokens (timm's "avg" pools first, as
  final_norm pooled) or attention pooling. The class token is the first, registers follow; mean and attention pooling
  read patches alone.
What came later (registers, RoPE, SwiGLU and others of `ModelConfig`) is as in timm; README.md has the table.

Module names are timm's, so a state dict with a linear head loads strictly into its own models; only positions that timm
lacks (`model.positions`) are ours. Building draws no random numbers and leaves placeholder weights.

Activation checkpointing recomputes every k-th block, counted from the first over a hybrid's stem and the Transformer or
over a ResNet; with k > 1 rarely the last one, as its activations are needed immediately. k = 1 costs a third more
arithmetic. Gradients, names and weights do not change.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from timm.layers import DropPath, PatchDropout, RmsNorm, SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardvit.model.config import NO_REGULARISATION, ModelConfig, Regularisation
from shardvit.model.layers.dropout import by_sample
from shardvit.model.layers.head import HeadPair, MlpHead, zero_pair
from shardvit.model.own.custom import build_custom
from shardvit.model.positions.embedding import (
    Position,
    RelativeAttention,
    add_learned,
    make_position,
    relative_attention,
)
from shardvit.model.positions.rotary import rotary_attention, turn_to
from shardvit.model.resnet import BitResnet, build_resnet, stem_embedding
from shardvit.model.vocabulary import COLOUR_CHANNELS, HeadKind, Interpolation, Norm

_TIMM_POOL = {"cls": "token", "gap": "avg", "map": "map"}
TIMM_GELU = {"tanh": "gelu_tanh", "erf": "gelu"}
_NORMS: dict[Norm, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RmsNorm}


class PatchProjection(nn.Conv2d):
    """Compute the patch embedding's convolution (stride = kernel) as one matrix product over the same weights, equal up
    to rounding. Avoids cuDNN's choice of algorithms, forward and for the weight gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """Images [B, C, H, W] -> [B, D, H / side, W / side], a view of [B, patches, D]."""
        side = self.kernel_size[0]
        rows, columns = input.shape[2] // side, input.shape[3] // side
        patches = input.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
        tokens = functional.linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))

    def _get_name(self) -> str:  # in `repr`, as in timm
        return "Conv2d"


class Vit(VisionTransformer):
    """timm's, which once `takes_other_sizes` interpolates `pos_embed` to the grid of the images at hand."""

    interpolation: Interpolation = "google"

    def _pos_embed(self, x: Tensor) -> Tensor:
        turn_to(self.blocks, patches=x.shape[1])
        if self.pos_embed is None or self.patch_embed.strict_img_size:
            return super()._pos_embed(x)
        others = [each.expand(len(x), -1, -1) for each in (self.cls_token, self.reg_token) if each is not None]
        number, without_row = self.num_prefix_tokens, self.no_embed_class
        tokens = add_learned(
            self.pos_embed,
            torch.cat([*others, x], dim=1),
            rows_of_prefix=0 if without_row else number,
            without_row=number if without_row else 0,
            kernel=self.interpolation,
        )
        return self.pos_drop(tokens)

    def _get_name(self) -> str:  # in `repr`, as in timm
        return "VisionTransformer"


def takes_other_sizes(model: nn.Module, *, interpolation: Interpolation) -> None:
    """Let a model of `build_model`, changed in place, take square images of other sizes that its patches divide. Its
    parameters stay those of its own size: learned positions are interpolated in the forward pass, differentiably, so
    that optimizer state, checkpoints and files never change shape; rotations follow. ValueError if its positions are
    relative."""
    if isinstance(model, Vit):
        if any(isinstance(module, RelativeAttention) for module in model.modules()):
            raise ValueError("relative positions are undefined at another resolution than the model's")
        model.patch_embed.strict_img_size = False
        model.interpolation = interpolation


class PositionedVit(Vit):
    """A VisionTransformer with our own position embedding, `position`, instead of timm's `pos_embed`."""

    position: Position

    def _pos_embed(self, x: Tensor) -> Tensor:
        turn_to(self.blocks, patches=x.shape[1])
        prefix = [each.expand(x.shape[0], -1, -1) for each in (self.cls_token, self.reg_token) if each is not None]
        return self.pos_drop(self.position.at_stem(torch.cat([*prefix, x], dim=1) if prefix else x))

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        assert attn_mask is None and not is_causal, "nobody here masks attention"
        return encode(self, self.patch_drop(self._pos_embed(self.patch_embed(x))))


class DistilledVit(Vit):
    """A model with a class and a distillation token, `dist_token` [1, 1, D], and a `HeadPair`: the logits are the mean
    of both heads' (DeiT, section 4); in training with `teaches_both` a pair, [B, classes] each."""

    dist_token: nn.Parameter
    teaches_both: bool

    @property
    def reg_token(self) -> Tensor:
        return self.dist_token  # as a register, it comes behind the class token and may have a position

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        of_labels, of_teacher = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits:
            return (of_labels + of_teacher) / 2
        logits, others = self.head(of_labels), cast(HeadPair, self.head).dist(of_teacher)
        return (logits, others) if self.training and self.teaches_both else (logits + others) / 2


def _distilled(model: Vit, *, num_classes: int) -> None:
    """Convert a model with one register in place."""
    model.set_submodule("head", zero_pair(model.num_features, num_classes))
    token = model._parameters.pop("reg_token")
    kind = type(model)
    model.__class__ = (
        DistilledVit if kind is Vit else type("DistilledVit", (DistilledVit, kind), {"__module__": __name__})
    )
    distilled = cast(DistilledVit, model)
    distilled.register_parameter("dist_token", token)
    distilled.teaches_both = False


def encode(model: VisionTransformer, tokens: Tensor) -> Tensor:
    """Run all blocks, with their positions, and the final norm on embedded tokens [B, T, D]."""
    assert isinstance(model.blocks, nn.Sequential)
    for layer, block in enumerate(in_turn(model.blocks)):
        if isinstance(model, PositionedVit):
            tokens = model.position.before_block(tokens, layer=layer)
        tokens = block(tokens)
    return model.norm(tokens)


def build_model(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    regularisation: Regularisation = NO_REGULARISATION,
    seed: int = 0,
) -> VisionTransformer | BitResnet:
    """Build the model for square images: [B, channels, image_size, image_size] -> logits [B, num_classes].

    It has `head`, `num_classes`, `num_features`, `forward_features`, `forward_head` and `set_grad_checkpointing`.
    `head`: "mlp" for pre-training, "linear" for fine-tuning. ValueError if an argument is out of range, the image size
    does not fit the patch size or the ResNet's stride, or a pure ResNet gets regularisation. An own model has its own
    head and its own initial weights by `seed`; only what `OwnModel` says of the rest.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    regularisation.check(config)
    config.grid_size(image_size)
    if config.custom is not None:
        return cast(BitResnet, build_custom(config, image_size=image_size, num_classes=num_classes, seed=seed))
    # Layers draw random numbers on creation; none survive, and the caller's stream must not move.
    with torch.random.fork_rng(devices=[]):
        if config.kind == "resnet":
            model = build_resnet(config.resnet, num_classes=num_classes, channels=config.channels)
        else:
            model = _build_vit(config, image_size=image_size, num_classes=num_classes, regularisation=regularisation)
        if head == "mlp":
            model.set_submodule("head", MlpHead(config.num_features, num_classes))
    if regularisation.masks == "sample":
        by_sample(model)
    return model


def _build_vit(
    config: ModelConfig, *, image_size: int, num_classes: int, regularisation: Regularisation
) -> VisionTransformer:
    sizes, grid_size = config.sizes, config.grid_size(image_size)
    timms_own = config.position == "learned_1d" and config.position_at == "stem"
    more: dict[str, Any] = {"norm_layer": partial(_NORMS[config.norm], eps=config.layer_norm_eps)}
    if sizes.resnet_layers is not None:
        more |= {"embed_layer": stem_embedding(config, image_size=image_size), "patch_size": sizes.stem_patch_size}
    if config.position == "relative":
        more["attn_layer"] = relative_attention(config.prefix_tokens + grid_size**2)
    if config.rope != "none":
        more["attn_layer"] = rotary_attention(config, grid_size=grid_size)
    if config.mlp != "gelu":
        more["mlp_layer"] = SwiGLUPacked
    model = (Vit if timms_own else PositionedVit)(
        **timm_arguments(config, image_size=image_size) | more,
        num_classes=num_classes,
        pos_drop_rate=regularisation.dropout,
        proj_drop_rate=regularisation.dropout,
        drop_path_rate=regularisation.stochastic_depth,
        patch_drop_rate=regularisation.patch_dropout,
        weight_init="skip",
    )
    if regularisation.depth_rule == "uniform" and regularisation.stochastic_depth:
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = (DropPath(regularisation.stochastic_depth) for _ in range(2))
    if sizes.resnet_layers is None:  # `__class__`: the parameters and their place stay
        model.patch_embed.proj.__class__ = PatchProjection
    if isinstance(model, PositionedVit):
        model.position = make_position(config, grid_size=grid_size, depth=sizes.depth)
    for parameter in (model.pos_embed, model.cls_token, model.reg_token):  # timm leaves them uninitialised
        if parameter is not None:
            nn.init.zeros_(parameter)
    if config.distillation_token == "learned":
        _distilled(model, num_classes=num_classes)
    return model


def set_patch_dropout(model: nn.Module, rate: float) -> None:
    """Change the rate of a model built with patch dropout."""
    for module in model.modules():
        if isinstance(module, PatchDropout):
            module.prob = rate


def timm_arguments(config: ModelConfig, *, image_size: int) -> dict[str, Any]:
    """Plain JSON arguments with which timm's VisionTransformer builds this trunk, except a ResNet stem, positions that
    it lacks, SwiGLU's `mlp_layer` and the norm's epsilon."""
    sizes, gated = config.sizes, config.mlp != "gelu"
    arguments = {
        "img_size": image_size,
        "patch_size": sizes.patch_size,
        "embed_dim": sizes.width,
        "depth": sizes.depth,
        "num_heads": sizes.heads,
        "mlp_ratio": mlp_ratio(sizes.width, sizes.mlp_dim * (2 if gated else 1)),  # timm's counts gates too
        "qkv_bias": True,
        "class_token": config.has_class_token,
        "global_pool": _TIMM_POOL[config.pool],
        "act_layer": "silu" if gated else TIMM_GELU[config.gelu],
    }
    if config.channels != COLOUR_CHANNELS:
        arguments["in_chans"] = config.channels
    if config.pool == "gap":
        arguments["fc_norm"] = config.final_norm == "pooled"
    if config.class_token_position == "none":
        arguments["no_embed_class"] = True
    if config.layer_scale is not None:
        arguments["init_values"] = config.layer_scale
    if config.position != "learned_1d" or config.position_at != "stem":
        arguments["pos_embed"] = "none"
    if tokens := config.prefix_tokens - config.has_class_token:
        arguments["reg_tokens"] = tokens
    if config.qk_norm == "per_head":
        arguments["qk_norm"] = True
    if config.mlp == "swiglu_norm":
        arguments["scale_mlp_norm"] = True
    if config.norm == "rms":
        arguments["norm_layer"] = "rmsnorm"
    return arguments


def mlp_ratio(width: int, mlp_dim: int) -> float:
    """Return r with timm's int(width * r) == mlp_dim; the quotient may round to just below it."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)


class CheckpointedBlocks(nn.Sequential):
    """A Sequential, converted in place, that recomputes some blocks."""

    recomputed: frozenset[int]  # block numbers

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for block in in_turn(self):
            x = block(x)
        return x


def checkpoint_blocks(model: nn.Module, *, every: int) -> None:
    """Recompute every `every`-th block in the backward pass; 0: none."""
    number = 0
    for name, blocks in model.named_modules():
        if name.split(".")[-1] == "blocks":
            assert isinstance(blocks, nn.Sequential)
            blocks.__class__ = CheckpointedBlocks if every else nn.Sequential
            if isinstance(blocks, CheckpointedBlocks):
                blocks.recomputed = frozenset(own for own in range(len(blocks)) if (number + own) % every == 0)
            number += len(blocks)


def in_turn(blocks: nn.Sequential) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield each block as a callable, checkpointed where it is recomputed."""
    recomputed = blocks.recomputed if isinstance(blocks, CheckpointedBlocks) else ()
    for number, block in enumerate(blocks):
        yield partial(checkpoint, block, use_reentrant=False) if number in recomputed else block
