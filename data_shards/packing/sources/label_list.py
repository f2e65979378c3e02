"""Labels from a list: a CSV or JSONL file that names images below a folder, one or several labels for each.

    path,label                    {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat                   {"path": "a/2.jpg", "label": ["cat", "dog"]}
    a/2.jpg,cat|dog               {"path": "a/3.jpg", "label": []}

CSV starts with a line of column names; other columns and keys are ignored. A `|` in any label of a CSV, or a JSON list,
makes the whole set multi-label: any number of labels per image, including none. A label is a class name or number. In
JSONL 3 is a number and "3" a name; in CSV labels are numbers if all are whole numbers, unless a file of class names
contains all of them. Without such a file, names are sorted in code-point order, and numbers give the classes "0" to the
highest. Paths are relative to the folder, or absolute, and must stay inside it.

Costs some 3 µs a line, one `stat` an image, and a listing of the folder, to count images that the list does not name.
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.sources.base import ABSENT, FileImages, Source, refuse_all
from data_shards.packing.sources.folder import walk_images
from data_shards.text import brief, one_line, parse_json

LABEL_SEPARATOR = "|"
MOST_CLASS_NUMBERS = 1_000_000  # a higher number is an id: ImageNet-21k has 21,843 classes

Label = int | str


@dataclass(frozen=True)
class LabelList:
    """A list of labels; `class_names` is a text file with the name of class 0, 1, ... on a line each."""

    file: Path  # a .csv or .jsonl file
    path_column: str = "path"  # column (CSV) or key (JSONL) of the image's path, relative to the source's folder
    label_column: str = "label"  # column or key of its label or labels
    class_names: Path | None = None

    def as_json(self) -> dict[str, str | None]:
        """The list with absolute paths."""
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in vars(self).items()}


class _Row(NamedTuple):
    line: int
    path: str
    labels: tuple[Label, ...]


def label_list_source(root: Path, labels: LabelList) -> Source:
    """The images that `labels` names below `root`, all as split train.

    Raises UserError, naming file and lines, for a list that cannot be read, a path that leads outside, is missing or is
    named twice, and a label that is not a class.
    """
    problems: list[str] = []
    is_multi, rows = _read_rows(labels, root=root, problems=problems)
    if not rows and not problems:
        raise UserError(f"{labels.file}: it names no image; each line should have a path and a label")
    lines: dict[str, int] = {}
    for row in rows:
        if (before := lines.setdefault(row.path, row.line)) != row.line:
            where = f"{labels.file}, line {row.line}: {one_line(row.path)}"
            problems.append(f"{where} is on line {before} already; name each image once")
    refuse_all(problems)
    numbers, classes = _number_labels(rows, labels)
    images = FileImages(root=root, files=[row.path for row in rows], labels=_label_array(numbers, is_multi=is_multi))
    absent = np.flatnonzero(images.num_bytes == ABSENT)
    if len(absent):
        row = rows[int(absent[0])]
        more = f" ({len(absent) - 1:,} more are missing)" if len(absent) > 1 else ""
        raise UserError(
            f"{labels.file}, line {row.line}: {one_line(row.path)} is not a file below {root}{more}; paths are "
            "relative to SOURCE: correct SOURCE or these lines"
        )
    notes: tuple[str, ...] = ()
    if left := [path for path in walk_images(root) if path not in lines]:
        what = f"{len(left):,} images below {root}, which were left out (the first: {left[0]!a})"
        notes = (f"{labels.file} does not name {what}",)
    return Source(
        spec=str(root.resolve()),
        classes=classes,
        splits={"train": images},
        notes=notes,
        kind="multi" if is_multi else "single",
        empty_classes="report",
    )


def clean_path(text: str, *, root: Path) -> str:
    """A path below `root` as listings spell it: `./a//b.jpg` -> `a/b.jpg`, `ROOT/a/b.jpg` -> `a/b.jpg`.

    Raises ValueError if it leads outside. An absolute path may spell `root` as given or resolved; others are resolved.
    """
    path = PurePosixPath(text)
    if path.is_absolute() and "\0" not in text:
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
    """Number and text of each non-blank line. Raises UserError if the file is missing or not UTF-8."""
    try:
        with open(file, encoding="utf-8-sig") as stream:
            for line, text in enumerate(stream, start=1):
                if text.strip():
                    yield line, text.rstrip("\n")
    except OSError as error:
        raise UserError(f"{file}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: the file is not UTF-8 text; save it as UTF-8") from None


def _read_rows(labels: LabelList, *, root: Path, problems: list[str]) -> tuple[bool, list[_Row]]:
    """(is_multi, rows with labels as in the file); bad rows go to `problems` instead."""
    match labels.file.suffix.lower():
        case ".csv":
            found = list(_csv_rows(labels))
            is_multi = any(LABEL_SEPARATOR in value for _, _, value in found)
            entries = [(line, path, [value]) for line, path, value in found]
            if is_multi:
                split = (
                    (line, path, value.split(LABEL_SEPARATOR) if value.strip() else []) for line, path, value in found
                )
                entries = [(line, path, [label.strip() for label in its]) for line, path, its in split]
            names = set(_class_names(labels.class_names) if labels.class_names else ())
            texts = {text for _, _, values in entries for text in values}
            if not texts <= names and all(re.fullmatch(r"[0-9]{1,18}", text) for text in texts):
                entries = [(line, path, [int(text) for text in values]) for line, path, values in entries]
        case ".jsonl":
            found = list(_jsonl_rows(labels))
            is_multi = any(isinstance(value, list) for _, _, value in found)
            entries = [(line, path, value if isinstance(value, list) else [value]) for line, path, value in found]
        case _:
            raise UserError(f"{labels.file}: a list of labels must be a .csv or .jsonl file; convert it or rename it")
    rows: list[_Row] = []
    for line, path, values in entries:
        try:
            rows.append(_row(line, path, values, root=root))
        except ValueError as error:
            problems.append(f"{labels.file}, line {line}: {error}; correct that line")
    return is_multi, rows


def _row(line: int, path: Any, values: list[Any], *, root: Path) -> _Row:
    if not isinstance(path, str):
        raise ValueError(f"the path {brief(path)} is not text")
    for value in values:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | str)
            or (isinstance(value, int) and not 0 <= value < 10**18)
        ):
            raise ValueError(f"the label {brief(value)} is neither a class name nor a class number")
        if isinstance(value, str) and not (value and value.isprintable()):
            raise ValueError(f"the label {value!a} is {'a name that cannot be written' if value else 'empty'}")
    return _Row(line, clean_path(path, root=root), tuple(dict.fromkeys(values)))


def _csv_rows(labels: LabelList) -> Iterator[tuple[int, str, str]]:
    try:
        with open(labels.file, encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            header = next(reader, [])
            try:
                path, label = header.index(labels.path_column), header.index(labels.label_column)
            except ValueError:
                missing = next(name for name in (labels.path_column, labels.label_column) if name not in header)
                raise UserError(
                    f"{labels.file}: there is no column {missing!r} in its first line, which has "
                    f"{', '.join(map(repr, header)) or 'none'}; choose with --path-column and --label-column"
                ) from None
            for fields in reader:
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise UserError(
                        f"{labels.file}, line {reader.line_num}: {len(fields)} fields where the first line has "
                        f"{len(header)}; correct that line"
                    )
                yield reader.line_num, fields[path], fields[label]
    except OSError as error:
        raise UserError(f"{labels.file}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{labels.file}: the file is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{labels.file}: not a readable CSV file ({error}); correct it") from None


def _jsonl_rows(labels: LabelList) -> Iterator[tuple[int, Any, Any]]:
    for line, text in read_lines(labels.file):
        try:
            entry = parse_json(text)
        except ValueError as error:
            raise UserError(f"{labels.file}, line {line}: {error}; correct that line") from None
        for key in (labels.path_column, labels.label_column):
            if not isinstance(entry, dict) or key not in entry:
                raise UserError(
                    f"{labels.file}, line {line}: there is no key {key!r}; choose with --path-column and --label-column"
                )
        yield line, entry[labels.path_column], entry[labels.label_column]


def _class_names(file: Path) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for line, text in read_lines(file):
        name = text.strip()
        if name in names or not name.isprintable():
            reason = f"is on line {names[name]} already" if name in names else "cannot be written"
            raise UserError(f"{file}, line {line}: the name {name!a} {reason}; give each class a name of its own")
        names[name] = line
    if not names:
        raise UserError(f"{file}: there is no name in it; write the name of a class on each line")
    return tuple(names)


def _number_labels(rows: list[_Row], labels: LabelList) -> tuple[list[list[int]], tuple[str, ...]]:
    kinds = {type(label): row for row in rows for label in row.labels}
    if len(kinds) > 1:
        line = max(row.line for row in kinds.values())
        raise UserError(f"{labels.file}, line {line}: names and numbers of classes are mixed; use one of them")
    if labels.class_names is not None:
        classes = _class_names(labels.class_names)
    elif int in kinds:
        highest, row = max(((label, row) for row in rows for label in row.labels), key=lambda pair: pair[0])
        assert isinstance(highest, int)
        if highest >= MOST_CLASS_NUMBERS:
            raise UserError(
                f"{labels.file}, line {row.line}: the number {highest} would make {highest + 1:,} classes; "
                f"use names of classes, or give them with --class-names"
            )
        classes = tuple(str(number) for number in range(highest + 1))
    else:
        classes = tuple(sorted({str(label) for row in rows for label in row.labels}))
    if not classes:
        raise UserError(f"{labels.file}: no image has a label; correct the list")
    known: dict[Label, int] = {name: number for number, name in enumerate(classes)}
    if int in kinds:
        known = {number: number for number in range(len(classes))}
    return [[_known(label, row, known, labels) for label in row.labels] for row in rows], classes


def _known(label: Label, row: _Row, known: dict[Label, int], labels: LabelList) -> int:
    if label in known:
        return known[label]
    if isinstance(label, int):
        reason = f"the number {label} is not a class: {labels.class_names} has {len(known)}, from 0 to {len(known) - 1}"
    else:
        near = get_close_matches(label, [str(name) for name in known], n=1)
        reason = f"{labels.class_names} has no class {label!r}" + (f", did you mean {near[0]!r}" if near else "")
    raise UserError(f"{labels.file}, line {row.line}: {reason}; correct one of the two files")


def _label_array(numbers: list[list[int]], *, is_multi: bool) -> NDArray[np.int64]:
    if not is_multi:
        return np.array([row[0] for row in numbers], dtype=np.int64)
    array = np.full((len(numbers), max(map(len, numbers))), -1, dtype=np.int64)
    for i, row in enumerate(numbers):
        array[i, : len(row)] = sorted(row)
    return array
