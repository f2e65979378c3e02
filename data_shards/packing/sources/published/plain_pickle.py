"""Pickles of plain values and numpy arrays, read without running what they name: CIFAR's form.

A pickle may call any function. Here the four names that an array is written with stand for inert values of this file,
every other name ends the reading, and arrays are made from the bytes in the file. Tuples of tuples, each twice in the
next, would take forever to hash: what is needed to make them is refused, too. Holds the content in memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from data_shards.errors import UserError


class _Type:
    """In place of numpy.dtype."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which bytes do not have."""


class _Array:
    """In place of numpy.ndarray; `value` is the array."""

    value: Any = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array that is not written as numpy writes it")
        _, shape, kind, is_fortran, data = state
        if not isinstance(kind, _Type) or kind.code not in ("u1", "|u1", "uint8") or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array of other things than bytes")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """How Python 3 writes bytes in protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes that are not written as Python writes them")
    return text.encode("latin1")


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


def _refuse_shared_tuples(data: bytes) -> None:
    """Raise UnpicklingError for a pickle that uses a tuple twice, or could hide it below the top of the stack."""
    memo: dict[int, bool] = {}  # whether it is a tuple
    is_tuple = False  # what is on top
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[int(argument or 0)] = is_tuple
            case "MEMOIZE":
                memo[len(memo)] = is_tuple
            case "GET" | "BINGET" | "LONG_BINGET":
                if memo.get(int(argument or 0)):
                    raise pickle.UnpicklingError("it uses a tuple twice")
                is_tuple = False
            case "DUP" | "POP" | "POP_MARK":
                raise pickle.UnpicklingError(f"it has {opcode.name}, which such files have not")
            case name:
                is_tuple = name.startswith("TUPLE")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def read_plain_pickle(data: bytes, *, name: str) -> dict[str, Any]:
    """A pickled dict with text keys (Python 2's byte strings too); byte strings in it stay bytes.

    Raises UserError with the file's `name` for anything else, a damaged pickle, and one that names any other type.
    """
    try:
        _refuse_shared_tuples(data)
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("it is not a dict")
        return {
            key.decode("latin1") if isinstance(key, bytes) else str(key): each.value
            if isinstance(each, _Array)
            else each
            for key, each in content.items()
        }
    except Exception as error:  # noqa: BLE001 - a forged pickle can raise anything
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(
            f"{name}: not a pickle of plain values and arrays of bytes ({reason}); nothing of it was run: fetch the "
            "published file"
        ) from None
