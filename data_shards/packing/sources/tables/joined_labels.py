"""Join labels onto listed images by key, from a table that is read once in order and never held: 10^8 rows of CSV,
parquet, Arrow or JSONL.

A key is an image's path in SOURCE, or its name without folder and ending (a sample's key) where that is unique. Memory
is 70 bytes an image at its peak and the different labels; time 2 to 4 µs a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import ImageSet, Int64s, Source, SplitName
from shardvit.data_shards.packing.sources.label_list import (
    LabelList,
    LabelRow,
    at_line,
    checked_labels,
    label_array,
    number_labels,
    parsed,
    read_entries,
)
from shardvit.data_shards.packing.sources.tables.columns import (
    demand_column,
    is_table,
    open_schema,
    read_batches,
    reading,
)
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.text import counted, named, one_line

_MOST_HELD_BYTES = 1 << 28  # of a list that is held, so that mistakes are told by line
_ROWS_AT_ONCE = 1 << 16
_ABSENT, _EMPTY = -1, -2  # codes of labels: no row, or one without a label


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
    pieces = [
        images.files.names.take(images.rows[at : at + _ROWS_AT_ONCE])
        for images in source.splits.values()
        for at in range(0, len(images), _ROWS_AT_ONCE)
    ]
    names = Texts.join(pieces)
    del pieces
    codes, known, notes = _matched(names, labels, called=source.spec)
    is_multi, parts = parsed([value for value, _ in known], labels)
    rows = list[LabelRow]()
    for (_, line), values in zip(known, parts, strict=True):
        with at_line(labels.file, line):
            rows.append(LabelRow(line, "", checked_labels(values)))
    numbers, classes = number_labels(rows, labels)
    if is_multi:
        codes[codes == _EMPTY] = len(numbers)
        numbers.append([])
    table, begin, splits = label_array(numbers, is_multi=is_multi), 0, dict[SplitName, ImageSet]()
    for split, images in source.splits.items():
        its = codes[begin : begin + len(images)]
        kept = np.flatnonzero(its >= 0)
        if len(kept) or split == "train":
            splits[split] = images.take(kept, table[its[kept]])
        begin += len(images)
    if len(without := np.flatnonzero(codes < 0)):
        what = f"{counted(len(without), 'image')} of {source.spec}, left out (the first: {names[int(without[0])]!a})"
        notes = [f"{labels.file} has no label for {what}", *notes]
    kind, notes = "multi" if is_multi else "single", [*source.notes, *notes]
    return replace(source, classes=classes, splits=splits, notes=tuple(notes), kind=kind, empty_classes="report")


def _matched(
    names: Texts, labels: LabelList, *, called: str
) -> tuple[NDArray[np.int32], list[tuple[Any, int]], list[str]]:
    """Find each image's row: return the codes of their labels (`_ABSENT`, `_EMPTY`), the different labels with their
    lines, and notes."""
    keys, codes = _Keys.of(names), np.full(len(names), _ABSENT, np.int32)
    known: dict[Any, tuple[int, int]] = {}  # label: code, line
    repeated, stranger, num_strangers, num_rows = list[int](), "", 0, 0
    for lines, texts, values in _batches(labels):
        found = keys.find(texts)
        unknown, hits = np.flatnonzero(found < 0), np.flatnonzero(found >= 0)
        if not num_strangers and len(unknown):
            stranger = one_line(texts[int(unknown[0])])
        num_strangers, num_rows = num_strangers + len(unknown), num_rows + len(texts)
        its = found[hits]
        is_new = np.zeros(len(its), bool)
        is_new[np.unique(its, return_index=True)[1]] = True
        repeated += its[~is_new | (codes[its] != _ABSENT)].tolist()
        for at, row in zip(hits.tolist(), its.tolist(), strict=True):
            value = tuple(values[at]) if isinstance(values[at], list) else values[at]
            if value is not None:
                codes[row] = known.setdefault(value, (len(known), lines[at]))[0] if value != "" else _EMPTY
    if repeated:
        what = named([names[row] for row in repeated], most=3)
        raise UserError(
            f"{labels.file}: {counted(len(repeated), 'row')} of an image that another row names ({what}); keep one"
        )
    if not known:
        example = f" such as {stranger}" if stranger else ""
        raise UserError(
            f"{labels.file}: none of its {counted(num_rows, 'row')}{example} names an image of {called} such as "
            f"{names[0] if len(names) else 'any'} or has a label; choose the column with --path-column"
        )
    what = f"{counted(num_strangers, 'row')} of no image there (the first: {stranger})"
    notes = [f"{labels.file}: {what}"] if num_strangers else []
    return codes, [(value, line) for value, (_, line) in known.items()], notes


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
        found, hashes = np.full(len(keys), -1, np.int64), key_hashes(keys)
        first, last = (np.searchsorted(self.hashes, hashes, side=side) for side in ("left", "right"))
        hits = np.flatnonzero(first < last)
        found[hits] = self.rows[first[hits]]
        names, is_shared = self.names.take(found[hits])[:], (last - first > 1)[hits].tolist()
        for number, name, shared in zip(hits.tolist(), names, is_shared, strict=True):
            if shared or keys[number] not in (name, _short(name)):
                found[number] = self._among(keys[number], self.rows[first[number] : last[number]].tolist())
        return found

    def _among(self, key: str, rows: list[int]) -> int:
        """Find a key among rows of equal hashes: the image of that path, or the only one of that name."""
        whole = [row for row in rows if self.names[row] == key]
        short = {row for row in rows if _short(self.names[row]) == key}
        return whole[0] if whole else short.pop() if len(short) == 1 else -1


def _short(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _batches(labels: LabelList) -> Iterator[tuple[Sequence[int], list[str], list[Any]]]:
    """Yield lines (of a table, rows from 1), paths, and labels."""
    if not is_table(location := str(labels.file)):
        entries = read_entries(labels)
        while some := [*islice(entries, _ROWS_AT_ONCE)]:
            lines, paths, values = ([*each] for each in zip(*some, strict=True))
            yield lines, [*map(str, paths)], values
        return
    columns, begin = [labels.path_column, labels.label_column], 1
    with reading(location):
        schema = open_schema(location)[0]
        for name, flag in zip(columns, ("--path-column", "--label-column"), strict=True):
            demand_column(schema, name, flag=flag, table=location)
        for batch in read_batches(location, columns, rows=_ROWS_AT_ONCE):
            paths, values = (batch[name].to_pylist() for name in columns)
            yield range(begin, begin + len(paths)), ["" if path is None else str(path) for path in paths], values
            begin += len(paths)
