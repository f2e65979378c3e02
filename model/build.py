"""Build any model from its configuration (Vision Transformer, hybrid or pure ResNet), with placeholder weights."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from model.config import ModelConfig
from model.layers.regularisation import NO_REGULARISATION, Regularisation
from model.resnet.bit import BitResnet, build_resnet
from model.vit import build_vit
from model.vocabulary import HeadKind


def build_model(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    regularisation: Regularisation = NO_REGULARISATION,
) -> VisionTransformer | BitResnet:
    """Build the model for square RGB images: [B, 3, image_size, image_size] -> logits [B, num_classes].

    It has `head`, `num_classes`, `num_features`, `forward_features`, `forward_head` and `set_grad_checkpointing`;
    arguments and errors are those of `model.vit.build_vit`.
    """
    match config.kind:
        case "vit":
            build = build_vit
        case "resnet":
            build = build_resnet
    return build(config, image_size=image_size, num_classes=num_classes, head=head, regularisation=regularisation)
