"""torch.export: a model as a graph of torch's operators, of any batch size, with our record inside (.pt2).

`torch.export.load(FILE).module()` needs no code of ours, but trusted files: it unpickles sample inputs, evaluates
formulas of shapes by `eval` (sympy), and loads compiled parts as a library. We read weights as raw bytes, for the model
that the record names: nothing is executed or unpickled, and the graph is ignored.

Costs one copy of the weights on disk, some seconds to write. Archive layout: torch/export/pt2_archive/_package.py.
"""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from model.saved.atomic import replaced_file
from model.saved.model_folder import RECORD_KEY, SavedModelMeta
from model.saved.side_record import parse_inside

if TYPE_CHECKING:
    from torch import Tensor, nn

RECORD_FILE = f"{RECORD_KEY}.json"

_RECORD = f"extra/{RECORD_FILE}"
_WEIGHTS = "data/weights/"
_WEIGHTS_CONFIG = f"{_WEIGHTS}model_weights_config.json"

# What zipfile, json and torch raise for damaged files.
_BROKEN = (OSError, BadZipFile, EOFError, RuntimeError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


def write_torch_export(path: Path, model: nn.Module, *, meta: SavedModelMeta) -> None:
    """Export `model`, which `meta` describes, in evaluation mode; an earlier file at `path` is replaced.

    The program takes float32 [batch, 3, S, S], normalised with the record's mean and std, and gives logits
    [batch, classes]; the record is the extra file "shardvit.json".
    """
    import torch

    assert not model.training, "a model in training mode would be exported with its dropout"
    example = torch.zeros(2, 3, meta.image_size, meta.image_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        with replaced_file(path) as beside:
            torch.export.save(program, beside, extra_files={RECORD_FILE: meta.model_dump_json(exclude_none=True)})


def read_torch_export_meta(path: Path) -> SavedModelMeta:
    """The record in a file that `write_torch_export` wrote; reads little more than that. Raises ValueError if the file
    cannot be read, or has no record."""
    try:
        with ZipFile(path) as archive:
            name = _root(archive) + _RECORD
            record = archive.read(name) if name in archive.namelist() else None
    except _BROKEN as error:
        raise _unreadable(path, error) from None
    return parse_inside(record, path=path)


def read_torch_export(path: Path) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """The record and the weights, on the CPU, under the names of our state dict. Raises ValueError if the file cannot
    be read, has no record, or its weights do not fit the record."""
    import torch

    from model.saved.model_folder import build_described

    meta = read_torch_export_meta(path)
    with torch.device("meta"):
        expected = build_described(meta).state_dict()
    try:
        with ZipFile(path) as archive:
            content = json.loads(archive.read(_root(archive) + _WEIGHTS_CONFIG))
            entries: dict[str, Any] = content["config"]
            if entries.keys() != expected.keys():
                name = min(entries.keys() ^ expected.keys())
                raise ValueError(f"weight {name!r} is {'missing' if name in expected else 'not one of its model'}")
            state = {name: _tensor(archive, entries[name], like=like) for name, like in expected.items()}
    except _BROKEN as error:
        raise _unreadable(path, error) from None
    return meta, state


def _root(archive: ZipFile) -> str:
    """The one folder that all of the archive lies in; torch names it after the file."""
    names = archive.namelist()
    return f"{names[0].partition('/')[0]}/" if names else ""


def _tensor(archive: ZipFile, entry: dict[str, Any], *, like: Tensor) -> Tensor:
    """One weight: raw bytes in native (little-endian) order, in our model's dtype."""
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
