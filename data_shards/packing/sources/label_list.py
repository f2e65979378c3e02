"""Read images and labels from a list: CSV, JSONL, or VTAB-1k's lines of "PATH NUMBER".

    path,label                    {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat                   {"path": "a/2.jpg", "label": ["cat", "dog"]}
    a/2.jpg,cat|dog               {"path": "a/3.jpg", "label": []}

CSV starts with column names; other columns and keys are ignored. A `|` in any CSV label, or a JSON list, makes the
whole set multi-label: any number of labels an image, or none. Labels are class names or numbers: in JSONL 3 is a number
and "3" a name; CSV labels are numbers if all are whole numbers, unless the file of class names contains all of them.
Without such a file, names are sorted in code-point order, and numbers give classes "0" to the highest. Paths are
relative to the folder, or absolute, and must stay inside it. Costs about 3 µs a line, a `stat` an image and, for CSV
and JSONL, a folder listing to count unlisted images.

VTAB-1k (Zhai et al., 2019) has a folder per task: train800val200.txt names the 1,000 training images, train800.txt and
val200.txt its two parts for choosing settings, test.txt the test images.
"""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import (
    ImageSet,
    Int64s,
    Source,
    SplitName,
    published_source,
    refuse_all,
)
from shardvit.data_shards.packing.sources.located import ABSENT
from shardvit.data_shards.packing.sources.tree import FolderTree, local_tree
from shardvit.data_shards.reading.external_shards import read_classes
from shardvit.data_shards.text import brief, one_line, parse_json

VTAB_TRAIN, VTAB_TEST = "train800val200.txt", "test.txt"
_SEPARATOR = "|"  # of labels in a CSV
_MOST_CLASS_NUMBERS = 1_000_000  # a higher number is an id: ImageNet-21k has 21,843 classes

Label = int | str


@dataclass(frozen=True)
class LabelList:
    """A list of labels; `class_names` names class 0, 1, ... (see `read_classes`)."""

    file: Path  # a .csv or .jsonl file
    path_column: str = "path"  # CSV column or JSONL key of the image's path
    label_column: str = "label"  # likewise of its label or labels
    class_names: Path | None = None

    def as_json(self) -> dict[str, str | None]:
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in vars(self).items()}


class LabelRow(NamedTuple):
    """An image's path, its different labels, and the line that has them."""

    line: int
    path: str
    labels: tuple[Label, ...]


def label_list_source(tree: FolderTree, labels: LabelList) -> Source:
    """Read a list as split train; UserError names file and lines."""
    problems: list[str] = []
    is_multi, rows = _read_rows(labels, tree=tree, problems=problems)
    lines: dict[str, tuple[Path, int]] = {}
    problems += _repeats(labels.file, rows, lines)
    if not rows and not problems:
        raise UserError(f"{labels.file}: it names no image; each line should have a path and a label")
    refuse_all(problems)
    numbers, classes = number_labels(rows, labels)
    images = _images(labels.file, rows, label_array(numbers, is_multi=is_multi), tree=tree)
    notes: tuple[str, ...] = ()
    if left := [path for path in tree.walk("")[0] if path not in lines]:
        what = f"{len(left):,} images below {tree.at('')}, which were left out (the first: {left[0]!a})"
        notes = (f"{labels.file} does not name {what}",)
    kind = "multi" if is_multi else "single"
    return Source(tree.spec, classes, {"train": images}, notes=notes, kind=kind, empty_classes="report")


def path_lists_source(train: Path, val: Path | None, *, spec: Path) -> Source:
    """Read one or two lists of "PATH NUMBER" in one folder; UserError names list and line."""
    lists: dict[SplitName, Path] = {"train": train} if val is None else {"train": train, "val": val}
    root = train.parent
    seen: dict[str, tuple[Path, int]] = {}
    splits: dict[SplitName, ImageSet] = {}
    for split, file in lists.items():
        if file.parent.resolve() != root.resolve():
            raise UserError(f"{file}: both lists should lie in one folder, to which their paths are relative: {root}")
        rows = [_numbered_row(file, line, text, root=root) for line, text in read_lines(file)]
        if not rows:
            raise UserError(f"{file}: it names no image; write 'PATH NUMBER' on each line")
        refuse_all(_repeats(file, rows, seen)[:1])
        splits[split] = _images(
            file, rows, np.array([label for _, _, (label,) in rows], dtype=np.int64), tree=local_tree(root)
        )
    num_classes = 1 + max(int(images.labels.max()) for images in splits.values())
    what = ", ".join(f"{file.name} is {each}" for each, file in lists.items())
    return published_source(spec, map(str, range(num_classes)), splits, title=f"lists of images: {what}")


def clean_path(text: str, *, root: Path | None) -> str:
    """Normalise a path: `./a//b.jpg` and `ROOT/a/b.jpg` -> `a/b.jpg`; ValueError if it leads outside `root`.

    Without a `root` (a URL's), no absolute path leads inside.
    """
    path = PurePosixPath(text)
    if path.is_absolute() and "\0" not in text and root is not None:
        # An absolute path may spell `root` as given or resolved; others are resolved.
        spelt = [Path(os.path.abspath(root)), root.resolve()]
        candidates = [] if ".." in path.parts else [(path, base) for base in spelt]
        for candidate, base in [*candidates, (PurePosixPath(os.path.realpath(text)), spelt[1])]:
            if candidate.is_relative_to(base):
                path = candidate.relative_to(base)
                break
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text:
        raise ValueError(f"the path {one_line(text)} does not lead to a file inside SOURCE")
    return str(path)


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of non-blank lines; UserError if the file is missing or not UTF-8."""
    with _reading(file), open(file, encoding="utf-8-sig") as stream:
        for line, text in enumerate(stream, start=1):
            if text.strip():
                yield line, text.rstrip("\n")


@contextmanager
def at_line(file: Path, line: int) -> Iterator[None]:
    """Turn a ValueError into a UserError that names the line."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{file}, line {line}: {error}; correct that line") from None


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{file}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: the file is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{file}: not a readable CSV file ({error}); correct it") from None


def _images(file: Path, rows: Sequence[LabelRow], labels: Int64s, *, tree: FolderTree) -> ImageSet:
    images = ImageSet(tree.files([row.path for row in rows]), np.arange(len(rows)), labels)
    absent = np.flatnonzero(images.num_bytes == ABSENT)
    if len(absent):
        row = rows[int(absent[0])]
        more = f" ({len(absent) - 1:,} more are missing)" if len(absent) > 1 else ""
        raise UserError(
            f"{file}, line {row.line}: {one_line(row.path)} is not a file below {tree.at('')}{more}; paths are "
            "relative to that folder: correct it or these lines"
        )
    return images


def _repeats(file: Path, rows: Sequence[LabelRow], seen: dict[str, tuple[Path, int]]) -> list[str]:
    problems: list[str] = []
    for row in rows:
        before, line = seen.setdefault(row.path, (file, row.line))
        if (before, line) != (file, row.line):
            where = f"{file}, line {row.line}: {one_line(row.path)}"
            problems.append(f"{where} is on line {line} of {before.name} already; name each image once")
    return problems


def _numbered_row(file: Path, line: int, text: str, *, root: Path) -> LabelRow:
    path, _, number = text.strip().rpartition(" ")
    with at_line(file, line):
        if not path or not (number.isascii() and number.isdigit()) or len(number) > 9:
            raise ValueError("a path and the number of a class are expected")
        if int(number) >= _MOST_CLASS_NUMBERS:
            raise ValueError(f"{number} would make more than {_MOST_CLASS_NUMBERS:,} classes")
        return LabelRow(line, clean_path(path.strip(), root=root), (int(number),))


def _read_rows(labels: LabelList, *, tree: FolderTree, problems: list[str]) -> tuple[bool, list[LabelRow]]:
    found = [*read_entries(labels)]
    is_multi, each = parsed([value for *_, value in found], labels)
    rows: list[LabelRow] = []
    for (line, path, _), values in zip(found, each, strict=True):
        try:
            with at_line(labels.file, line):
                rows.append(_row(line, path, values, tree=tree))
        except UserError as error:
            problems.append(str(error))
    return is_multi, rows


def read_entries(labels: LabelList) -> Iterator[tuple[int, Any, Any]]:
    """Yield (line, path, label or labels); UserError for a line without them, and for other files."""
    match labels.file.suffix.lower():
        case ".csv":
            yield from _csv_rows(labels)
        case ".jsonl":
            yield from _jsonl_rows(labels)
        case _:
            what = "a list of labels must be a .csv or .jsonl file, or a table (.parquet, .arrow)"
            raise UserError(f"{labels.file}: {what}; convert it or rename it")


def parsed(values: Sequence[Any], labels: LabelList) -> tuple[bool, list[list[Any]]]:
    """Read entries' labels: whether images have several, and each one's."""
    if labels.file.suffix.lower() == ".csv":
        return _parsed_texts(values, labels)
    is_multi = any(isinstance(value, list | tuple) for value in values)
    return is_multi, [[*value] if isinstance(value, list | tuple) else [value] for value in values]


def _parsed_texts(texts: Sequence[str], labels: LabelList) -> tuple[bool, list[list[Label]]]:
    """Read the labels of a CSV: names, or numbers if all are such."""
    is_multi = any(_SEPARATOR in text for text in texts)
    parts = [[text] for text in texts]
    if is_multi:
        parts = [[part.strip() for part in text.split(_SEPARATOR)] if text.strip() else [] for text in texts]
    names = set(read_classes(labels.class_names) if labels.class_names else ())
    found = {part for each in parts for part in each}
    if not found <= names and all(re.fullmatch(r"[0-9]{1,18}", part) for part in found):
        return is_multi, [[int(part) for part in each] for each in parts]
    return is_multi, [[*each] for each in parts]


def _row(line: int, path: Any, values: list[Any], *, tree: FolderTree) -> LabelRow:
    if not isinstance(path, str):
        raise ValueError(f"the path {brief(path)} is not text")
    checked = checked_labels(values)
    below = path if tree.root else path.removeprefix(f"{tree.spec.rstrip('/')}/")
    return LabelRow(line, clean_path(below, root=tree.root), checked)


def checked_labels(values: Sequence[Any]) -> tuple[Label, ...]:
    """Return different names or numbers of classes; ValueError for anything else."""
    for value in values:
        is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18
        if not is_number and not isinstance(value, str):
            raise ValueError(f"the label {brief(value)} is neither a class name nor a class number")
        if isinstance(value, str) and not (value and value.isprintable()):
            raise ValueError(f"the label {value!a} is {'a name that cannot be written' if value else 'empty'}")
    return tuple(dict.fromkeys(values))


def _csv_rows(labels: LabelList) -> Iterator[tuple[int, str, str]]:
    with _reading(labels.file), open(labels.file, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        header = next(reader, [])
        columns = labels.path_column, labels.label_column
        if missing := [name for name in columns if name not in header]:
            raise UserError(
                f"{labels.file}: there is no column {missing[0]!r} in its first line, which has "
                f"{', '.join(map(repr, header)) or 'none'}; choose with --path-column and --label-column"
            )
        path, label = map(header.index, columns)
        for fields in filter(None, reader):
            if len(fields) != len(header):
                with at_line(labels.file, reader.line_num):
                    raise ValueError(f"{len(fields)} fields where the first line has {len(header)}")
            yield reader.line_num, fields[path], fields[label]


def _jsonl_rows(labels: LabelList) -> Iterator[tuple[int, Any, Any]]:
    for line, text in read_lines(labels.file):
        with at_line(labels.file, line):
            entry = parse_json(text)
        for key in (labels.path_column, labels.label_column):
            if not isinstance(entry, dict) or key not in entry:
                raise UserError(
                    f"{labels.file}, line {line}: no key {key!r}; choose with --path-column and --label-column"
                )
        yield line, entry[labels.path_column], entry[labels.label_column]


def number_labels(rows: list[LabelRow], labels: LabelList) -> tuple[list[list[int]], tuple[str, ...]]:
    """Number the labels of each row, and name the classes; UserError names a line with a label that is none."""
    kinds = {type(label): row for row in rows for label in row.labels}
    if len(kinds) > 1:
        line = max(row.line for row in kinds.values())
        raise UserError(f"{labels.file}, line {line}: names and numbers of classes are mixed; use one of them")
    if labels.class_names is not None:
        classes = read_classes(labels.class_names)
    elif int in kinds:
        highest, line = max((int(label), row.line) for row in rows for label in row.labels)
        if highest >= _MOST_CLASS_NUMBERS:
            raise UserError(
                f"{labels.file}, line {line}: {highest} would make {highest + 1:,} classes; give --class-names"
            )
        classes = tuple(map(str, range(highest + 1)))
    else:
        classes = tuple(sorted({str(label) for row in rows for label in row.labels}))
    if not classes:
        raise UserError(f"{labels.file}: no image has a label; correct the list")
    known: dict[Label, int] = {name if int not in kinds else number: number for number, name in enumerate(classes)}
    return [[_known(label, row, known, labels) for label in row.labels] for row in rows], classes


def _known(label: Label, row: LabelRow, known: dict[Label, int], labels: LabelList) -> int:
    if label in known:
        return known[label]
    if isinstance(label, int):
        reason = f"the number {label} is not a class: {labels.class_names} has {len(known)}, from 0 to {len(known) - 1}"
    else:
        near = get_close_matches(label, [str(name) for name in known], n=1)
        reason = f"{labels.class_names} has no class {label!r}" + (f", did you mean {near[0]!r}" if near else "")
    raise UserError(f"{labels.file}, line {row.line}: {reason}; correct one of the two files")


def label_array(numbers: list[list[int]], *, is_multi: bool) -> Int64s:
    """Stack class numbers: [rows], or [rows, most labels] padded with -1."""
    if not is_multi:
        return np.array([row[0] for row in numbers], dtype=np.int64)
    array = np.full((len(numbers), max(map(len, numbers))), -1, dtype=np.int64)
    for i, row in enumerate(numbers):
        array[i, : len(row)] = sorted(row)
    return array
