"""Read tensors from safetensors and torch files, unwrapping what training code puts around a state dict.

Executes no pickle, knows no model. Costs one copy of the weights.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.model.saved.model_folder import read_json, read_safetensors

if TYPE_CHECKING:
    from torch import Tensor

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
FOLDER_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

# Keys under which training code keeps the state dict; averages first, since they are evaluated.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "module")
# Prefixes of DistributedDataParallel, torch.compile, Lightning and transformers' TimmWrapper.
_PREFIXES = ("module.", "_orig_mod.", "model.", "timm_model.")


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read and unwrap a file's tensors on the CPU, in their dtypes; ValueError names a file without them."""
    content: object = read_safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    return _without_prefixes(_only_tensors(content, path=path))


def load_folder_weights(folder: Path) -> dict[str, Tensor]:
    """As `load_weights`, for a timm or transformers folder of one or several files. ValueError if there is none."""
    for name in FOLDER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if not name.endswith(".index.json"):
            return load_weights(path)
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{path} has no key 'weight_map': it is no index of weights")
        whole: dict[str, Tensor] = {}
        for part in sorted(set(map(str, weight_map.values()))):
            whole |= read_safetensors(folder / Path(part).name)
        return _without_prefixes(whole)
    raise ValueError(f"{folder} has no weights: looked for {', '.join(FOLDER_FILES)}")


def _torch_file(path: Path) -> object:
    import torch

    _refuse_duplicates(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: unreadable content is refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, or is no file of torch; loading it could run code, so it is not read: "
            "save its state dict alone, best as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} cannot be read as a file of torch ({reason})") from error


def _refuse_duplicates(path: Path) -> None:
    """Refuse a zip with two members of one name: readers disagree on which to take."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = Counter(archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return  # an older format, or damaged, which torch reports
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{path} has the member {twice[0]!r} {names[twice[0]]} times: it is damaged, get it again")


def _only_tensors(content: object, *, path: Path) -> dict[str, Tensor]:
    import torch

    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds no state dict (tensors by name), nor one under {', '.join(_WRAPPERS)}")
    others = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"{path} holds no state dict: {others[0]!r} is no tensor, and looked-for keys "
            f"({', '.join(_WRAPPERS)}) are missing"
        )
    return {str(name): value for name, value in content.items()}


def _without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = next((prefix for prefix in _PREFIXES if state and all(name.startswith(prefix) for name in state)), None)
    if prefix is None:
        return state
    return _without_prefixes({name.removeprefix(prefix): value for name, value in state.items()})
