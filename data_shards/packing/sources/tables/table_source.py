"""Open parquet and Arrow files as a source: a hub's data set, img2dataset's parquet, any table with bytes or paths.

Row groups are listed by workers (see `table_listing`). Splits are told by folders or file names, as on a hub:
train/, data/train-00000-of-00004.parquet. Images have their paths in the table as names if these are unique, or else
TABLE/ROW. Scripts and other files of a data set are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.base import SPLITS, LeftOut, Source, SplitName, num_shared
from shardvit.data_shards.packing.sources.located import ABSENT
from shardvit.data_shards.packing.sources.tables.columns import Columns, find_columns, open_schema
from shardvit.data_shards.packing.sources.tables.joined_labels import key_hashes
from shardvit.data_shards.packing.sources.tables.table_listing import PATH_MARK, TablePart, TableParts, list_table
from shardvit.data_shards.packing.sources.tars.sample_listing import TarSamples, state_of
from shardvit.data_shards.packing.sources.tars.samples import (
    SampleOptions,
    Unfit,
    list_parts,
    listing_folder,
    sample_source,
)
from shardvit.data_shards.packing.sources.tree import list_tree, local_tree
from shardvit.data_shards.reading.external_shards import read_classes
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.shard_index import Texts

_OPENERS = 16
_SPLIT_OF_NAME = re.compile(rf"({'|'.join(SPLITS)})(?=[-._]|$)")


def table_source(
    spec: str, tables: Sequence[str], options: SampleOptions, *, unpacking: Unpacking, unfit: Unfit, key: str = ""
) -> Source:
    """Open tables (absolute paths, URLs). With `key`, they are unlabelled, and named by that column if they have it.

    UserError for damaged tables, several data sets in one folder, unfit columns, or rows without an image or a label.
    """
    if (options.label, options.kind) != (None, "single"):
        raise UserError(f"{redacted(spec)}: --label and --label-kind are for tars; name a column with --label-column")
    root, names = _relative(tables)
    splits = _splits(spec, names)
    with ThreadPoolExecutor(_OPENERS) as pool:
        opened = list(pool.map(open_schema, tables))
        states = list(pool.map(state_of, tables))
    label = "" if key else options.label_column
    found = [
        find_columns(schema, image=options.image_column, label=label, key=key, table=redacted(table))
        for table, (schema, _) in zip(tables, opened, strict=True)
    ]
    columns = found[0]
    if others := [table for table, its in zip(tables, found, strict=True) if its != columns]:
        raise UserError(f"{redacted(others[0])}: it has other columns or classes than {names[0]}; give one data set")
    parts: list[tuple[SplitName, TablePart]] = [
        (split, TablePart(table, stamp, name, rows))
        for table, name, split, (_, stamp), (_, each) in zip(tables, names, splits, states, opened, strict=True)
        for rows in each
    ]
    request = TableParts(tuple(part for _, part in parts), columns, root, listing_folder(unpacking).location)
    shown = [f"{redacted(part.location)} from row {part.rows.begin:,}" for _, part in parts]
    listed = list_parts(spec, list_table, request, shown, unpacking=unpacking)
    is_spooled = any(each.files.containers[0].kind == "tar" for each in listed)
    listed = _named(listed) if is_spooled else _found(listed, columns, root)
    full = {"train", *(split for (split, _), each in zip(parts, listed, strict=True) if len(each.labels))}
    classes = ("",) if not columns.label else read_classes(options.class_names) if options.class_names else None
    source = sample_source(
        spec,
        [(split, each) for (split, _), each in zip(parts, listed, strict=True) if split in full],
        LabelSpec("json", columns.label or "label", columns.kind),
        classes=classes or columns.classes,
        unfit=unfit,
    )
    bare = tuple(f"{split}: left out, none of it has a label" for split in sorted({*splits} - full))
    return replace(source, notes=(*source.notes, *bare))


def _relative(tables: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that the tables share, and their paths below it; their splits stay in these."""
    folders = [table.split("/")[:-1] for table in tables]
    shared = num_shared(folders)
    if len(tables) == 1 and shared and folders[0][-1] in SPLITS:
        shared -= 1
    root = "/".join(folders[0][:shared])
    return root, [redacted(table[len(root) + 1 :]) for table in tables]


def _splits(spec: str, names: Sequence[str]) -> list[SplitName]:
    found: list[str | None] = []
    sets = set[str]()
    for name in names:
        *folders, last = PurePosixPath(name).parts
        match = _SPLIT_OF_NAME.match(last)
        found.append(next((each for each in folders if each in SPLITS), match[1] if match else None))
        sets.add("/".join(each for each in folders if each not in SPLITS))
    if len(sets) > 1:
        raise UserError(
            f"{redacted(spec)}: it holds several data sets ({', '.join(sorted(sets)[:8])}); give one folder of them"
        )
    if len({*found}) == 1:
        return ["train"] * len(names)
    if None in found or "train" not in found:
        told = ", ".join(sorted({str(each) for each in found if each}))
        fault = f"{names[found.index(None)]} is of no split" if None in found else "none is of train"
        raise UserError(
            f"{redacted(spec)}: tables are of {told}, but {fault}; give one folder or pattern of those you want"
        )
    return [SPLITS[each] for each in found if each]


def _named(listed: Sequence[TarSamples]) -> list[TarSamples]:
    """Name the images by the paths or keys that the tables give, if these are unique, or else by table and row."""

    def names(each: TarSamples, at: int) -> list[str]:
        return [name.partition(PATH_MARK)[at] for name in each.files.names]

    usable = all(_is_name(name) for each in listed for name in names(each, 2))
    if usable:
        hashes = np.concatenate([key_hashes(names(each, 2)) for each in listed])
        usable = len(np.unique(hashes)) == len(hashes)
    chosen = (Texts.of(names(each, 2 if usable else 0)) for each in listed)
    return [replace(each, files=replace(each.files, names=its)) for each, its in zip(listed, chosen, strict=True)]


def _is_name(text: str) -> bool:
    return text.isprintable() and not {"", ".", ".."} & {*text.split("/")} and "\\" not in text


def _found(listed: Sequence[TarSamples], columns: Columns, root: str) -> list[TarSamples]:
    """Find the files that the tables name; UserError if a file is named twice."""
    names = Texts.join([each.files.names for each in listed])
    if len(unique := np.unique(key_hashes(names[:]), return_index=True)[1]) < len(names):
        name = names[int(np.setdiff1d(np.arange(len(names)), unique)[0])]
        raise UserError(f"{redacted(root)}: column {columns.image!r} names {name} twice; name each image once")
    tree = local_tree(local_path(root)) if is_local(root) else list_tree(root)
    made: list[TarSamples] = []
    for each in listed:
        files = tree.files(each.files.names[:])
        there = np.flatnonzero(files.sizes != ABSENT)
        lost = np.setdiff1d(np.arange(len(files)), there)
        reasons = (LeftOut(files.names[row], f"is not a file below {redacted(root)}") for row in lost.tolist())
        made.append(replace(each, files=files, left_out=(*each.left_out, *reasons)).take(there))
    return made
