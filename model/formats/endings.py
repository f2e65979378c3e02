"""The formats that a model can be exported to, and how their files end. Costs nothing: it is asked before all else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

ExportFormat = Literal["npz", "big_vision", "timm", "transformers", "torchvision", "onnx", "torch_export"]

_ENDINGS: dict[ExportFormat, tuple[str, ...]] = {
    "npz": (".npz",),
    "big_vision": (".npz",),
    "torchvision": (".pth", ".pt"),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
}


def check_ending(out: Path, *, to: ExportFormat) -> None:
    """Refuse a name by which nobody would know the format; needs no model, so it can be asked first.

    Raises:
        ValueError: `out` ends in something else than the files of the format.
    """
    endings = _ENDINGS.get(to)
    if endings and out.suffix not in endings:
        raise ValueError(f"{out}: the name of such a file must end in {' or '.join(endings)}")
