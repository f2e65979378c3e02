"""An npz file array by array: shapes before values, one array in memory, never a pickle.

`np.load` reads an array whole to tell its shape; `np.savez` holds all arrays at once and writes the time of day.
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np
import torch
from torch import Tensor

_DAMAGES = (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Header:
    """Dtype and shape of an array, without its values."""

    shape: tuple[int, ...]
    precision: str  # "float32", "bfloat16" and so on


class NpzReader:
    """An open npz file of floating-point arrays. Errors are ValueErrors that name the array, not the file."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        names = Counter(info.filename.removesuffix(".npy") for info in archive.infolist())
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(
                f"the array {twice[0]!r} is in it {names[twice[0]]} times, and which one counts is not told"
            )
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open the file; raises a ValueError that names it if there is none, or it is no zip or has a name twice."""
        try:
            archive = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist") from None
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no npz file, or only the beginning of one ({error})") from None
        with archive:
            try:
                npz = cls(archive)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            yield npz

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def header(self, name: str) -> Header:
        """Shape and precision of an array; reads its first bytes."""
        with self._member(name) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            missing = int(np.prod(shape, dtype=object)) * dtype.itemsize - (self._members[name].file_size - file.tell())
        # big_vision's bfloat16: numpy does not know it and writes two opaque bytes
        precision = "bfloat16" if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None else str(dtype)
        if precision != "bfloat16" and dtype.kind != "f":
            raise ValueError(f"the array {name!r} holds {precision}, not floating-point numbers")
        if missing:
            raise ValueError(f"the array {name!r} is damaged: it has not as many bytes as its shape {shape} needs")
        return Header(shape, precision)

    def read(self, name: str) -> Tensor:
        """The values, in the file's precision and in a tensor of their own."""
        with self._member(name) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype.kind == "V":
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        """The bytes of an array; whatever is wrong with them is a ValueError."""
        try:
            with self._archive.open(self._members[name]) as file:
                yield file
        except _DAMAGES as error:
            raise ValueError(f"the array {name!r} cannot be read ({error})") from None


def write_npz(path: Path, arrays: Iterable[tuple[str, Tensor]]) -> None:
    """Write named tensors, each taken from `arrays` in its turn; the same arrays make the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, tensor in arrays:
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:  # no time of day
                np.lib.format.write_array(member, tensor.contiguous().numpy(), allow_pickle=False)
