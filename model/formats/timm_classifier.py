"""Build timm's classifiers of any architecture (RegNets, ConvNeXts, ...) from a folder, as teachers alone.

timm's own code builds the architecture that `config.json` names, with its number of classes and kind of pooling alone,
so no further file is read and nothing of the folder is run. Costs the weights twice while they are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.model.formats.weights_file import load_folder_weights
from shardvit.model.saved.model_folder import CONFIG_FILE, RECORD_KEY, read_json
from shardvit.model.saved.state_shapes import describe_differences, shapes_of

if TYPE_CHECKING:
    from torch import nn

_MOST_CLASSES = 10**6


@dataclass(frozen=True)
class TimmClassifier:
    """A model of timm's for square images of its own size."""

    model: nn.Module  # float32, on the CPU: [n, 3, image_size, image_size] -> [n, num_classes]
    image_size: int
    num_classes: int
    class_names: tuple[str, ...]  # () if the folder has none
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    forward_flops: int  # per image, by torch's counter


def is_other_timm(folder: Path) -> bool:
    """True for a timm folder of another architecture than its VisionTransformer, which `timm_state` reads."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    content = read_json(path)
    architecture = content.get("architecture")
    if RECORD_KEY in content or not isinstance(architecture, str):
        return False
    import timm

    if not timm.is_model(architecture):
        return False  # the reader of timm's folders says so
    return timm.model_entrypoint(architecture).__module__ not in _OURS


def read_other_timm(folder: Path) -> TimmClassifier:
    """Build and load it; ValueError if it takes other arguments, or weights or images do not fit."""
    import timm
    import torch
    from timm.data.config import resolve_data_config
    from torch.utils.flop_counter import FlopCounterMode

    content = read_json(folder / CONFIG_FILE)
    architecture, classes = content["architecture"], content.get("num_classes")
    if type(classes) is not int or not 1 <= classes <= _MOST_CLASSES:
        raise ValueError(f"{folder}: config.json says num_classes {classes!r}: give a classifier")
    arguments = {"num_classes": classes, **(content.get("model_args") or {})}
    usual = {"num_classes": classes, "in_chans": 3, "global_pool": content.get("global_pool")}
    if unknown := [name for name, each in arguments.items() if name not in usual or each != usual[name]]:
        raise ValueError(
            f"{folder}: config.json has the model_args {', '.join(unknown)}, which are for VisionTransformers alone"
        )
    if not isinstance(arguments.get("global_pool", ""), str):
        raise ValueError(f"{folder}: config.json says global_pool {arguments['global_pool']!r}, which is no name")

    def build() -> Any:
        try:
            return timm.create_model(architecture, pretrained=False, **arguments)
        except (RuntimeError, TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
            raise ValueError(f"{folder}: timm cannot build {architecture}: {error}") from error

    state = load_folder_weights(folder)
    with torch.device("meta"):  # no memory before names and shapes are compared
        empty = build()
    if differences := describe_differences(shapes_of(state), shapes_of(empty.state_dict())):
        raise ValueError(f"{folder}: the weights are not those of timm's {architecture}:\n{differences}")
    with torch.random.fork_rng(devices=[]):
        model = build()
    model.load_state_dict(state)
    own = content.get("pretrained_cfg")
    data = resolve_data_config(pretrained_cfg=dict(model.pretrained_cfg) | (own if isinstance(own, dict) else {}))
    channels, height, width = data["input_size"]
    if channels != 3 or height != width:
        raise ValueError(f"{folder} takes inputs of {data['input_size']}: only square RGB images can be given")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        empty.eval()(torch.empty(1, 3, height, width, device="meta"))
    names = content.get("label_names") or ()
    return TimmClassifier(
        model=model,
        image_size=height,
        num_classes=classes,
        class_names=tuple(map(str, names)) if len(names) == classes else (),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        forward_flops=counter.get_total_flops(),
    )


_OURS = ("timm.models.vision_transformer", "timm.models.deit", "timm.models.eva")
