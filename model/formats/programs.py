"""A model as a program for any batch size, with our record inside: ONNX (standard operators) or torch.export (.pt2).

Writing takes some seconds and two copies of the weights. ONNX needs the extra `onnx` and runs on the CPU here; weights
beyond 1.5 GB (H/14, not L/16) go to NAME.onnx.data, as protobuf messages end at 2 GB. No half precision, quantisation
or resizing. `torch.export.load(FILE).module()` needs no code of ours but trusted files: it unpickles sample inputs,
`eval`s shape formulas (sympy) and loads compiled parts as a library. We read a .pt2's weights as raw bytes into the
model of its record, and execute or unpickle nothing. Layout: torch/export/pt2_archive/_package.py.
"""

from __future__ import annotations

import json
import logging
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from shardvit.model.saved.atomic import replaced_file
from shardvit.model.saved.model_folder import RECORD_KEY, SavedModelMeta, build_described, parse_inside

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

ONNX_ENDING = ".onnx"
INPUT, OUTPUT = "images", "logits"
RECORD_FILE = f"{RECORD_KEY}.json"

_RECORD = f"extra/{RECORD_FILE}"
_WEIGHTS = "data/weights/"
_WEIGHTS_CONFIG = f"{_WEIGHTS}model_weights_config.json"

# Raised by zipfile, json and torch for damaged files.
_BROKEN = (OSError, BadZipFile, EOFError, RuntimeError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


@contextmanager
def _exported(model: nn.Module, *, meta: SavedModelMeta) -> Iterator[ExportedProgram]:
    """Trace `model` in evaluation mode for any batch size; silences the exporters' warnings."""
    import torch

    assert not model.training, "a model in training mode would be exported with its dropout"
    example = torch.zeros(2, meta.model.channels, meta.image_size, meta.image_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def write_onnx(path: Path, model: nn.Module, *, meta: SavedModelMeta) -> None:
    """Export `model` in evaluation mode: "images", float32 [batch, channels, S, S], normalised with the record's mean
    and std -> "logits", float32 [batch, classes]. The metadata's "shardvit" has the record. ValueError without the
    packages."""
    import torch

    _require("onnx", "onnxscript")
    # warns of each SwiGLU, which it leaves as it is
    logging.getLogger("onnxscript.optimizer").setLevel(logging.ERROR)
    with _exported(model, meta=meta) as traced:
        program = torch.onnx.export(traced, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
        assert program is not None
        _protect_zeros_before_pools(program.model)
        program.model.metadata_props[RECORD_KEY] = meta.model_dump_json(exclude_none=True)
        with replaced_file(path) as new:
            program.save(new)


@dataclass(frozen=True)
class OnnxModel:
    """A file by `write_onnx`, ready to run."""

    meta: SavedModelMeta
    session: Any  # onnxruntime.InferenceSession

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images, float32 [B, 3, S, S] on the CPU -> logits [B, classes]."""
        import torch

        return torch.from_numpy(self.session.run([OUTPUT], {INPUT: images.numpy()})[0])


def open_onnx(path: Path) -> OnnxModel:
    """Load a file by `write_onnx`, with torch's threads; ValueError if it is broken or a package is missing."""
    _require("onnxruntime")
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    # By default it pins threads to cores that a container may not own, and prints errors to stderr.
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its exceptions have neither a common class nor public names
        raise ValueError(f"{path} cannot be read as ONNX: {error}") from None
    record = session.get_modelmeta().custom_metadata_map.get(RECORD_KEY)
    return OnnxModel(meta=parse_inside(record, path=path), session=session)


def _protect_zeros_before_pools(program: Any) -> None:
    """Replace zeros padded before a max pool (BiT's root) by the smallest positive normal number: onnxruntime
    (pad_fusion.cc, release 1.31 too) and onnx's optimizer (issue onnxsim 290) fuse them into the pool's own padding,
    minus infinity, which changes logits in the third digit."""
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


def write_torch_export(path: Path, model: nn.Module, *, meta: SavedModelMeta) -> None:
    """As `write_onnx`, with torch.export; the record is the extra file "shardvit.json"."""
    import torch

    with _exported(model, meta=meta) as program, replaced_file(path) as new:
        torch.export.save(program, new, extra_files={RECORD_FILE: meta.model_dump_json(exclude_none=True)})


def read_torch_export(path: Path) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """Read record and state dict onto the CPU; ValueError if the file is broken, has no record, or they do not fit."""
    import torch

    try:
        with ZipFile(path) as archive:
            name = _root(archive) + _RECORD
            record = archive.read(name) if name in archive.namelist() else None
    except _BROKEN as error:
        raise _unreadable(path, error) from None
    meta = parse_inside(record, path=path)
    with torch.device("meta"):
        expected = build_described(meta).state_dict()
    try:
        with ZipFile(path) as archive:
            entries: dict[str, Any] = json.loads(archive.read(_root(archive) + _WEIGHTS_CONFIG))["config"]
            if entries.keys() != expected.keys():
                name = min(entries.keys() ^ expected.keys())
                raise ValueError(f"weight {name!r} is {'missing' if name in expected else 'not one of its model'}")
            return meta, {name: _tensor(archive, entries[name], like=like) for name, like in expected.items()}
    except _BROKEN as error:
        raise _unreadable(path, error) from None


def _root(archive: ZipFile) -> str:
    """Name of the archive's single top folder; torch names it after the file."""
    names = archive.namelist()
    return f"{names[0].partition('/')[0]}/" if names else ""


def _tensor(archive: ZipFile, entry: dict[str, Any], *, like: Tensor) -> Tensor:
    """Read raw bytes in native (little-endian) order as our model's dtype."""
    import torch

    if entry["use_pickle"]:
        raise ValueError("a weight is pickled")
    found = entry["tensor_meta"]
    sizes, strides = ([each["as_int"] for each in found[key]] for key in ("sizes", "strides"))
    if tuple(sizes) != tuple(like.shape):
        raise ValueError(f"{entry['path_name']} has the shape {tuple(sizes)} instead of {tuple(like.shape)}")
    data = archive.read(_root(archive) + _WEIGHTS + entry["path_name"])
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype)
    return flat.as_strided(sizes, strides, found["storage_offset"]["as_int"]).contiguous()


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as an export of shardvit: {error}")
