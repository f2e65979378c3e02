"""Read the classes of held-out images that lie flat in one folder or tar, as ImageNet's validation images do.

Known are: the development kit (ILSVRC2012_devkit_t12.tar.gz, or its folder: numbers in the order of the images, and
meta.mat, which says which synset a number stands for), Kaggle's LOC_val_solution.csv, lines of "FILE CLASS", and lines
of "CLASS" alone in the order of the images' names.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from data_shards.packing.sources.archive import Unpacking
from data_shards.packing.sources.label_list import read_lines
from data_shards.packing.sources.tree import is_archive, open_tree, rows_by_name

TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
NAMES = ("LOC_val_solution.csv", "ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12")
_HEADER = "imageid"  # Kaggle's


def read_val_labels(path: Path, names: list[str], *, unpacking: Unpacking) -> list[str]:
    """Find the class of each image of `names` (paths in order of their file names).

    Raises UserError, naming file and line, for a list that cannot be read, an image that it does not name or names with
    two classes, and a list without names that has another number of lines than there are images.
    """
    if path.is_dir() or is_archive(path):
        return _in_order(path, _devkit(path, unpacking=unpacking), names)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; it should be one of {', '.join(NAMES[:2])}, or a list")
    table = list(_entries(path))
    if not table:
        raise UserError(f"{path}: it names no image; write 'FILE CLASS' on each line")
    if all(name is None for _, name, _ in table):
        if all(label.isdigit() for _, _, label in table):
            raise UserError(
                f"{path}: its numbers are classes only together with {META}; give ILSVRC2012_devkit_t12.tar.gz, which "
                "holds both"
            )
        return _in_order(path, [label for _, _, label in table], names)
    return _by_name(path, table, names)


def _entries(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """Line, file name without folders and ending (None where the list has none), class."""
    for line, text in read_lines(path):
        fields = re.split(r"[,\s]+", text.strip())
        if fields[0].lower() == _HEADER:
            continue
        if len(fields) == 1:
            yield line, None, fields[0]
        elif len(fields) == 2 or path.suffix.lower() == ".csv":  # Kaggle's has boxes after the class
            yield line, _stem(fields[0]), fields[1]
        else:
            raise UserError(f"{path}, line {line}: {len(fields)} words where 'FILE CLASS' is expected; correct it")


def _in_order(path: Path, classes: list[str], names: list[str]) -> list[str]:
    if len(classes) != len(names):
        raise UserError(
            f"{path}: {len(classes):,} labels for {len(names):,} images, which go by their order; fetch the images "
            "again, or give a list that names them"
        )
    return classes


def _by_name(path: Path, table: list[tuple[int, str | None, str]], names: list[str]) -> list[str]:
    found: dict[str, str] = {}
    for line, name, label in table:
        if name is None:
            raise UserError(f"{path}, line {line}: there is no class beside {label!a}; correct that line")
        if found.setdefault(name, label) != label:
            raise UserError(f"{path}, line {line}: {name!a} has the class {found[name]!a} above; correct one of them")
    missing = [name for name in names if _stem(name) not in found]
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise UserError(f"{path}: it has no class for {missing[0]}{more}; give the list of these very images")
    return [found[_stem(name)] for name in names]


def _devkit(path: Path, *, unpacking: Unpacking) -> list[str]:
    tree = open_tree(path, unpacking=unpacking)
    rows = rows_by_name(tree, (TRUTH, META))
    missing = [name for name in (TRUTH, META) if name not in rows]
    if missing:
        raise UserError(f"{path}: there is no {missing[0]} in it; give ILSVRC2012_devkit_t12.tar.gz")
    table = read_mat(tree.read(rows[META]), "synsets", name=f"{path}: {META}")
    try:
        synsets = {int(row["ILSVRC2012_ID"].item()): str(row["WNID"].item()) for row in table.ravel()}
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {META}: its synsets are not as published ({error}); fetch it again") from None
    try:
        numbers = [int(text) for text in tree.read(rows[TRUTH]).decode("ascii").split()]
        return [synsets[number] for number in numbers]
    except (UnicodeDecodeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: {TRUTH} in it has a line that is no class of {META} ({error}); fetch it") from None


def read_mat(data: bytes, variable: str, *, name: str) -> Any:
    """Read one variable of a MATLAB file, which is data alone. Raises UserError, with the file's `name`."""
    from scipy.io import loadmat

    try:
        return loadmat(io.BytesIO(data), variable_names=[variable])[variable]
    except Exception as error:  # noqa: BLE001 - scipy raises a dozen kinds at what is broken
        raise UserError(f"{name}: {variable} cannot be read from it ({error}); fetch it again") from None


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]
