"""Join labels onto listed images by key, from a table that is read once in order and never held: 10^8 rows of CSV,
parquet, Arrow or JSONL.

A key is an image's path in SOURCE, or its name without folder and ending (a sample's key) where that is unique. Memory
is 70 bytes an image at its peak and the different labels; time 2 to 4 µs a row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import ImageSet, Int64s, Source
from shardvit.data_shards.packing.sources.label_list import (
    LabelList,
    LabelRow,
    at_line,
    checked_labels,
    jsonl_rows,
    label_array,
    number_labels,
    parsed_texts,
)
from shardvit.data_shards.packing.sources.tables.columns import is_table, open_schema, read_batches, reading
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.text import counted, named, one_line

_MOST_HELD_BYTES = 1 << 28  # of a list that is held, so that mistakes are told by line
_ROWS_AT_ONCE = 1 << 16


def is_held(labels: LabelList) -> bool:
    """True for a list that `label_list` reads, which tells mistakes by line; False for large lists and tables."""
    file = labels.file
    return not is_table(file.name) and not (file.is_file() and file.stat().st_size > _MOST_HELD_BYTES)


def key_hashes(keys: Sequence[str]) -> NDArray[np.uint64]:
    """Hash texts, each to 8 bytes; the same in every process."""
    from pandas import util

    hashed: NDArray[np.uint64] = util.hash_array(np.array(keys, dtype=object), categorize=False)  # pyright: ignore
    return hashed


def join_labels(source: Source, labels: LabelList) -> Source:
    """Replace the labels of a source; images without one are left out and told.

    UserError if the table is damaged, names images twice, or none of the source.
    """
    names = Texts.join(
        [
            images.files.names.take(images.rows[at : at + _ROWS_AT_ONCE])
            for images in source.splits.values()
            for at in range(0, len(images), _ROWS_AT_ONCE)
        ]
    )
    keys = _Keys.of(names)
    codes = np.full(len(names), -1, np.int32)
    known: dict[str | int | tuple[Any, ...], int] = {}
    first = list[int]()
    repeated, strangers, num_rows = list[int](), list[str](), 0
    num_strangers = 0
    for texts, values in _batches(labels):
        rows = keys.find(texts)
        unknown = np.flatnonzero(rows < 0)
        num_strangers += len(unknown)
        strangers += [texts[row] for row in unknown[: 1 - len(strangers)].tolist()]
        hits = np.flatnonzero(rows >= 0)
        its = rows[hits]
        is_new = np.zeros(len(its), bool)
        is_new[np.unique(its, return_index=True)[1]] = True
        repeated += its[~is_new | (codes[its] >= 0)].tolist()
        for at, row in zip(hits.tolist(), its.tolist(), strict=True):
            if (value := values[at]) is not None:
                value = tuple(value) if isinstance(value, list) else value
                if (code := known.setdefault(value, len(known))) == len(first):
                    first.append(num_rows + at + 1)
                codes[row] = code
        num_rows += len(texts)
    if repeated:
        what = named([names[row] for row in repeated], most=3)
        raise UserError(
            f"{labels.file}: {counted(len(repeated), 'row')} of an image that another row names ({what}); keep one"
        )
    if not {*known} - {""}:
        example = f" such as {one_line(strangers[0])}" if strangers else ""
        raise UserError(
            f"{labels.file}: none of its {counted(num_rows, 'row')}{example} names an image of {source.spec} such as "
            f"{names[0] if len(names) else 'any'} or has a label; choose the column with --path-column"
        )
    numbers, classes, is_multi = _numbers([*known], first, labels)
    if not is_multi and (empty := known.get("")) is not None:
        codes[codes == empty] = -1
    return _labelled(source, labels, codes, numbers, classes, is_multi, (num_strangers, strangers), names)


@dataclass(frozen=True)
class _Keys:
    """Hashes of two spellings of each name, sorted, and the rows they stand for."""

    names: Texts
    hashes: NDArray[np.uint64]
    rows: NDArray[np.int32]

    @classmethod
    def of(cls, names: Texts) -> _Keys:
        pieces = [names[at : at + _ROWS_AT_ONCE] for at in range(0, len(names), _ROWS_AT_ONCE)]
        whole = np.concatenate([np.zeros(0, np.uint64), *map(key_hashes, pieces)])
        short = np.concatenate([np.zeros(0, np.uint64), *(key_hashes([*map(_short, each)]) for each in pieces)])
        others = np.flatnonzero(short != whole)
        hashes = np.concatenate([whole, short[others]])
        rows = np.concatenate([np.arange(len(whole), dtype=np.int32), others.astype(np.int32)])
        del whole, short, others
        order = np.argsort(hashes)
        return cls(names, hashes[order], rows[order])

    def find(self, keys: Sequence[str]) -> Int64s:
        """Find the row of each key; -1 for none."""
        found = np.full(len(keys), -1, np.int64)
        hashes = key_hashes(keys)
        at = np.searchsorted(self.hashes, hashes)
        inside = np.flatnonzero(at < len(self.hashes))
        hits = inside[self.hashes[at[inside]] == hashes[inside]]
        found[hits] = self.rows[at[hits]]
        is_shared = self.hashes[np.minimum(at[hits] + 1, len(self.hashes) - 1)] == hashes[hits]
        is_shared &= at[hits] + 1 < len(self.hashes)
        names = self.names.take(found[hits])[:]
        for number, name, shared in zip(map(int, hits), names, is_shared.tolist(), strict=True):
            if shared or (keys[number] != name and keys[number] != _short(name)):
                found[number] = self._find_slowly(keys[number], int(at[number]))
        return found

    def _find_slowly(self, key: str, first: int) -> int:
        """Find a key among equal hashes: the image of that path, or the only one of that name."""
        last, by_name = first, list[int]()
        while last < len(self.hashes) and self.hashes[last] == self.hashes[first]:
            name = self.names[row := int(self.rows[last])]
            if key == name:
                return row
            by_name += [row] if key == _short(name) else []
            last += 1
        return by_name[0] if len(by_name) == 1 else -1


def _short(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _batches(labels: LabelList) -> Iterator[tuple[list[str], list[Any]]]:
    columns = [labels.path_column, labels.label_column]
    if labels.file.suffix.lower() == ".jsonl":
        found = jsonl_rows(labels)
        while lines := [*islice(found, _ROWS_AT_ONCE)]:
            yield [str(path) for _, path, _ in lines], [value for *_, value in lines]
        return
    is_csv = labels.file.suffix.lower() == ".csv"
    if not is_csv and not is_table(labels.file.name):
        raise UserError(f"{labels.file}: a table of labels must be a .csv, .jsonl, .parquet or .arrow file; convert it")
    with reading(str(labels.file)):
        header = _header(labels) if is_csv else open_schema(str(labels.file))[0].names
        if missing := [name for name in columns if header.count(name) != 1]:
            raise UserError(
                f"{labels.file}: there is no single column {missing[0]!r} ({', '.join(header[:20])}); choose with "
                "--path-column and --label-column"
            )
        for batch in _csv_batches(labels) if is_csv else read_batches(str(labels.file), columns, rows=_ROWS_AT_ONCE):
            paths, values = (batch[name].to_pylist() for name in columns)
            yield ["" if path is None else str(path) for path in paths], values


def _header(labels: LabelList) -> list[str]:
    with open(labels.file, encoding="utf-8-sig", newline="") as stream:
        return next(csv.reader(stream), [])


def _csv_batches(labels: LabelList) -> Any:
    from pyarrow import csv as tables
    from pyarrow import string

    columns = dict.fromkeys((labels.path_column, labels.label_column), string())
    return tables.open_csv(
        labels.file,
        parse_options=tables.ParseOptions(newlines_in_values=True),
        convert_options=tables.ConvertOptions(include_columns=[*columns], column_types=columns),
    )


def _numbers(values: list[Any], first: list[int], labels: LabelList) -> tuple[list[list[int]], tuple[str, ...], bool]:
    """Number the different labels; UserError names the row where an unfit one stands first."""
    is_csv = labels.file.suffix.lower() == ".csv"
    is_multi, each = parsed_texts(values, labels) if is_csv else (any(isinstance(value, tuple) for value in values), [])
    if not is_multi:  # what stands for the empty ones is not used
        values = [value if value != "" else next(filter(None, values)) for value in values]
    if not is_csv:
        each = [[*value] if isinstance(value, tuple) else [value] for value in values]
    elif not is_multi:
        each = parsed_texts(values, labels)[1]
    rows = list[LabelRow]()
    for number, row in zip(first, each, strict=True):
        with at_line(labels.file, number):
            rows.append(LabelRow(number, "", checked_labels(row)))
    numbers, classes = number_labels(rows, labels)
    return numbers, classes, is_multi


def _labelled(
    source: Source,
    labels: LabelList,
    codes: NDArray[np.int32],
    numbers: list[list[int]],
    classes: tuple[str, ...],
    is_multi: bool,
    strangers: tuple[int, list[str]],
    names: Texts,
) -> Source:
    table, begin, splits = label_array(numbers, is_multi=is_multi), 0, dict[Any, ImageSet]()
    for split, images in source.splits.items():
        its = codes[begin : begin + len(images)]
        kept = np.flatnonzero(its >= 0)
        if len(kept) or split == "train":
            splits[split] = images.take(kept, table[its[kept]])
        begin += len(images)
    notes = [*source.notes]
    if len(without := np.flatnonzero(codes < 0)):
        what = f"{counted(len(without), 'image')} of {source.spec}, left out (the first: {names[int(without[0])]!a})"
        notes.append(f"{labels.file} has no label for {what}")
    if strangers[0]:
        what = f"of no image there (the first: {one_line(strangers[1][0])})"
        notes.append(f"{labels.file}: {counted(strangers[0], 'row')} {what}")
    kind = "multi" if is_multi else "single"
    return replace(source, classes=classes, splits=splits, notes=tuple(notes), kind=kind, empty_classes="report")
