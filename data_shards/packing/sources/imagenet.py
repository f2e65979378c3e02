"""Read ImageNet as published, and sets laid out like it: class folders or class tars, and a flat val.

- ImageNet-1k: ILSVRC2012_img_train.tar (1,000 tars n01440764.tar, ...) or train/ of class tars or folders;
  ILSVRC2012_img_val.tar (50,000 images without folders) or val/, with a file of their classes: the development kit,
  Kaggle's LOC_val_solution.csv, lines of "FILE CLASS", or of "CLASS" alone in order of file names.
- ImageNet-21k: fall11_whole.tar (21,841 class tars, 14,197,122 images: the paper's) or winter21_whole.tar.gz (19,167).
- Kaggle's ILSVRC/Data/CLS-LOC, and any .tar or .tar.gz of class folders, with or without train/ and val/.

Classes are folder names in code-point order: class 0 is n01440764. Listing costs one small read an image, once.
"""

import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import (
    Archive,
    Unpacking,
    is_archive,
    list_archives,
    open_files,
    read_small,
    rows_by_name,
)
from shardvit.data_shards.packing.sources.base import (
    SPLITS,
    ImageSet,
    LeftOut,
    Source,
    SplitName,
    Unfit,
    class_images,
    is_array,
    is_image,
    left_out_notes,
    num_shared,
)
from shardvit.data_shards.packing.sources.label_list import read_lines
from shardvit.data_shards.packing.sources.located import LocatedFiles
from shardvit.data_shards.text import counted, named

TRAIN_ARCHIVES = ("ILSVRC2012_img_train.tar", "fall11_whole.tar", "winter21_whole.tar.gz", "winter21_whole.tar")
VAL_ARCHIVE = "ILSVRC2012_img_val.tar"
VAL_LABELS = ("LOC_val_solution.csv", "ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12")
_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"  # of the development kit
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_KAGGLE_HEADER = "imageid"
_WORDNET_ID = re.compile(r"n\d{8}")
_WORDNET_TAR = re.compile(r"n\d{8}\.tar")
_RELEASES = (  # title, classes, images, by image-net.org; the paper uses the first two
    ("ImageNet-1k (ILSVRC 2012)", 1_000, 1_281_167),
    ("ImageNet-21k (fall 2011)", 21_841, 14_197_122),
    ("ImageNet-21k (winter 2021)", 19_167, 13_153_500),
)


class Parts(NamedTuple):
    """Paths of a set's parts."""

    train: Path
    val: Path | None = None
    val_labels: Path | None = None


def find_parts(root: Path, *, labelled: bool = False) -> Parts | None:
    """Find parts by their published names; None if there are none.

    A flat val is ImageNet's if its classes are there or given (`labelled`), or train has folders named as synsets.
    """
    base = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    train = next((base / name for name in TRAIN_ARCHIVES if (base / name).is_file()), None)
    if train is None and holds_class_tars(base / "train"):
        train = base / "train"
    if train is None and holds_class_tars(base):
        return Parts(base)
    val = next((path for path in (base / VAL_ARCHIVE, base / "val") if path.exists()), None)
    labels = _val_labels_in(base) or _val_labels_in(root)
    if train is None and val is not None and (base / "train").is_dir() and (val.is_file() or _holds(val, is_image)):
        is_imagenet = labelled or labels is not None or _holds(base / "train", _WORDNET_ID.fullmatch)
        train = base / "train" if is_imagenet else None
    if train is None:
        if (base / VAL_ARCHIVE).is_file():
            raise UserError(f"{base}: {VAL_ARCHIVE} is there without {TRAIN_ARCHIVES[0]}, which has to lie beside it")
        return None
    return Parts(train, val, None if val is None else labels)


def class_source(parts: Parts, *, spec: Path, unpacking: Unpacking, unfit: Unfit = "refuse") -> Source:
    """Open the parts; UserError if one is missing, an image has no class, or val has a class that train lacks."""
    found = _by_class(_open(parts.train, unpacking), unfit=unfit)
    if "train" not in found.splits:
        raise UserError(f"{parts.train}: it holds {', '.join(found.splits)} without train; give the training part")
    classes = tuple(sorted(found.splits["train"]))
    if parts.val is None and parts.val_labels is not None:
        raise UserError(f"{parts.val_labels}: there are no held-out images whose classes it could name; give --val too")
    if parts.val is not None and "val" in found.splits:
        raise UserError(f"{parts.train}: it has a held-out part of its own; leave out --val")
    splits: dict[SplitName, ImageSet] = {split: found.images(split, classes) for split in found.splits}
    if parts.val is not None:
        splits = {"train": splits["train"], "val": _val(parts, parts.val, classes, unpacking=unpacking)}
    elif list(splits) == ["train", "test"]:
        splits = {"train": splits["train"], "val": splits["test"]}
    return Source(
        spec=str(spec.resolve()),
        classes=classes,
        splits=splits,
        notes=(*found.notes, f"{spec}: recognised as {_title(parts.train, classes, len(splits['train']))}"),
        left_out=found.left_out,
        empty_classes="refuse" if len(splits) > 1 and unfit == "refuse" else "report",
    )


def holds_class_tars(folder: Path) -> bool:
    """True for tars named like WordNet's synsets: others may be shards."""
    try:
        return _holds(folder, _WORDNET_TAR.fullmatch)
    except OSError:
        return False


def is_class_tar(name: str) -> bool:
    """True for n01440764.tar and the like, in any folder."""
    return _WORDNET_TAR.fullmatch(name.rpartition("/")[2]) is not None


def _title(train: Path, classes: tuple[str, ...], num_images: int) -> str:
    for title, num_classes, published in _RELEASES if all(map(_WORDNET_ID.fullmatch, classes)) else ():
        if num_classes == len(classes):
            missing = f" ({published:,} are published: images are missing)" if num_images != published else ""
            return f"{title}: {num_images:,} training images{missing}"
    return f"images of {len(classes):,} classes, in {train.name}"


def _holds(folder: Path, is_one: Callable[[str], object]) -> bool:
    with os.scandir(folder) as entries:
        return any(is_one(entry.name) for entry in entries)


def _val_labels_in(folder: Path) -> Path | None:
    return next((folder / name for name in VAL_LABELS if (folder / name).exists()), None)


def _open(path: Path, unpacking: Unpacking) -> LocatedFiles:
    if not (path.is_dir() and holds_class_tars(path)):
        return open_files(path, unpacking=unpacking)
    names = sorted(os.listdir(path))
    if any(map(_WORDNET_ID.fullmatch, names)):
        raise UserError(f"{path}: class tars and class folders lie side by side (half unpacked?); keep one kind")
    tars = [Archive(path / name, unpacking) for name in names if _WORDNET_TAR.fullmatch(name)]
    return list_archives(tars, folder=path)


class _ClassFolders(NamedTuple):
    files: LocatedFiles
    splits: dict[SplitName, dict[str, list[int]]]
    notes: list[str]
    left_out: tuple[LeftOut, ...]

    def images(self, split: SplitName, classes: tuple[str, ...]) -> ImageSet:
        by_class = self.splits[split]
        if strangers := sorted(by_class.keys() - set(classes)):
            raise UserError(f"{self.files.path}: {split} has classes that train has not: {named(strangers)}")
        return class_images(self.files, by_class, classes)


def _by_class(files: LocatedFiles, *, unfit: Unfit) -> _ClassFolders:
    """Group images by [SPLIT/]CLASS below the folders that all of them share."""
    path = Path(files.path)
    by_folder: dict[str, list[int]] = defaultdict(list)
    others: list[str] = []
    is_ours = is_image if any(map(is_image, files.names)) else is_array
    for row, name in enumerate(files.names):
        if is_ours(name):
            by_folder[name.rpartition("/")[0]].append(row)
        else:
            others.append(name)
    notes = left_out_notes(path, others)
    if not by_folder:
        raise UserError(
            f"{path}: there is no image in it; give an archive or folder of class folders or class tars"
            + "".join(f" ({note})" for note in notes)
        )
    loose = by_folder.pop("", [])
    hint = f"; {path.name} is the held-out part: give it with --val" if path.name == VAL_ARCHIVE else ""
    if not by_folder:
        what = "as shards have it, which need no packing" if len(others) >= len(loose) else "without class folders"
        raise UserError(
            f"{path}: its images lie side by side, {what}; the training part should hold class folders or class "
            f"tars{hint}"
        )
    if len(by_folder) == 1 and is_archive(path):
        raise UserError(
            f"{path}: all its images lie in one folder ({next(iter(by_folder))}), so they would be one class; "
            f"give an archive of class folders or class tars{hint}"
        )
    splits, more = _splits(by_folder)
    loose += more
    if loose and unfit == "refuse":
        more = f" (and {len(loose) - 1:,} more images)" if len(loose) > 1 else ""
        where = f"{files.names[loose[0]]} lies beside the class folders{more}"
        raise UserError(f"{path}: {where}; leave them out with --skip-unreadable, or give another archive")
    if unfit_names := [name for by_class in splits.values() for name in by_class if not name.isprintable()]:
        raise UserError(f"{path}: the class folder {unfit_names[0]!a} has a name that cannot be written")
    notes += _drop_replaced(files, splits)
    return _ClassFolders(files, splits, notes, tuple(LeftOut(files.names[row]) for row in loose))


def _splits(by_folder: dict[str, list[int]]) -> tuple[dict[SplitName, dict[str, list[int]]], list[int]]:
    """Group rows by split, train first, and class; also return those outside class folders."""
    folders = [folder.split("/") for folder in by_folder]
    # leading folders that all images share; a lone folder is a class
    shared = len(folders[0]) - 1 if len(folders) == 1 else num_shared(folders)
    tops = {parts[shared] for parts in folders if len(parts) > shared}
    has_splits = bool(tops) and tops <= SPLITS.keys()
    splits: dict[SplitName, dict[str, list[int]]] = {"train": {}, "val": {}, "test": {}}
    loose: list[int] = []
    for folder, rows in by_folder.items():
        parts = folder.split("/")[shared:]
        split: SplitName = SPLITS[parts.pop(0)] if has_splits and parts else "train"
        if parts:
            splits[split].setdefault(parts[0], []).extend(rows)
        else:
            loose += rows
    return {split: by_class for split, by_class in splits.items() if by_class}, loose


def _drop_replaced(files: LocatedFiles, splits: dict[SplitName, dict[str, list[int]]]) -> list[str]:
    """Sort by name; of files that a tar holds twice keep the later, as unpacking would, and note the rest."""
    replaced: list[str] = []
    for by_class in splits.values():
        for rows in by_class.values():
            rows.sort(key=files.names.__getitem__)
            latest = {files.names[row]: row for row in rows}
            replaced += [files.names[row] for row in rows if latest[files.names[row]] != row]
            rows[:] = latest.values()
    if not replaced:
        return []
    which = f"{counted(len(replaced), 'file')} replaced by a later one of the same name (the first: {replaced[0]})"
    return [f"{files.path}: {which}, as when it is unpacked"]


def _val(parts: Parts, path: Path, classes: tuple[str, ...], *, unpacking: Unpacking) -> ImageSet:
    files = _open(path, unpacking)
    rows = [row for row, name in enumerate(files.names) if is_image(name)]
    if not rows:
        raise UserError(f"{path}: there is no image in it")
    list_file = parts.val_labels
    if list_file is None:
        if {files.names[row].rpartition("/")[0].rpartition("/")[2] for row in rows} <= set(classes):
            found = _by_class(files, unfit="refuse")
            return found.images(next(iter(found.splits)), classes)
        list_file = _val_labels_in(path.parent)
    if list_file is None:
        raise UserError(
            f"{path}: its images have no class folders, so a file must name their classes: "
            f"{' or '.join(VAL_LABELS[:2])} has to lie beside it, or give it with --val-labels"
        )
    rows.sort(key=lambda row: files.names[row].rpartition("/")[2])
    labels = read_val_labels(list_file, [files.names[row] for row in rows], unpacking=unpacking)
    numbers = {name: number for number, name in enumerate(classes)}
    if strangers := sorted({*labels} - numbers.keys()):
        raise UserError(
            f"{list_file}: {named(strangers)} {'is no class' if len(strangers) == 1 else 'are no classes'} of "
            f"{parts.train}; give the labels and the training images of one set"
        )
    return ImageSet(files, np.array(rows), np.array([numbers[label] for label in labels]))


def read_val_labels(path: Path, names: list[str], *, unpacking: Unpacking) -> list[str]:
    """Find the class of each of `names`, in order of file names; UserError names the list and its line."""
    if path.is_dir() or is_archive(path):
        classes = _devkit_classes(path, unpacking=unpacking)
    elif not path.is_file():
        raise UserError(f"{path}: there is no such file; it should be one of {', '.join(VAL_LABELS[:2])}, or a list")
    else:
        table = list(_entries(path))
        if not table:
            raise UserError(f"{path}: it names no image; write 'FILE CLASS' on each line")
        if any(name is not None for _, name, _ in table):
            return _by_name(path, table, names)
        classes = [label for _, _, label in table]
        if all(map(str.isdigit, classes)):
            raise UserError(
                f"{path}: its numbers are classes only together with {_META}; give ILSVRC2012_devkit_t12.tar.gz, which "
                "holds both"
            )
    if len(classes) != len(names):
        raise UserError(
            f"{path}: {len(classes):,} labels for {len(names):,} images, which go by their order; fetch the images "
            "again, or give a list that names them"
        )
    return classes


def _entries(path: Path) -> Iterator[tuple[int, str | None, str]]:
    for line, text in read_lines(path):
        fields = re.split(r"[,\s]+", text.strip())
        if fields[0].lower() == _KAGGLE_HEADER:
            continue
        if len(fields) == 1:
            yield line, None, fields[0]
        elif len(fields) == 2 or path.suffix.lower() == ".csv":  # Kaggle's has boxes after the class
            yield line, _stem(fields[0]), fields[1]
        else:
            raise UserError(f"{path}, line {line}: {len(fields)} words where 'FILE CLASS' is expected; correct it")


def _by_name(path: Path, table: list[tuple[int, str | None, str]], names: list[str]) -> list[str]:
    found: dict[str, str] = {}
    for line, name, label in table:
        if name is None:
            raise UserError(f"{path}, line {line}: there is no class beside {label!a}; correct that line")
        if found.setdefault(name, label) != label:
            raise UserError(f"{path}, line {line}: {name!a} has the class {found[name]!a} above; correct one of them")
    if missing := [name for name in names if _stem(name) not in found]:
        raise UserError(f"{path}: no class for {named(missing, most=1)}; give the list of these very images")
    return [found[_stem(name)] for name in names]


def _devkit_classes(path: Path, *, unpacking: Unpacking) -> list[str]:
    files = open_files(path, unpacking=unpacking)
    rows = rows_by_name(files, (_TRUTH, _META))
    if missing := [name for name in (_TRUTH, _META) if name not in rows]:
        raise UserError(f"{path}: there is no {missing[0]} in it; give ILSVRC2012_devkit_t12.tar.gz")
    table = read_mat(read_small(files, rows[_META]), "synsets", name=f"{path}: {_META}")
    try:
        synsets = {int(row["ILSVRC2012_ID"].item()): str(row["WNID"].item()) for row in table.ravel()}
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {_META}: its synsets are not as published ({error}); fetch it again") from None
    truth = read_small(files, rows[_TRUTH])
    try:
        return [synsets[int(text)] for text in truth.decode("ascii").split()]
    except (UnicodeDecodeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: {_TRUTH} in it has a line that is no class of {_META} ({error}); fetch it") from None


def read_mat(data: bytes, variable: str, *, name: str) -> Any:
    """Read a variable of a MATLAB file, which cannot hold code; UserError with the file's `name`."""
    from scipy.io import loadmat

    try:
        return loadmat(io.BytesIO(data), variable_names=[variable])[variable]
    except Exception as error:  # noqa: BLE001 - scipy raises a dozen kinds at what is broken
        raise UserError(f"{name}: {variable} cannot be read from it ({error}); fetch it again") from None


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]
