"""`key=a,b,c` -> the points of a grid, and their names. Pure.

A comma separates values unless it is in quotes, [] or {}: `key=[0.05,1]` is one value, a list, `key=[0.05,1],[0.2,1]`
are two. A key with one value is an override of all points. The points are the product of the others, the last fastest.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from data_shards.errors import UserError
from data_shards.text import one_line

MOST_POINTS = 1000  # a typing error otherwise; SLURM's usual longest array, too
_LONGEST_NAME = 100
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True)
class Axis:
    """One key of the grid, and its values as they were typed."""

    key: str
    values: tuple[str, ...]


def read_grid(arguments: Sequence[str]) -> tuple[list[str], tuple[Axis, ...]]:
    """The overrides of all points, and the grid's axes, if any; UserError for an empty value, or a key that is given
    twice."""
    overrides: list[str] = []
    axes: list[Axis] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = _split(text)
        if not equals or len(values) < 2:
            overrides.append(argument)
            continue
        if "" in values:
            raise UserError(f"{one_line(argument)}: a value between the commas is empty: leave out the comma")
        if any(axis.key == key for axis in axes):
            raise UserError(f"{one_line(key)} is given twice: write all its values behind one another, {key}=a,b,c")
        axes.append(Axis(key, tuple(values)))
    return overrides, tuple(axes)


def grid_points(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every point of the grid: key -> value. UserError: there are too many."""
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise UserError(f"the grid has {count:,} points, and a sweep takes {MOST_POINTS:,} at most: give fewer values")
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes))]


def point_names(points: Sequence[dict[str, str]]) -> list[str]:
    """A folder's name for each point, such as lr-0.003 or lr-0.01_duration-90-epochs; different ones, whatever the
    values are. A point keeps its name when values are added to the grid."""
    if not points:
        return []
    short = _short(list(points[0]))
    names = []
    for values in points:
        parts = [f"{short[key]}-{value}" for key, value in values.items()]
        name = "_".join(re.sub("[^A-Za-z0-9._-]+", "-", part).strip("-._") for part in parts)
        plain = re.fullmatch(r"[A-Za-z0-9._+ -]+", "".join(parts)) and len(name) <= _LONGEST_NAME
        names.append(name if plain and not _collides(name) else f"{name[:_LONGEST_NAME]}-{_digest(values)}")
    folded = [name.casefold() for name in names]  # some file systems do not tell A from a
    return [
        name if folded.count(name.casefold()) == 1 else f"{name}-{_digest(values)}"
        for name, values in zip(names, points, strict=True)
    ]


def _collides(name: str) -> bool:
    """True if the sweep's folder has, or may have, something else of that name."""
    return name.casefold() in ("final", "slurm") or not re.match("[A-Za-z0-9]", name)


def _short(keys: list[str]) -> dict[str, str]:
    """The last parts of each key, as many as tell it from the others."""
    found = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found[key] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)
    return found


def _digest(values: dict[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=4).hexdigest()


def _split(text: str) -> list[str]:
    """A text's parts between the commas that stand outside of quotes and brackets."""
    parts, part, depth, quote = [], "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES and (depth or not part.strip()):  # as in YAML: within a word it is a letter
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(part.strip())
            part = ""
            continue
        part += letter
    return [*parts, part.strip()]
