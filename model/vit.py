"""timm's VisionTransformer set to the semantics of Google's ViT.

What is set and why (the paper leaves most of it to google-research/vision_transformer, `models_vit.py`):
- GELU in its tanh form: flax's default. timm's, torchvision's and HF's default is the erf form.
- LayerNorm epsilon 1e-6: flax's default. torch's is 1e-5.
- class token first, then one learned 1-D position embedding added to all 1 + N (with class_token_position none to
  the N patches, as big_vision); q, k, v and out have biases.
- dropout after that addition, after the attention's output projection, after the GELU and after the MLP;
  never on attention probabilities or on the pooled features.
- final LayerNorm over all tokens, then the pooling: the class token or, without one, the mean of the normed tokens
  (timm's "avg" would pool first) or attention pooling.

timm's module names are kept, so a state dict with a linear head loads strictly into its own models; only positions that
it lacks (`model.positions`) are ours. Building draws no random numbers and gives placeholder weights.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from model.config import ModelConfig
from model.layers.activation_checkpointing import in_turn
from model.layers.dropout import by_sample
from model.layers.head import MlpHead
from model.layers.regularisation import NO_REGULARISATION, Regularisation
from model.positions.embedding import Position, make_position
from model.positions.relative_attention import relative_attention
from model.resnet.bit import stem_embedding
from model.vocabulary import HeadKind

_TIMM_POOL = {"cls": "token", "gap": "avg", "map": "map"}
_TIMM_GELU = {"tanh": "gelu_tanh", "erf": "gelu"}


class PatchProjection(nn.Conv2d):
    """A convolution of whole patches (stride = kernel) as the matrix product that it is, over the same weights.

    On a GPU this is one product, forwards and for the weights' gradient, whichever convolution cuDNN would have chosen.
    Equal to the convolution but for rounding.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Images [B, C, H, W] -> [B, D, H / side, W / side], a view of [B, patches, D]."""
        side = self.kernel_size[0]
        rows, columns = input.shape[2] // side, input.shape[3] // side
        patches = input.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
        tokens = functional.linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))

    def _get_name(self) -> str:  # in its description: what timm's files call it
        return "Conv2d"


class PositionedVit(VisionTransformer):
    """A VisionTransformer with a position embedding of our own, `position`, in place of timm's `pos_embed`."""

    position: Position

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_drop(self.position.at_stem(x))

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images [B, 3, S, S] -> normed tokens [B, T, D]."""
        assert attn_mask is None and not is_causal, "nobody here masks attention"
        return encode(self, self.patch_drop(self._pos_embed(self.patch_embed(x))))


def encode(model: VisionTransformer, tokens: Tensor) -> Tensor:
    """Embedded tokens [B, T, D] -> normed ones, through all blocks and the positions before them."""
    assert isinstance(model.blocks, nn.Sequential)
    for layer, block in enumerate(in_turn(model.blocks)):
        if isinstance(model, PositionedVit):
            tokens = model.position.before_block(tokens, layer=layer)
        tokens = block(tokens)
    return model.norm(tokens)


def build_vit(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    regularisation: Regularisation = NO_REGULARISATION,
) -> VisionTransformer:
    """Build the model for square RGB images: [B, 3, image_size, image_size] -> logits [B, num_classes].

    `config.kind` is "vit"; `head` is "mlp" (pre-training: Linear, tanh, Linear) or "linear" (fine-tuning).

    Raises:
        ValueError: an argument out of range, or an image size that is no multiple of the patch size.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    regularisation.check(config)
    sizes = config.sizes
    grid_size = config.grid_size(image_size)
    timms_own = config.position == "learned_1d" and config.position_at == "stem"
    num_prefix_tokens = int(config.pool == "cls")
    more: dict[str, Any] = {}
    if sizes.resnet_layers is not None:
        more["embed_layer"] = stem_embedding(config, image_size=image_size)
        more["patch_size"] = sizes.stem_patch_size
    if config.position == "relative":
        more["attn_layer"] = relative_attention(num_prefix_tokens + grid_size**2)

    # Layers draw random numbers when they are made; none survive, and the caller's stream must not move.
    with torch.random.fork_rng(devices=[]):
        model = (VisionTransformer if timms_own else PositionedVit)(
            **timm_arguments(config, image_size=image_size) | more,
            num_classes=num_classes,
            norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            pos_drop_rate=regularisation.dropout,
            proj_drop_rate=regularisation.dropout,
            drop_path_rate=regularisation.stochastic_depth,
            patch_drop_rate=regularisation.patch_dropout,
            weight_init="skip",
        )
        if sizes.resnet_layers is None:  # `__class__`: the parameters and their place stay
            model.patch_embed.proj.__class__ = PatchProjection
        if not timms_own:
            model.position = make_position(
                config, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens, depth=sizes.depth
            )
        if head == "mlp":
            model.set_submodule("head", MlpHead(sizes.width, num_classes))
    if regularisation.masks == "sample":
        by_sample(model)
    for parameter in (model.pos_embed, model.cls_token):  # timm leaves them as uninitialised memory
        if parameter is not None:
            nn.init.zeros_(parameter)
    return model


def set_patch_dropout(model: nn.Module, rate: float) -> None:
    """Drop this share of the patches from now on; `model` was built with patch dropout."""
    for module in model.modules():
        if isinstance(module, PatchDropout):
            module.prob = rate


def timm_arguments(config: ModelConfig, *, image_size: int) -> dict[str, Any]:
    """The arguments, plain JSON values, with which timm builds this trunk (without a ResNet stem, positions that timm
    knows); epsilon 1e-6 is its default. Both `build_vit` and `model.saved.model_folder`'s `config.json` use them."""
    sizes = config.sizes
    arguments = {
        "img_size": image_size,
        "patch_size": sizes.patch_size,
        "embed_dim": sizes.width,
        "depth": sizes.depth,
        "num_heads": sizes.heads,
        "mlp_ratio": _mlp_ratio(sizes.width, sizes.mlp_dim),
        "qkv_bias": True,
        "class_token": config.pool == "cls",
        "global_pool": _TIMM_POOL[config.pool],
        "act_layer": _TIMM_GELU[config.gelu],
    }
    if config.pool == "gap":
        arguments["fc_norm"] = False  # norm the tokens, then take their mean
    if config.class_token_position == "none":
        arguments["no_embed_class"] = True
    if config.layer_scale is not None:
        arguments["init_values"] = config.layer_scale
    if config.position != "learned_1d" or config.position_at != "stem":
        arguments["pos_embed"] = "none"
    return arguments


def _mlp_ratio(width: int, mlp_dim: int) -> float:
    """The ratio r for which timm's int(width * r) is `mlp_dim`: the quotient may round to just below it."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)
