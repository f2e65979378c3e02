"""The engines' files of a checkpoint, read as data: a file from elsewhere runs nothing, whatever it holds.

They are pickles, and a pickle may call any function. torch's restricted unpickler (`weights_only=True`) makes tensors
and plain containers of them and refuses the rest. DeepSpeed 0.19 writes four things besides, and three of those come
back as records of ours, which hold plain values alone; so reading imports nothing of DeepSpeed either. What reads them
takes their attributes; where DeepSpeed itself goes on with its scaler, its engine makes a real one of the values.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from data_shards.errors import SampleError

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Record:
    """An object of DeepSpeed's: its attributes, as far as they are plain values."""

    def __setstate__(self, attributes: object) -> None:
        if not isinstance(attributes, dict):
            raise pickle.UnpicklingError("a record without names")
        for name, value in attributes.items():
            if type(name) is not str or type(value) not in _PLAIN:
                raise pickle.UnpicklingError(f"{name!r} of a record is no plain value")
        vars(self).update(attributes)


class StaticScaler(Record):
    """In the place of DeepSpeed's LossScaler."""


class DynamicScaler(Record):
    """In the place of DeepSpeed's DynamicLossScaler."""


class Fragment(Record):
    """In the place of DeepSpeed's fragment_address; nothing of it is used."""


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
# By the names in the files; an enumeration of ints is read as the int.
_ALLOWED: list[Any] = [
    (StaticScaler, f"{_SCALERS}.LossScaler"),
    (DynamicScaler, f"{_SCALERS}.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read_state(file: Path, *, how: Literal["map", "copy"] = "map") -> dict[str, Any]:
    """The content of one file that an engine wrote; tensors on the CPU.

    Args:
        file: what `torch.save` wrote.
        how: map: tensors are read from the disk when they are used; copy: now.

    Raises:
        SampleError: it holds something else than tensors, plain values and the records above, or is damaged; perhaps
            only this rank reads it.
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what cannot be read is refused below
            content = torch.load(file, map_location="cpu", mmap=how == "map", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SampleError(
            f"{file} holds more than tensors and plain values; loading it could run code, so it is not read: take "
            "another checkpoint"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a pickle made by hand can make the unpickler stumble over anything
        raise SampleError(f"{file} cannot be read ({type(error).__name__}: {_first_line(error)})") from error
    if not isinstance(content, dict):
        raise SampleError(f"{file} cannot be read: it holds no table of names, which every engine writes")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
