"""ImageNet's 1,000 classes by their names, and its ReaL labels (arXiv 2006.07159); both come with timm.

Class names differ between models ("tench", "tench, Tinca tinca", "0"), so classes are identified by WordNet number
(n01440764), or by position where all 1,000 come in the usual order.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Sequence
from functools import cache

_CLASSES = 1000
_REAL_FILE = "_info/imagenet_real_labels.json"
_NUMBER = re.compile(r"n\d{8}")  # a WordNet number
_KEY = re.compile(r"ILSVRC2012_val_(\d{8})")
_MOST_RENAMED = 0.1  # share of the classes whose name other projects have changed


@cache
def wordnet_numbers() -> tuple[str, ...]:
    """WordNet numbers of class 0, 1, ...; the usual class order sorts by them."""
    from timm.data.imagenet_info import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def usual_classes(names: Sequence[str]) -> list[int] | None:
    """The usual class number of each name; None if they are not ImageNet's classes, or it is unclear."""
    if all(map(_NUMBER.fullmatch, names)):  # else do not import timm, which takes seconds
        numbers = {name: number for number, name in enumerate(wordnet_numbers())}
        if all(name in numbers for name in names):
            return [numbers[name] for name in names]
    return list(range(_CLASSES)) if _are_in_usual_order(names) else None


def numbered_classes(names: Sequence[str]) -> list[int] | None:
    """Class numbers of names that are numbers, as ImageNet-v2's folders; None: one is not."""
    known = {str(number) for number in range(_CLASSES)}
    return [int(name) for name in names] if known.issuperset(names) else None


def real_labels(key: str) -> tuple[int, ...] | None:
    """The usual numbers of an image's ReaL labels, none if it has none; None: the key does not name an image of the
    validation set, ILSVRC2012_val_00000001 to 00050000."""
    found = _KEY.search(key)
    every = _real()
    if found is None or not 1 <= int(found[1]) <= len(every):
        return None
    return every[int(found[1]) - 1]


def _are_in_usual_order(names: Sequence[str]) -> bool:
    if len(names) != _CLASSES:
        return False
    if list(names) == [str(number) for number in range(_CLASSES)]:
        return True
    from timm.data.imagenet_info import ImageNetInfo

    usual = ImageNetInfo("imagenet-1k").label_descriptions()
    alike = sum(_first(name) == _first(other) for name, other in zip(names, usual, strict=True))
    return alike >= (1 - _MOST_RENAMED) * _CLASSES


def _first(name: str) -> str:
    return name.partition(",")[0].strip().lower().replace("_", " ")


@cache
def _real() -> tuple[tuple[int, ...], ...]:
    content = pkgutil.get_data("timm.data", _REAL_FILE)
    assert content is not None
    return tuple(map(tuple, json.loads(content)))
