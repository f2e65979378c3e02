"""Open tars of samples as a source: other tools' (img2dataset, webdataset, timm), or a packed set's to pack again.

Each tar is listed by a worker (see `sample_listing`); here are only names, places and labels: 40 bytes an image and its
name. Samples are named STEM/KEY.EXT, the stem being the tar's name below the folder that all tars share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking, stem
from shardvit.data_shards.packing.sources.base import SPLITS, ImageSet, LeftOut, Source, SplitName, num_shared
from shardvit.data_shards.packing.sources.decompress import gunzipped, open_bytes
from shardvit.data_shards.packing.sources.label_list import label_array
from shardvit.data_shards.packing.sources.located import join_located
from shardvit.data_shards.packing.sources.tars.sample_listing import (
    SampleTars,
    TarSamples,
    is_gzipped,
    list_tar,
    read_listing,
    state_of,
)
from shardvit.data_shards.progress_line import LINE_SECONDS
from shardvit.data_shards.reading.external_shards import found_classes, read_classes, unknown_label
from shardvit.data_shards.reading.indexing import PEEKED_TARS, demand_cls
from shardvit.data_shards.reading.tar_summary import FoundLabels, peek
from shardvit.data_shards.shards.holdout import rows_of
from shardvit.data_shards.shards.labels import LabelSpec, class_number
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.shards.shard_index import default_index_folder
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet, class_difference
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.text import counted
from shardvit.data_shards.vocabulary import SPLIT_FOLDERS, LabelKind

_PEEKED_BYTES = 1 << 22  # of a .tar.gz
_WORTH_PROCESSES_SECONDS = 4.0
ONLY_SAMPLES = (
    "--label and --label-kind are for tars of samples, --image-column and --label-column for tables, --class-names and "
    "--label-column also for --labels; leave them out"
)

Unfit = Literal["refuse", "skip"]
_Request = TypeVar("_Request")


@dataclass(frozen=True)
class SampleOptions:
    """Where a sample's label is, as in `ShardsSpec`; of a packed set, which samples (see `sets.where`)."""

    label: str | None = None  # "cls", "txt", "json:KEY" or "tar", the tar's name; None: `cls`, if it exists
    kind: LabelKind = "single"
    class_names: Path | None = None  # None: found in the labels
    where: str | None = None  # None: all
    image_column: str | None = None  # of a table; None: found
    label_column: str | None = None

    def as_json(self) -> dict[str, str | None] | None:
        """Format for pack.json; None for the defaults."""
        names = str(self.class_names.resolve()) if self.class_names else None
        return None if self == SampleOptions() else {**vars(self), "class_names": names}


def tar_source(
    spec: str,
    tars: Sequence[str],
    options: SampleOptions,
    *,
    root: str = "",
    unpacking: Unpacking,
    unfit: Unfit = "refuse",
) -> Source:
    """Open tars (paths, URLs) that have no manifest; in folders train and val, if all are in such.

    With `root`, `tars` are names of folders below it ("": itself), whose samples are in files. UserError names a tar
    that is missing, damaged or unsafe, or samples without an image and a label that `unfit` refuses, or says which
    label to give.
    """
    try:
        is_named = options.label == "tar"
        labels = LabelSpec.parse("cls" if is_named else options.label or "cls", kind=options.kind)
    except ValueError as error:
        raise UserError(f"--label: {error}") from None
    if options.label is None:
        demand_cls(map(_peeked, tars[:PEEKED_TARS]), source=redacted(spec), key="--label")
    stems = list(tars) if root else _stems(spec, tars)
    tars = [join(root, tar) if tar else root for tar in tars] if root else tars
    tops = [name.partition("/")[0] for name in stems]
    has_splits = "train" in tops and {*tops} <= {*SPLIT_FOLDERS}
    splits: list[SplitName] = [SPLITS[top] if has_splits else "train" for top in tops]
    listed = _list(spec, tars, stems, [None if is_named else labels] * len(tars), root=root, unpacking=unpacking)
    classes = None if options.class_names is None else read_classes(options.class_names)
    return sample_source(spec, [*zip(splits, listed, strict=True)], labels, classes=classes, unfit=unfit)


def set_source(sets: Mapping[SplitName, ShardSet], *, spec: str, unpacking: Unpacking) -> Source:
    """Open the samples that packed sets count, to pack them again; UserError if their classes differ."""
    first, *others = sets.values()
    for other in others:
        if difference := class_difference(first, other, called=(first.source, other.source)):
            raise UserError(f"{redacted(spec)}: its splits have different classes ({difference}); pack one of them")
    entries: list[tuple[SplitName, ShardEntry]] = [
        (split, entry) for split, each in sets.items() for entry in each.shards
    ]
    tars = [absolute(entry.url) for _, entry in entries]
    listed = _list(spec, tars, _stems(spec, tars), [entry.labels for _, entry in entries], unpacking=unpacking)
    parts: list[tuple[SplitName, TarSamples]] = [
        (split, samples if entry.subset is None else samples.take(rows_of(entry.subset)))
        for (split, entry), samples in zip(entries, listed, strict=True)
    ]
    return sample_source(spec, parts, entries[0][1].labels, classes=first.classes, unfit="refuse")


def _peeked(location: str) -> tuple[set[str], list[str]]:
    num_bytes, stamp = state_of(location)
    if not is_gzipped(location):
        with open_bytes(location, num_bytes, stamp=stamp) as read:
            return peek(read, num_bytes)
    with gunzipped(location) as stream:
        head = stream.read(_PEEKED_BYTES)
    return peek(lambda size, offset: head[offset : offset + size], len(head))


def _stems(spec: str, tars: Sequence[str]) -> list[str]:
    """Name each tar by its path below the folder that all share."""
    paths = [stem(redacted(tar)).split("/") for tar in tars]
    shared = num_shared(path[:-1] for path in paths)
    stems = ["/".join(path[shared:]) for path in paths]
    if len({*stems}) < len(stems):
        raise UserError(f"{redacted(spec)}: it names a tar twice, or two that differ in their ending alone; correct it")
    return stems


def _list(
    spec: str,
    tars: Sequence[str],
    stems: Sequence[str],
    labels: Sequence[LabelSpec | None],
    *,
    root: str = "",
    unpacking: Unpacking,
) -> list[TarSamples]:
    request = SampleTars(tuple(tars), tuple(stems), tuple(labels), listing_folder(unpacking).location, root)
    return list_parts(spec, list_tar, request, [redacted(tar) for tar in tars], unpacking=unpacking)


def absolute(location: str) -> str:
    """Make a path absolute; leave a URL."""
    return os.path.abspath(local_path(location).expanduser()) if is_local(location) else location


def listing_folder(unpacking: Unpacking) -> Folder:
    """Return the folder in which sources are listed."""
    return open_folder(unpacking.work or unpacking.folder or default_index_folder())


def list_parts(
    spec: str, work: Callable[[_Request, int], str], request: _Request, parts: Sequence[str], *, unpacking: Unpacking
) -> list[TarSamples]:
    """List the parts of a source, which are shown by these names, on the engine; UserError if a worker crashed."""
    done = [0, time.monotonic()]

    def show(file: str) -> None:
        done[0] += 1
        if time.monotonic() - done[1] > LINE_SECONDS:
            done[1] = time.monotonic()
            unpacking.report(f"{redacted(spec)}: {done[0]:,} of {counted(len(parts), 'part')} listed")

    work(request, 0)  # a process takes 0.2 to 2 s to start
    is_quick = (time.monotonic() - done[1]) * len(parts) < _WORTH_PROCESSES_SECONDS
    engine = local_engine(1) if is_quick else unpacking.engine or local_engine()
    files = engine.run(work, request, range(len(parts)), done=show)
    if missing := [name for number, name in enumerate(parts) if number not in files]:
        raise UserError(f"{missing[0]}: the process that listed it crashed; is there enough memory?")
    return [read_listing(listing_folder(unpacking), files[number]) for number in range(len(parts))]


def sample_source(
    spec: str,
    parts: Sequence[tuple[SplitName, TarSamples]],
    labels: LabelSpec,
    *,
    classes: tuple[str, ...] | None,
    unfit: Unfit,
) -> Source:
    """Make the source of listed samples; UserError for damage and left-out samples unless `unfit` skips them."""
    shown = redacted(spec)
    damaged = [LeftOut(each.files.path, each.damage, split) for split, each in parts if each.damage]
    left_out = [one._replace(split=split) for split, each in parts for one in each.left_out]
    notes = [f"{each.path}: {each.reason}" for each in damaged]
    if left_out:
        verb, num_rows = "cannot be used" if unfit == "refuse" else "left out", sum(len(its.labels) for _, its in parts)
        of_all = counted(len(left_out) + num_rows, "sample" if left_out[0].row is None else "row")
        notes.append(f"{shown}: {len(left_out):,} of {of_all} {verb} ({'; '.join(map(str, left_out[:3]))})")
    if notes and unfit == "refuse":
        more = f" (and {len(notes) - 1:,} more)" if len(notes) > 1 else ""
        raise UserError(f"{notes[0]}{more}; mend it, or pass over what is unusable with --skip-unreadable")
    known: dict[str, int] = {}
    codes = [np.array([known.setdefault(each, len(known)) for each in its.values], int)[its.labels] for _, its in parts]
    values = [json.loads(text) for text in known]
    lengths = np.array([*map(len, values)], int)
    found = replace(FoundLabels.of(values), num_values=sum(int(lengths[its].sum()) for its in codes))
    if not sum(map(len, codes)):
        raise UserError(f"{shown}: there is no sample in it" + "".join(f" ({note})" for note in notes))
    if classes is None:
        classes = found_classes(found, labels, source=shown)
    elif unknown := unknown_label(found, classes, labels=labels):
        raise UserError(f"{shown}: the label {unknown} is none of the {len(classes)} classes; correct --class-names")
    names = {name: number for number, name in enumerate(classes)}
    numbers = [[*{class_number(one, labels, names, len(names)) for one in each}] for each in values]
    table = label_array(numbers, is_multi=labels.kind == "multi")
    splits: dict[SplitName, ImageSet] = {}
    for split in ("train", "val", "test"):
        if its := [number for number, (its_split, _) in enumerate(parts) if its_split == split]:
            files = join_located(shown, [parts[number][1].files for number in its])
            chosen = table[np.concatenate([codes[number] for number in its])]
            splits[split] = ImageSet(files, np.arange(len(files)), chosen)
    return Source(
        absolute(spec) if is_local(spec) else shown,
        classes,
        splits,
        notes=tuple(notes),
        left_out=(*damaged, *left_out),
        kind=labels.kind,
        empty_classes="report",
    )
