"""ONNX: a model as a graph of standard operators, of any batch size, with our record inside.

Needs the extra `onnx`. Writing takes some seconds and two copies of the weights in memory. Weights beyond 1.5 GB (H/14,
not L/16) go to NAME.onnx.data (a protobuf message ends at 2 GB). No half precision, no quantisation. Reading executes
only ONNX's standard operators, on the CPU.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.saved.atomic import replaced_file
from model.saved.model_folder import RECORD_KEY, SavedModelMeta
from model.saved.side_record import parse_inside

if TYPE_CHECKING:
    from torch import Tensor, nn

ENDING = ".onnx"
INPUT, OUTPUT = "images", "logits"


def write_onnx(path: Path, model: nn.Module, *, meta: SavedModelMeta) -> None:
    """Export `model`, which `meta` describes, in evaluation mode; an earlier file at `path` is replaced.

    The file takes "images", float32 [batch, 3, S, S], normalised with the record's mean and std, and gives "logits",
    float32 [batch, classes]; the record is JSON in the metadata's "shardvit". Raises ValueError without the packages.
    """
    import torch

    _require("onnx", "onnxscript")
    assert not model.training, "a model in training mode would be exported with its dropout"
    example = torch.zeros(2, 3, meta.image_size, meta.image_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            verbose=False,
        )
        assert program is not None
        _protect_zeros_before_pools(program.model)
        program.model.metadata_props[RECORD_KEY] = meta.model_dump_json(exclude_none=True)
        with replaced_file(path) as beside:
            program.save(beside)


@dataclass(frozen=True)
class OnnxModel:
    """A file that `write_onnx` wrote, ready to run."""

    meta: SavedModelMeta
    session: Any  # onnxruntime.InferenceSession

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images, float32 [B, 3, S, S] on the CPU -> logits [B, classes]."""
        import torch

        return torch.from_numpy(self.session.run([OUTPUT], {INPUT: images.numpy()})[0])


def open_onnx(path: Path) -> OnnxModel:
    """Load a file that `write_onnx` wrote; it runs on the CPU, in as many threads as torch would take. Raises
    ValueError if a package is missing, the file cannot be read, or has no record."""
    _require("onnxruntime")
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    # By default it pins threads to cores that a container may not own, and complains on stderr.
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its exceptions have no class in common, nor public names
        raise ValueError(f"{path} cannot be read as ONNX: {error}") from None
    record = session.get_modelmeta().custom_metadata_map.get(RECORD_KEY)
    return OnnxModel(meta=parse_inside(record, path=path), session=session)


def _protect_zeros_before_pools(program: Any) -> None:
    """Replace the zeros that are padded before a max pool (BiT's root) by the smallest positive normal number.

    onnxruntime (pad_fusion.cc, release 1.31 too) and onnx's optimizer (issue onnxsim 290) take such zeros for the
    pool's own padding, minus infinity, and logits change in the third digit.
    """
    import numpy as np
    from onnxscript import ir

    for node in program.graph:
        if node.op_type != "Pad" or all(use.op_type != "MaxPool" for use in node.outputs[0].consumers()):
            continue
        zero = node.inputs[2]
        if zero.const_value.numpy() == 0:
            tiny = ir.tensor(np.finfo(np.float32).tiny)
            value = ir.Value(
                name=f"{zero.name}_tiny", shape=ir.Shape(()), type=ir.TensorType(tiny.dtype), const_value=tiny
            )
            program.graph.register_initializer(value)
            node.replace_input_with(2, value)
            if not zero.consumers():
                program.graph.initializers.pop(zero.name)


def _require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"ONNX needs {' and '.join(missing)}, not installed here: `pip install {' '.join(missing)}`, or install "
            "shardvit with its extra onnx"
        )
