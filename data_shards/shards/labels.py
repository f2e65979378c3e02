"""Parse labels: bytes of a tar member -> class numbers.

A label is one member of the sample: `cls` or `txt` (text), or a key in `json`. It holds class numbers or names, exactly
one ("single") or any number ("multi"). Takes a microsecond for a number, a few for JSON. Needs neither torch nor numpy.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from shardvit.data_shards.text import brief, parse_json
from shardvit.data_shards.vocabulary import LabelKind, LabelPart

_MOST_DIGITS = 18  # int() of thousands is slow, and refused beyond 4300
# Text that is a number, not a name; "-1" means "no label".
_NUMBER = {"cls": re.compile(r"-?[0-9]{1,18}"), "txt": re.compile(r"-[0-9]{1,18}")}


@dataclass(frozen=True)
class LabelSpec:
    """The member that holds a sample's label: its extension `part`, and for `json` a `key`.

    Dots in the key descend into nested objects, unless an object has a key with those dots in its name.
    """

    part: LabelPart = "cls"
    key: str | None = None
    kind: LabelKind = "single"

    def __post_init__(self) -> None:
        if self.part not in get_args(LabelPart) or self.kind not in get_args(LabelKind):
            raise ValueError(f"no label is called {reprlib.repr(self.part)} of kind {reprlib.repr(self.kind)}")
        if (self.part == "json") != bool(self.key) or not isinstance(self.key, str | None):
            raise ValueError("a label in json needs a key, as in json:label; another label has none")

    @classmethod
    def parse(cls, text: str, *, kind: LabelKind = "single") -> LabelSpec:
        """Parse "cls", "txt" or "json:KEY"; ValueError for anything else."""
        part, colon, key = text.partition(":")
        if part not in get_args(LabelPart) or (part == "json") != bool(key) or (colon and not key):
            raise ValueError(f"{text!r} names no part of a sample: use cls, txt or json:KEY")
        return cls(part=cast(LabelPart, part), key=key or None, kind=kind)

    @property
    def text(self) -> str:
        """The inverse of `parse`."""
        return self.part if self.key is None else f"{self.part}:{self.key}"


def similar_names(classes: Sequence[str]) -> list[list[str]]:
    """Group names that differ only by case or white space."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault("".join(name.split()).casefold(), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def parse_label(content: bytes, *, spec: LabelSpec, label_map: Mapping[str, int], num_classes: int) -> tuple[int, ...]:
    """Read a label's class numbers, one if `spec.kind` is "single"; ValueError that says what is wrong."""
    if spec.part == "cls" and spec.kind == "single":  # by far the most frequent; digits are never a name here
        digits = content.strip()
        if digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) < num_classes:
            return (int(digits),)
    values = read_values(content, spec=spec)
    return tuple(dict.fromkeys(class_number(value, spec, label_map, num_classes) for value in values))


def read_values(content: bytes, *, spec: LabelSpec) -> list[int | str]:
    """Read the class numbers and names in a label member, without lookup; one for a single label.

    Digits are a number for `cls`, but a name for `txt`, which `parse_label` looks up first. ValueError for anything
    that is not text or JSON with the key, or not a number, a name, or a list of these.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"the label in .{spec.part} is no UTF-8 text") from None
    if spec.part == "json":
        value = _at_key(_json(text), cast(str, spec.key))
    elif spec.kind == "multi":
        text = text.strip()
        value = _json(text) if text.startswith("[") else [word for word in re.split(r"[\s,]+", text) if word]
    else:
        value = text.strip()
    values = value if isinstance(value, list) else [value]
    if spec.kind == "single" and len(values) != 1:
        raise ValueError(f"the label is a list of {len(values)}, where one class is expected")
    return [_plain(one, part=spec.part) for one in values]


def _plain(value: Any, *, part: LabelPart) -> int | str:
    if isinstance(value, str) and value:
        return int(value) if part in _NUMBER and _NUMBER[part].fullmatch(value) else value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**_MOST_DIGITS:
        return value
    shown = "empty" if value == "" else brief(value)
    raise ValueError(f"the label is {shown}: no class number and no name of a class")


def class_number(value: int | str, spec: LabelSpec, label_map: Mapping[str, int], num_classes: int) -> int:
    """Look up a number or name of `read_values`; ValueError if it is no class."""
    if isinstance(value, str):
        number = label_map.get(value)
        if number is None and spec.part == "txt" and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS:
            number = int(value)
        if number is None:
            raise ValueError(f"the label {value[:80]!r} is no class number and no name of a class")
        value = number
    if not 0 <= value < num_classes:
        known = f"there are {num_classes} classes, 0 to {num_classes - 1}"
        raise ValueError(f"the label {value} is no class number: {known}")
    return value


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"the label is {error}") from None


def _at_key(content: Any, key: str) -> Any:
    if isinstance(content, dict) and key in content:
        return content[key]
    for step in key.split("."):
        if not isinstance(content, dict) or step not in content:
            raise ValueError(f"the label's key {key!r} is not in the JSON")
        content = content[step]
    return content
