"""timm's VisionTransformer set to the semantics of Google's ViT.

What is set and why (the paper leaves most of it to google-research/vision_transformer, `models_vit.py`):
- GELU in its tanh form: flax's default. timm's, torchvision's and HF's default is the erf form.
- LayerNorm epsilon 1e-6: flax's default. torch's is 1e-5.
- class token first, then one learned 1-D position embedding added to all 1 + N; q, k, v and out have biases.
- dropout after that addition, after the attention's output projection, after the GELU and after the MLP;
  never on attention probabilities or on the pooled features.
- final LayerNorm over all tokens, then the class token is what the head sees.

timm's module names are kept, so a state dict with a linear head loads strictly into timm's own models.
`model.forward_features` and `model.forward_head` split features from logits; `model.set_grad_checkpointing()`
works. Building draws nothing from the global random generator and gives placeholder weights: call
`model.init.initialise` or load a state dict. It does not build hybrids, other position embeddings or other
poolings.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from model.config import ModelConfig
from model.head import MlpHead

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

HeadKind = Literal["mlp", "linear"]

LAYER_NORM_EPS = 1e-6  # flax.linen.LayerNorm's default


def build_vit(
    config: ModelConfig, *, image_size: int, num_classes: int, head: HeadKind, dropout: float = 0.0
) -> VisionTransformer:
    """Build the model for square RGB images: [B, 3, image_size, image_size] -> logits [B, num_classes].

    Args:
        config: the trunk.
        image_size: side of the images in pixels; a multiple of the patch size.
        num_classes: outputs of the head.
        head: "mlp" (pre-training: Linear, tanh, Linear) or "linear" (fine-tuning).
        dropout: rate at every site named above (ViT paper, Table 3: 0.1 for ImageNet pre-training, else 0).

    Raises:
        ValueError: an argument out of range, or an image size that is no multiple of the patch size.
    """
    from timm.models.vision_transformer import VisionTransformer

    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
    config.sizes.grid_size(image_size)

    # Layers fill themselves with random numbers when they are made. None of these survive, so they must not
    # move the caller's random stream either.
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(
            **timm_arguments(config, image_size=image_size),
            num_classes=num_classes,
            norm_layer=partial(nn.LayerNorm, eps=LAYER_NORM_EPS),
            pos_drop_rate=dropout,
            proj_drop_rate=dropout,
            weight_init="skip",
        )
        if head == "mlp":
            model.set_submodule("head", MlpHead(config.sizes.width, num_classes))
    assert model.pos_embed is not None and model.cls_token is not None
    nn.init.zeros_(model.pos_embed)  # timm leaves these two as uninitialised memory when it skips its own init
    nn.init.zeros_(model.cls_token)
    return model


def timm_arguments(config: ModelConfig, *, image_size: int) -> dict[str, Any]:
    """The arguments, all of them plain JSON values, with which timm builds this trunk; epsilon 1e-6 is timm's
    own default. Both `build_vit` and the `config.json` of a saved model (`model.saved`) are made from it."""
    sizes = config.sizes
    return {
        "img_size": image_size,
        "patch_size": sizes.patch_size,
        "embed_dim": sizes.width,
        "depth": sizes.depth,
        "num_heads": sizes.heads,
        "mlp_ratio": _mlp_ratio(sizes.width, sizes.mlp_dim),
        "qkv_bias": True,
        "class_token": True,
        "global_pool": "token",
        "act_layer": "gelu_tanh",
    }


def _mlp_ratio(width: int, mlp_dim: int) -> float:
    """The ratio r for which timm's int(width * r) is `mlp_dim`: the quotient may round to just below it."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)
