"""Parse `key=a,b,c` into grid points, name them, and extend the grid. Pure.

Commas separate values except in quotes, [] or {}: `key=[0.05,1]` is one value, a list; `key=[0.05,1],[0.2,1]` are two.
A key with one value overrides all points. The points are the product of the other keys, the last varying fastest.
"""

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line

MOST_POINTS = 1000  # more is likely a typo; also SLURM's usual array limit
_LONGEST_NAME = 100
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True)
class Axis:
    """A grid key and its values as typed."""

    key: str
    values: tuple[str, ...]


def read_grid(arguments: Sequence[str]) -> tuple[list[str], tuple[Axis, ...]]:
    """Return the overrides of all points and the grid's axes; UserError if a value is empty or a key repeats."""
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
    """Return every grid point, key -> value; UserError if there are too many."""
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise UserError(f"the grid has {count:,} points, and a sweep takes {MOST_POINTS:,} at most: give fewer values")
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes))]


def point_names(points: Sequence[dict[str, str]]) -> list[str]:
    """Name each point's folder, such as lr-0.003 or lr-0.01_duration-90-epochs: always distinct, and stable when
    values are added to the grid."""
    if not points:
        return []
    short = _short(list(points[0]))
    names = []
    for values in points:
        parts = [f"{short[key]}-{value}" for key, value in values.items()]
        name = "_".join(re.sub("[^A-Za-z0-9._-]+", "-", part).strip("-._") for part in parts)
        plain = re.fullmatch(r"[A-Za-z0-9._+ -]+", "".join(parts)) and len(name) <= _LONGEST_NAME
        names.append(name if plain and not _collides(name) else f"{name[:_LONGEST_NAME]}-{_digest(values)}")
    folded = [name.casefold() for name in names]  # some file systems ignore case
    return [
        name if folded.count(name.casefold()) == 1 else f"{name}-{_digest(values)}"
        for name, values in zip(names, points, strict=True)
    ]


def standard_error(score: float, *, images: int) -> float:
    """Estimate the standard error of a share; adds one right and one wrong answer, so it is above 0 at a score of 1."""
    share = (score * images + 1) / (images + 2)
    return math.sqrt(share * (1 - share) / images)


def value_beyond(values: Collection[str], best: str) -> str | None:
    """Extrapolate one number beyond the edge of `values` if `best` is there: geometrically if all are positive, else
    linearly. None if it is not at an edge, is 0 (few keys go below), or values are no plain numbers (such as durations,
    where longer is better anyway)."""
    try:
        edge, numbers = float(best), sorted({float(value) for value in values})
    except ValueError:
        return None
    if len(numbers) < 2 or edge == 0 or edge not in (numbers[0], numbers[-1]):
        return None
    inner = numbers[1] if edge == numbers[0] else numbers[-2]
    further = edge * edge / inner if numbers[0] > 0 else 2 * edge - inner
    if all(number.is_integer() for number in numbers):
        return None if round(further) in (0, edge) else f"{round(further)}"
    return f"{float(f'{further:.2g}'):g}"


def extend_grid(
    axes: Sequence[Axis], points: Sequence[Mapping[str, str]], *, best: Mapping[str, str]
) -> tuple[Axis, ...]:
    """Add a value to each axis where the best point is at an edge; `points` and `best` hold values as in the recipe."""
    more = [value_beyond({values[axis.key] for values in points}, best[axis.key]) for axis in axes]
    return tuple(
        replace(axis, values=(*axis.values, *filter(None, [value]))) for axis, value in zip(axes, more, strict=True)
    )


def _collides(name: str) -> bool:
    return name.casefold() in ("final", "slurm") or not re.match("[A-Za-z0-9]", name)


def _short(keys: list[str]) -> dict[str, str]:
    """Shorten each key to its shortest unique suffix."""
    found = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found[key] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)
    return found


def _digest(values: dict[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=4).hexdigest()


def _split(text: str) -> list[str]:
    parts, part, depth, quote = [], "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES and (depth or not part.strip()):  # as in YAML: within a word it is literal
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
