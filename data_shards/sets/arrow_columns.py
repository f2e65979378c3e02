"""Make Arrow's arrays of buffers: `pyarrow.array` imports pandas, which takes 0.3 s and 54 MB of a packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def arrow_array(values: Sequence[Any] | NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Make an array of numbers, truths, texts or lists of numbers; None is null."""
    import pyarrow as pa

    valid, nulls = None, 0
    if not isinstance(values, np.ndarray) and (nulls := sum(each is None for each in values)):
        valid = _bits([each is not None for each in values])
    if pa.types.is_list(kind):
        flat = [number for each in values for number in each]
        return pa.ListArray.from_arrays(_ends(values), arrow_array(np.array(flat, np.int64), kind.value_type))
    if pa.types.is_string(kind):
        parts = [b"" if each is None else str(each).encode() for each in values]
        buffers = [valid, _ends(parts).buffers()[1], pa.py_buffer(b"".join(parts))]
    elif pa.types.is_boolean(kind):
        buffers = [valid, _bits(values)]
    else:
        present = [0 if each is None else each for each in values] if nulls else values
        buffers = [valid, pa.py_buffer(np.ascontiguousarray(present, _dtype(kind)))]
    return pa.Array.from_buffers(kind, len(values), buffers, null_count=nulls)


def numbers_of(column: Any) -> NDArray[Any]:
    """Return the numbers of a column without nulls, those of its lists one after the other."""
    found = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    found = found.flatten() if found.type.num_fields else found
    return np.frombuffer(found.buffers()[1], _dtype(found.type))[found.offset : found.offset + len(found)]


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype({"float": "float32", "double": "float64"}.get(str(kind), str(kind)))


def _ends(parts: Any) -> pa.Array:
    import pyarrow as pa

    return arrow_array(np.cumsum([0, *map(len, parts)], dtype=np.int32), pa.int32())


def _bits(values: Any) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.asarray(values, np.bool_), bitorder="little"))
