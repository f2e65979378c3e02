"""Large arrays in memory that worker processes share with their rank, where pickling would give each a copy.

A set of 10^5 shards and the order of its samples are 20 MB; with 16 workers a rank, and 8 ranks a host, that is 2.5 GB
of pickled bytes at each start. Worker processes must not write into these arrays. Costs one copy per array; torch holds
the memory by open descriptors alone, so that nothing is left behind, however a process ends.
"""

from __future__ import annotations

import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST_BYTES = 1 << 16  # smaller arrays are pickled

_shared: dict[int, tuple[weakref.ref[NDArray[Any]], torch.Tensor]] = {}  # by the array's id: for all workers alike


def share_large_arrays() -> None:
    """From now on what this process hands to worker processes; harmless when repeated."""
    ForkingPickler.register(np.ndarray, _reduce)


def _reduce(array: NDArray[Any]) -> Any:
    if array.nbytes < _LEAST_BYTES or array.dtype.hasobject or array.dtype.fields:
        return array.__reduce_ex__(2)
    return _restore, (_in_shared_memory(array), array.dtype.str, array.shape)


def _in_shared_memory(array: NDArray[Any]) -> torch.Tensor:
    known = _shared.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(array.nbytes))
    content.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    number = id(array)
    _shared[number] = (weakref.ref(array, lambda _: _shared.pop(number, None) and None), content)
    return content


def _restore(content: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return content.numpy().view(dtype).reshape(shape)
