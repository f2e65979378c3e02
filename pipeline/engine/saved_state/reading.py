"""Read engine checkpoint files as data: no file can run code.

torch's restricted unpickler (`weights_only=True`) builds tensors and plain containers and refuses the rest. Three of
DeepSpeed 0.19's four extra types become `Record`, without importing DeepSpeed.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from shardvit.data_shards.errors import SampleError

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Record:
    """A DeepSpeed object (loss scaler, fragment_address) with plain values only."""

    def __setstate__(self, attributes: object) -> None:
        if not isinstance(attributes, dict):
            raise pickle.UnpicklingError("a record without names")
        for name, value in attributes.items():
            if type(name) is not str or type(value) not in _PLAIN:
                raise pickle.UnpicklingError(f"{name!r} of a record is not a plain value")
        vars(self).update(attributes)


# Names in the files -> our type; an IntEnum becomes an int.
_ALLOWED: list[Any] = [
    (Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read_state(file: Path, *, how: Literal["map", "copy"] = "map") -> dict[str, Any]:
    """Read one engine file; tensors on the CPU, loaded on use (map) or now (copy). SampleError, perhaps on this rank
    only, if it is damaged or holds more than tensors, plain values and records."""
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content = torch.load(file, map_location="cpu", mmap=how == "map", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SampleError(
            f"{file} holds more than tensors and plain values; loading it could run code, so it is not read: take "
            "another checkpoint"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a forged pickle can raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise SampleError(f"{file} cannot be read ({type(error).__name__}: {reason})") from error
    if not isinstance(content, dict):
        raise SampleError(f"{file} cannot be read: it is not a dict, which every engine writes")
    return content
