"""The names that a user may write about a model, and their meaning; torch-free, for recipes and plans.

To add one: its name here, and a loss in `LOSSES` and `model/loss.py`, a head in `head.py`, a pooling in `vit.py`, a
position embedding in `positions/embedding.py`, initial values in `init.py`, an export format in `formats/export.py`.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

LossKind = Literal["softmax", "sigmoid", "bce"]


@dataclass(frozen=True)
class LossFacts:
    """Properties of a loss; its formula is in `model/loss.py`."""

    takes_several_labels: bool  # per image
    smoothing_below: float  # from here on label_smoothing would reverse the targets
    output: str  # maps logits to probabilities, for MLflow's model


LOSSES: dict[LossKind, LossFacts] = {
    "softmax": LossFacts(takes_several_labels=False, smoothing_below=1.0, output="softmax"),
    "sigmoid": LossFacts(takes_several_labels=True, smoothing_below=0.5, output="sigmoid of each class"),
    "bce": LossFacts(takes_several_labels=True, smoothing_below=1.0, output="sigmoid of each class"),
}
HeadKind = Literal["mlp", "linear"]
SelfSupervised = Literal["masked_patch", "masked_autoencoder"]  # stages without labels, in the place of a head's kind
SELF_SUPERVISED: tuple[SelfSupervised, ...] = get_args(SelfSupervised)
Pool = Literal["cls", "gap", "map"]
PositionKind = Literal["learned_1d", "learned_2d", "relative", "sincos_2d", "none"]
PositionAt = Literal["stem", "every_layer", "every_layer_shared"]
ClassTokenPosition = Literal["learned", "none"]
ClassToken = Literal["pooled", "kept"]
DistillationToken = Literal["none", "learned"]
FinalNorm = Literal["tokens", "pooled"]
QkNorm = Literal["none", "per_head"]
Mlp = Literal["gelu", "swiglu", "swiglu_norm"]
Norm = Literal["layer", "rms"]
Rope = Literal["none", "axial", "mixed", "eva", "dinov3"]
Gelu = Literal["tanh", "erf"]
Interpolation = Literal["google", "timm"]
InitStyle = Literal["google", "timm", "big_vision", "mae"]
StochasticDepthRule = Literal["linear", "uniform"]
DropoutMasks = Literal["sample", "process"]
EvalProtocol = Literal["vit", "vit_exact", "big_vision", "big_vision_exact", "timm"]
ExportFormat = Literal["npz", "big_vision", "timm", "transformers", "torchvision", "onnx", "torch_export"]
EXPORT_ENDINGS: dict[ExportFormat, tuple[str, ...]] = {  # of file names; (): a folder
    "npz": (".npz",),
    "big_vision": (".npz",),
    "timm": (),
    "transformers": (),
    "torchvision": (".pth", ".pt"),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
}

COLOUR_CHANNELS, MOST_CHANNELS = 3, 16  # of an image: usual, and at most
COLOUR_LEVELS = 8  # per channel in masked patch prediction: 3 bits
COLOURS = tuple(f"r{red} g{green} b{blue}" for red, green, blue in product(range(COLOUR_LEVELS), repeat=3))
"""Class names of masked patch prediction; class 64 r + 8 g + b."""
PIXELS = ("pixels",)  # what a masked autoencoder gives, in the place of class names


def check_ending(out: Path, *, to: ExportFormat) -> None:
    """Raise ValueError if `out` lacks the format's ending; needs no model."""
    endings = EXPORT_ENDINGS[to]
    if endings and out.suffix not in endings:
        raise ValueError(f"{out}: the name of such a file must end in {' or '.join(endings)}")
