"""`shardvit.create_model`: a network by name, with initial weights or somebody's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.launch.api.options import PathLike
from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.saved.model_folder import first_mistake
from shardvit.model.variants import ResnetSizes, VitSizes
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.using.find_model import find_model, fitted_state

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

    from shardvit.model.resnet import BitResnet

_CLASSES, _IMAGE_SIZE = 1000, 224


def create_model(
    model: str | Mapping[str, Any] | None = None,
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
    weights: PathLike | None = None,
    head: HeadKind | None = None,
    seed: int = 0,
) -> VisionTransformer | BitResnet:
    """Build a network: images [B, 3, S, S] -> logits [B, classes], in training mode, with timm's parameter names.

    Args:
        model: a variant such as "L/16" or "R50+B/16", or the keys of a recipe's `model`; None: that of `weights`.
        num_classes: None: the weights', or 1000.
        image_size: S, in pixels; None: the weights', or 224.
        weights: what `shardvit predict` takes: a run, stage, checkpoint, or file of any format. Positions are
            interpolated to S; the head is kept if neither its kind nor its classes are to change. None: initial ones.
        head: "linear", or "mlp" as in the paper's pre-training; None: the kept one's, or linear.
        seed: of initial weights; the last layer begins at zero.

    Returns:
        timm's VisionTransformer (for a pure ResNet a ResNetV2), on the CPU.

    Raises:
        UserError: there is no such model, or the weights are another one's.

    Example:
        net = shardvit.create_model("S/16", num_classes=10, image_size=64)
    """
    found = None if weights is None else find_model(Path(weights))
    meta = found and found.meta
    try:
        config = None if meta is None else meta.model
        if model is not None:
            asked = ModelConfig.model_validate({"variant": model} if isinstance(model, str) else dict(model))
            if meta is not None and _sizes(asked) != _sizes(meta.model):
                raise UserError(f"{weights} is another model, of {_sizes(meta.model)}: leave the model out to take it")
            config = config or asked
        if config is None:
            raise UserError("give a variant such as 'L/16', or weights")
        size = image_size or (meta.image_size if meta else _IMAGE_SIZE)
        classes = num_classes or (meta.num_classes if meta else _CLASSES)
        kind: HeadKind = head or "linear"
        if head is None and meta and meta.num_classes == classes and meta.has_classes:
            kind = meta.class_head
        network = build_model(config, image_size=size, num_classes=classes, head=kind)
        initialise(network, seed=seed)
        if found is not None:
            network.load_state_dict(fitted_state(found, image_size=size, into=network.state_dict()))
    except ValidationError as error:
        raise UserError(f"create_model: {first_mistake(error)}") from None
    except ValueError as error:
        raise UserError(f"create_model: {error}") from None
    return network


def _sizes(config: ModelConfig) -> VitSizes | ResnetSizes:
    return config.sizes if config.kind == "vit" else config.resnet
