"""Recognise what is no folder of images on this machine: a URL, a pattern, a packed set, tars of samples, tables.

A folder of a store is listed once. Web servers have no listing, so there the tars are named by a pattern.
"""

import re
from dataclasses import replace

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking, is_tar
from shardvit.data_shards.packing.sources.base import SUFFIXES, ImageSet, Source, SplitName, Unfit
from shardvit.data_shards.packing.sources.folder import folder_source
from shardvit.data_shards.packing.sources.imagenet import is_class_tar
from shardvit.data_shards.packing.sources.label_list import LabelList, label_list_source
from shardvit.data_shards.packing.sources.tables.columns import TABLES, is_table
from shardvit.data_shards.packing.sources.tables.joined_labels import is_held, join_labels
from shardvit.data_shards.packing.sources.tables.table_source import table_source
from shardvit.data_shards.packing.sources.tars.samples import (
    ONLY_SAMPLES,
    SampleOptions,
    absolute,
    set_source,
    tar_source,
)
from shardvit.data_shards.packing.sources.tree import FolderTree, list_tree
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.sets.selection import open_where
from shardvit.data_shards.shards.location import PIPE, expand_braces, is_local, join, local_path, redacted
from shardvit.data_shards.shards.manifest import manifest_at, split_manifest
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.ranges import stat_url

_SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_IMG2DATASET = re.compile(r"\d+_stats\.json")


def elsewhere_source(
    spec: str, options: SampleOptions, *, labels: LabelList | None, unpacking: Unpacking, unfit: Unfit
) -> Source | None:
    """Open a URL, a pattern, a packed set, tars or tables; None for any other folder or file of this machine."""
    if spec.startswith(PIPE):
        raise UserError(f"{redacted(spec)} is a command, whose output can be read only once; give the files themselves")
    path = local_path(spec).expanduser() if is_local(spec) else None
    is_file = path is not None and path.is_file()
    is_pattern = path is None or (("{" in spec or "::" in spec) and not path.exists())
    if options.where is None and (
        is_pattern or (is_file and (is_table(spec) or (is_tar(spec) and (options.label or labels))))
    ):
        files = expand_braces(spec) if is_pattern else [spec]
        if source := _files_source(spec, files, options, labels=labels, unpacking=unpacking, unfit=unfit):
            return source
        if len(files) > 1 or path is not None:
            kinds = ", ".join((*SUFFIXES, *TABLES))
            raise UserError(f"{redacted(spec)}: a pattern stands for tars or tables ({kinds}); give one folder")
    if sets := {} if is_file and split_manifest(spec)[0] == spec else _sets(spec, where=options.where):
        if options != SampleOptions(where=options.where):
            raise UserError(f"{redacted(spec)} is a packed set, which says its labels; leave out --label and the like")
        source = set_source(sets, spec=spec, unpacking=unpacking)
        return source if labels is None else join_labels(source, labels)
    if options.where is not None:
        raise UserError(f"--where: {redacted(spec)} is no packed set, so it has no statistics; pack it first")
    if path is not None:
        return None
    return tree_source(list_tree(spec), options, labels=labels, unpacking=unpacking, unfit=unfit)


def tree_source(
    tree: FolderTree, options: SampleOptions, *, labels: LabelList | None, unpacking: Unpacking, unfit: Unfit
) -> Source:
    """Open a folder of tars, of tables, of samples in files, of class folders, or of images with a list of labels."""
    if files := _packed(tree):
        if options.label is None and all(map(is_class_tar, files)):
            options = replace(options, label="tar")
        places = [*map(tree.place, files)]
        if source := _files_source(tree.spec, places, options, labels=labels, unpacking=unpacking, unfit=unfit):
            return source
    folders, images, others = tree.scan("")
    if options.label is not None and labels is None and not (folders and images):
        root = absolute(tree.location)
        return tar_source(tree.spec, folders or [""], options, root=root, unpacking=unpacking, unfit=unfit)
    if options != SampleOptions():
        raise UserError(f"{tree.spec}: {ONLY_SAMPLES}")
    if labels is None and any(map(_IMG2DATASET.fullmatch, others)):
        raise UserError(f"{tree.spec}: img2dataset made these files: say which labels, by --label json:KEY or --labels")
    if labels is None:
        return folder_source(tree, unfit=unfit)
    if is_held(labels):
        return label_list_source(tree, labels)
    files = tree.files(tree.walk("")[0])
    images = ImageSet(files, np.arange(len(files)), np.zeros(len(files), np.int64))
    return join_labels(Source(tree.spec, ("",), {"train": images}), labels)


def _files_source(
    spec: str, files: list[str], options: SampleOptions, *, labels: LabelList | None, unpacking: Unpacking, unfit: Unfit
) -> Source | None:
    """Open tars or tables; None if they are neither."""
    files = [*map(absolute, files)]
    if all(map(is_tar, files)):
        if (options.image_column, options.label_column) != (None, None):
            raise UserError(f"{redacted(spec)}: --image-column and --label-column are for tables; tars have --label")
        chosen = options if labels is None else replace(options, label="tar")  # their own labels are not read
        source = tar_source(spec, files, chosen, unpacking=unpacking, unfit=unfit)
    elif all(map(is_table, files)):
        key = labels.path_column if labels else ""
        source = table_source(spec, files, options, unpacking=unpacking, unfit=unfit, key=key)
    else:
        return None
    return source if labels is None else join_labels(source, labels)


def _sets(spec: str, *, where: str | None = None) -> dict[SplitName, ShardSet]:
    """Open the splits of a packed set, or one of them; none if there is no manifest."""

    def is_set(place: str) -> bool:
        try:
            return bool(stat_url(manifest_at(place)))
        except (FileNotFoundError, NotADirectoryError):
            return False

    places: dict[SplitName, str] = {"train": spec} if is_set(spec) else {}
    if not places and split_manifest(spec)[0] == spec:
        places = {split: join(spec, split) for split in _SPLITS if is_set(join(spec, split))}
        if places and "train" not in places:
            raise UserError(f"{redacted(spec)}: it holds {', '.join(places)} without train; give one of them")
    if where is not None:
        return {split: open_where(place, where) for split, place in places.items()}
    return {split: open_shards(place) for split, place in places.items()}


def _packed(tree: FolderTree) -> list[str]:
    """Name the tars below a folder, or else the tables; none if there is an image among them."""
    found: list[str] = []
    for images, others in tree.folders():
        if images:
            return []
        found += others
    return [*filter(is_tar, found)] or [*filter(is_table, found)]
