"""A model as it was found in somebody else's file, already under our names: what every reader returns.

Costs nothing. It is not yet what the user asked for: resolution and classes are still the file's (`surgery` changes
them), and nothing has been compared with a model of ours (`differences` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from model.config import ModelConfig
from model.head import HeadKind

if TYPE_CHECKING:
    from torch import Tensor

GOOGLE_MEAN = GOOGLE_STD = (0.5, 0.5, 0.5)  # pixels / 127.5 - 1: vision_transformer, big_vision, timm's augreg
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's and most of timm's


# Classes of the data sets on which Google trains with the sigmoid loss (big_vision, configs/vit_i21k.py, bit_i21k.py
# and proj/scaling_laws/train_vit_g.py; Scaling Vision Transformers, section 3): ImageNet-21k as TFDS has it, and JFT.
_SIGMOID_CLASSES = {21843: "ImageNet-21k", 18291: "JFT-300M", 29593: "JFT-3B"}

Loss = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Said:
    """What the user says of a file of weights, where no record of ours does; None: to be found out.

    Attributes:
        depth: that it has so few blocks on purpose.
        position: what adds positions, where it has no embeddings for them.
        loss: that its head was trained with.
    """

    depth: int | None = None
    position: Literal["sincos_2d", "none"] | None = None
    loss: Loss | None = None


NOTHING_SAID = Said()


@dataclass(frozen=True)
class Foreign:
    """A converted model.

    Attributes:
        format: what the file is, for messages: "Google's npz (vision_transformer)", "torchvision state dict".
        state: weights under our (timm's) names, float32 on the CPU unless the file's dtype differs.
        config: the trunk, as far as the file tells; what it does not tell is the format's usual (see `notes`).
        image_size: side in pixels of the images it was trained on.
        num_classes: outputs of the head; 0: it `headless`.
        head: its kind.
        class_names: name of each output; () where the file has none.
        mean, std: of its pixels.
        loss: as in `SavedModelMeta`; None: the file does not tell.
        eval_protocol, eval_crop_share: as in `SavedModelMeta`.
        headless: what is said of it where it comes without a head.
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
    loss: Loss | None = None
    eval_protocol: str = "vit"
    eval_crop_share: float | None = None
    headless: str = "has no head"
    notes: tuple[str, ...] = field(default=())

    def with_loss(self, said: Loss | None) -> Foreign:
        """The same with a loss: the user's word, the file's, or what is usual for so many classes (with a note)."""
        if said is not None or self.loss is not None or self.num_classes == 0:
            return replace(self, loss=said or self.loss)
        data = _SIGMOID_CLASSES.get(self.num_classes)
        loss: Loss = "sigmoid" if data else "softmax"
        why = f"as Google's on {data}, which have {self.num_classes:,} classes" if data else "as is usual"
        note = f"The file does not tell the loss of its head: taken as {loss}, {why}; --loss says otherwise."
        return replace(self, loss=loss, notes=(*self.notes, note))
