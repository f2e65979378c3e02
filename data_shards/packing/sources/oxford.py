"""Read Oxford-IIIT Pets (Parkhi et al., 2012) and Oxford Flowers-102 (Nilsback and Zisserman, 2008).

- Pets: images.tar.gz and annotations.tar.gz, or folders images/ and annotations/. trainval.txt (3,680 images) becomes
  train and test.txt (3,669) val. Classes are the breeds, spelt and numbered as in the files.
- Flowers: 102flowers.tgz or jpg/, imagelabels.mat and setid.mat. Splits as published: train and val of 1,020 images
  each, test of 6,149; the paper trains on train and reports test.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking, is_archive, open_files, read_small, rows_by_name
from shardvit.data_shards.packing.sources.base import (
    ImageSet,
    Int64s,
    Source,
    SplitName,
    is_image,
    published_source,
)
from shardvit.data_shards.packing.sources.imagenet import read_mat
from shardvit.data_shards.packing.sources.located import LocatedFiles
from shardvit.data_shards.text import named

PETS_IMAGES, PETS_LISTS = ("images.tar.gz", "images"), ("annotations.tar.gz", "annotations")
FLOWERS_IMAGES, FLOWERS_LABELS, FLOWERS_SPLITS = ("102flowers.tgz", "jpg"), "imagelabels.mat", "setid.mat"
_PETS_SETS: dict[SplitName, str] = {"train": "trainval.txt", "val": "test.txt"}
_FLOWERS_SETS: dict[SplitName, str] = {"train": "trnid", "val": "valid", "test": "tstid"}


def find_pets(root: Path) -> Path | None:
    """Find the folder with both parts, or one and no subfolder: `root` or torchvision's in it."""
    for folder in (root, root / "oxford-iiit-pet"):
        parts = [_there(folder, PETS_IMAGES), _there(folder, PETS_LISTS)]
        if all(parts) or (any(parts) and not any(entry.is_dir() for entry in folder.iterdir())):
            return folder
    return None


def find_flowers(root: Path) -> Path | None:
    """Find the folder with one of the lists: `root` or torchvision's in it."""
    folders = (root, root / "flowers-102")
    return next((each for each in folders if _there(each, (FLOWERS_LABELS, FLOWERS_SPLITS))), None)


def pets_source(root: Path, *, unpacking: Unpacking) -> Source:
    """Read the set; UserError if a part or image is missing, or a list is not as published."""
    images = _open_part(root, PETS_IMAGES, "Oxford-IIIT Pets", unpacking)
    lists = _open_part(root, PETS_LISTS, "Oxford-IIIT Pets", unpacking)
    rows = {name: row for name, row in rows_by_name(images).items() if is_image(name)}
    breeds: dict[int, str] = {}
    pets: dict[SplitName, list[tuple[str, int]]] = {
        split: list(_pets(lists, file, breeds)) for split, file in _PETS_SETS.items()
    }
    if not breeds or sorted(breeds) != [*range(1, len(breeds) + 1)] or len({*breeds.values()}) != len(breeds):
        raise UserError(f"{lists.path}: its breeds are not numbered from 1 on, each once; fetch it again")
    splits: dict[SplitName, ImageSet] = {}
    for split, its in pets.items():
        labels = np.array([number - 1 for _, number in its], dtype=np.int64)
        splits[split] = _listed(images, rows, [f"{name}.jpg" for name, _ in its], labels, by=_PETS_SETS[split])
    classes = [breeds[number] for number in sorted(breeds)]
    title = "Oxford-IIIT Pets: trainval.txt becomes train, test.txt val"
    return published_source(root, classes, splits, title=title)


def flowers_source(root: Path, *, unpacking: Unpacking) -> Source:
    """Read the set; UserError as in `pets_source`."""
    images = _open_part(root, FLOWERS_IMAGES, "Oxford Flowers-102", unpacking)
    for name in (FLOWERS_LABELS, FLOWERS_SPLITS):
        if not (root / name).is_file():
            raise UserError(
                f"{root}: {name} is missing, which has to lie beside {Path(images.path).name} (Flowers-102)"
            )
    from torchvision.datasets import Flowers102  # has the names; the set's page only has numbers

    classes = tuple(Flowers102.classes)
    labels = _whole_numbers(root / FLOWERS_LABELS, "labels")
    if not len(labels) or labels.min() < 1 or labels.max() > len(classes):
        raise UserError(f"{root / FLOWERS_LABELS}: a label is not one of 1 to {len(classes)}; fetch it again")
    rows = rows_by_name(images)
    splits: dict[SplitName, ImageSet] = {}
    for split, name in _FLOWERS_SETS.items():
        ids = _whole_numbers(root / FLOWERS_SPLITS, name)
        if not len(ids) or ids.min() < 1 or ids.max() > len(labels):
            raise UserError(f"{root / FLOWERS_SPLITS}: {name} has images that {FLOWERS_LABELS} does not label")
        names = [f"image_{number:05d}.jpg" for number in ids.tolist()]
        splits[split] = _listed(images, rows, names, labels[ids - 1] - 1, by=FLOWERS_SPLITS)
    title = "Oxford Flowers-102, with its own train, val and test"
    return published_source(root, classes, splits, title=title)


def is_pet(name: str) -> bool:
    """True for `images/Abyssinian_1.jpg`: other sets have an images.tar.gz too."""
    return re.fullmatch(r"images/[A-Za-z_]+_\d+\.(jpg|mat)", name) is not None


def _pets(lists: LocatedFiles, file: str, breeds: dict[int, str]) -> Iterator[tuple[str, int]]:
    """Yield (name, breed number) of each line, and collect the names of `breeds`."""
    rows = rows_by_name(lists, (file,))
    if not rows:
        raise UserError(f"{lists.path}: there is no {file} in it; fetch annotations.tar.gz again")
    for line, text in enumerate(read_small(lists, rows[file]).decode("utf-8", "replace").splitlines(), start=1):
        if not text.strip() or text.startswith("#"):
            continue
        fields = text.split()
        breed = fields[0].rpartition("_")[0]
        number = int(fields[1]) if len(fields) == 4 and fields[1].isdigit() and len(fields[1]) < 5 else 0
        if not number or not breed.isprintable() or breeds.setdefault(number, breed) != breed:
            raise UserError(f"{lists.path}: {file}, line {line} is not as published ({text[:60]!a}); fetch it again")
        yield fields[0], number


def _there(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).exists() for name in names)


def _open_part(root: Path, names: tuple[str, ...], title: str, unpacking: Unpacking) -> LocatedFiles:
    for name in reversed(names):
        if (root / name).is_dir() or is_archive(root / name):
            return open_files(root / name, unpacking=unpacking)
    raise UserError(f"{root}: {names[0]} (or the folder {names[1]}) of {title} is missing, which has to lie there")


def _listed(files: LocatedFiles, rows: dict[str, int], names: list[str], labels: Int64s, *, by: str) -> ImageSet:
    if missing := [name for name in names if name not in rows]:
        which = named(missing, most=1)
        raise UserError(f"{files.path}: {by} names images that are not in it ({which}); fetch it again")
    return ImageSet(files, np.array([rows[name] for name in names], dtype=np.int64), labels)


def _whole_numbers(path: Path, variable: str) -> Int64s:
    try:
        values = np.asarray(read_mat(path.read_bytes(), variable, name=str(path))).ravel()
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror})") from None
    if values.dtype.kind not in "uif" or not np.array_equal(values, values.astype(np.int64)):
        raise UserError(f"{path}: {variable} holds other things than whole numbers; fetch it again")
    return values.astype(np.int64)
