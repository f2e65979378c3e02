"""Small models of every kind that can be exported as a program, with random weights."""

import torch

from model.config import ModelConfig
from model.saved.model_folder import SavedModelMeta, build_described
from tests.model.comparing import randomise

SIZES = {"width": 32, "depth": 2, "heads": 4, "patch_size": 4}
MODELS = {
    "cls, mlp": (ModelConfig(**SIZES), 16, "mlp"),
    "gap, erf, sincos": (
        ModelConfig(**SIZES, pool="gap", gelu="erf", layer_norm_eps=1e-12, position="sincos_2d"),
        16,
        "linear",
    ),
    "map, layer scale, 2-D at every layer": (
        ModelConfig(**SIZES, pool="map", layer_scale=0.5, position="learned_2d", position_at="every_layer"),
        16,
        "linear",
    ),
    "shared by every layer": (ModelConfig(**SIZES, position_at="every_layer_shared"), 16, "linear"),
    "relative": (ModelConfig(**SIZES, position="relative"), 16, "linear"),
    "hybrid": (ModelConfig(**{**SIZES, "patch_size": 16}, resnet_layers=(1, 1, 2)), 32, "linear"),
    "resnet": (ModelConfig(resnet_layers=(1, 1)), 32, "linear"),
}


def described(config: ModelConfig, image_size: int, head: str) -> SavedModelMeta:
    names = tuple(f"class {i} \N{LATIN SMALL LETTER E WITH ACUTE}" for i in range(7))
    return SavedModelMeta(
        model=config,
        image_size=image_size,
        num_classes=7,
        class_names=names,
        head=head,
        mean=(0.4, 0.5, 0.6),
        eval_protocol="timm",
        eval_crop_share=0.8,
    )


def randomised(meta: SavedModelMeta) -> torch.nn.Module:
    """The model with every parameter drawn, the head and the norms' scales too."""
    return randomise(build_described(meta)).eval()
