"""Recognise what is no folder of images on this machine: a URL, a pattern of tars, a packed set, tars of samples.

A folder of a store is listed once. Web servers have no listing, so there the tars are named by a pattern.
"""

from dataclasses import replace

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking, is_tar
from shardvit.data_shards.packing.sources.base import SUFFIXES, ImageSet, Source, SplitName
from shardvit.data_shards.packing.sources.folder import folder_source
from shardvit.data_shards.packing.sources.imagenet import is_class_tar
from shardvit.data_shards.packing.sources.label_list import LabelList, label_list_source
from shardvit.data_shards.packing.sources.tables.columns import TABLES, is_table
from shardvit.data_shards.packing.sources.tables.joined_labels import MOST_LISTED_BYTES, join_labels
from shardvit.data_shards.packing.sources.tables.table_source import table_source, tables_in
from shardvit.data_shards.packing.sources.tars.samples import SPLITS, SampleOptions, Unfit, set_source, tar_source
from shardvit.data_shards.packing.sources.tree import FolderTree, LocalTree, list_tree
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.location import PIPE, expand_braces, is_local, join, local_path, redacted
from shardvit.data_shards.shards.manifest import manifest_at, split_manifest
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.ranges import stat_url
from shardvit.data_shards.vocabulary import SPLIT_FOLDERS


def elsewhere_source(
    spec: str, options: SampleOptions, *, labels: LabelList | None, unpacking: Unpacking, unfit: Unfit
) -> Source | None:
    """Open a URL, a pattern, a packed set or tars of samples; None for any other folder or file of this machine."""

    def opened_tars(tars: list[str]) -> Source:
        if (options.image_column, options.label_column) != (None, None):
            raise UserError(f"{redacted(spec)}: --image-column and --label-column are for tables; tars have --label")
        chosen = options if labels is None else replace(options, label="tar")
        return _joined(tar_source(spec, tars, chosen, unpacking=unpacking, unfit=unfit), labels)

    def opened_tables(tables: list[str]) -> Source:
        key = labels.path_column if labels else ""
        return _joined(table_source(spec, tables, options, unpacking=unpacking, unfit=unfit, key=key), labels)

    if spec.startswith(PIPE):
        raise UserError(f"{redacted(spec)} is a command, whose output can be read only once; give the files themselves")
    path = local_path(spec).expanduser() if is_local(spec) else None
    if path is None or (("{" in spec or "::" in spec) and not path.exists()):
        tars = [
            str(local_path(each).expanduser().absolute()) if is_local(each) else each for each in expand_braces(spec)
        ]
        if all(map(is_tar, tars)):
            return opened_tars(tars)
        if all(map(is_table, tars)):
            return opened_tables(tars)
        if len(tars) > 1 or path is not None:
            shown = ", ".join((*SUFFIXES, *TABLES))
            raise UserError(f"{redacted(spec)}: a pattern stands for tars or tables ({shown}); give one folder")
    elif path.is_file() and is_table(spec):
        return opened_tables([str(path.absolute())])
    elif path.is_file() and is_tar(spec) and (options.label is not None or labels is not None):
        return opened_tars([str(path.absolute())])
    elif not path.is_dir() and split_manifest(spec)[0] == spec:
        return None
    if sets := _sets(spec):
        if options != SampleOptions():
            raise UserError(f"{redacted(spec)} is a packed set, which says its labels; leave out --label and the like")
        return _joined(set_source(sets, spec=spec, unpacking=unpacking), labels)
    tree = list_tree(spec) if path is None else LocalTree(path)

    def places(names: list[str]) -> list[str]:
        return [str(path.absolute() / name) if path else join(spec, name) for name in names]

    if tars := _tars(tree):
        if all(map(is_class_tar, tars)):
            if path is not None and labels is None:
                return None
            options = replace(options, label="tar")
        return opened_tars(places(tars))
    if tables := tables_in(tree):
        return opened_tables(places(tables))
    if labels is None:
        return None if path is not None else folder_source(tree, unfit=unfit)
    if is_table(labels.file.name) or (labels.file.is_file() and labels.file.stat().st_size > MOST_LISTED_BYTES):
        files = tree.files(tree.walk("")[0])
        everything = ImageSet(files, np.arange(len(files)), np.zeros(len(files), np.int64))
        return _joined(Source(tree.spec, ("",), {"train": everything}), labels)
    return label_list_source(tree, labels)


def _joined(source: Source, labels: LabelList | None) -> Source:
    return source if labels is None else join_labels(source, labels)


def _sets(spec: str) -> dict[SplitName, ShardSet]:
    """Open the splits of a packed set, or one of them; none if there is no manifest."""

    def is_set(place: str) -> bool:
        try:
            return bool(stat_url(manifest_at(place)))
        except (FileNotFoundError, NotADirectoryError):
            return False

    places: dict[SplitName, str] = {"train": spec} if is_set(spec) else {}
    if not places and split_manifest(spec)[0] == spec:
        tops = [top for top in ("train", "val", "test") if is_set(join(spec, top))]
        places = {SPLITS[top]: join(spec, top) for top in tops}
        if tops and tops[0] != "train":
            raise UserError(f"{redacted(spec)}: it holds {', '.join(tops)} without train; give one of them")
    return {split: open_shards(place) for split, place in places.items()}


def _tars(tree: FolderTree) -> list[str]:
    """Name the tars of a folder, or of its train, val and test, if there is nothing else to pack."""
    folders, images, others = tree.scan("")
    if "train" in folders and {*folders} <= {*SPLIT_FOLDERS} and not images:
        inside = {top: tree.scan(top) for top in folders}
    else:
        inside = {"": (folders, images, others)}
    found = [(top, name) for top, (_, _, names) in inside.items() for name in names if is_tar(name)]
    if any(folders or images for folders, images, _ in inside.values()) or {top for top, _ in found} != {*inside}:
        return []
    return [f"{top}/{name}".lstrip("/") for top, name in found]
