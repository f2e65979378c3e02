"""A model as it was found in somebody else's file, already under our names: what every reader returns.

Costs nothing. It is not yet what the user asked for: resolution and classes are still the file's (`surgery` changes
them), and nothing has been compared with a model of ours (`differences` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model.config import ModelConfig
from model.head import HeadKind

if TYPE_CHECKING:
    from torch import Tensor

GOOGLE_MEAN = GOOGLE_STD = (0.5, 0.5, 0.5)  # pixels / 127.5 - 1: vision_transformer, big_vision, timm's augreg
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's and most of timm's


@dataclass(frozen=True)
class Foreign:
    """A converted model.

    Attributes:
        format: what the file is, for messages: "Google's npz (vision_transformer)", "torchvision state dict".
        state: weights under our (timm's) names, float32 on the CPU unless the file's dtype differs.
        config: the trunk, as far as the file tells; what it does not tell is the format's usual (see `notes`).
        image_size: side in pixels of the images it was trained on.
        num_classes: outputs of the head.
        head: its kind.
        class_names: name of each output; () where the file has none.
        mean, std: of its pixels.
        loss, eval_protocol, eval_crop_share: as in `SavedModelMeta`.
        notes: what was assumed or folded, a sentence each, for the user.
    """

    format: str
    state: dict[str, Tensor]
    config: ModelConfig
    image_size: int
    num_classes: int
    head: HeadKind
    class_names: tuple[str, ...] = ()
    mean: tuple[float, float, float] = GOOGLE_MEAN
    std: tuple[float, float, float] = GOOGLE_STD
    loss: str = "softmax"
    eval_protocol: str = "vit"
    eval_crop_share: float | None = None
    notes: tuple[str, ...] = field(default=())
