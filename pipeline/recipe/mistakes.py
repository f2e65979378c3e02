"""The mistakes that pydantic finds in a recipe, as sentences: the key, its value, and what to give instead.

What a key may be is read from its type, so that a new key needs no words here.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from data_shards.text import one_line
from pipeline.recipe.data import ShardsConfig
from pipeline.recipe.duration import BYTES, DURATION

_LONGEST_SHOWN = 60
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "of at least"), (Lt, "lt", "below"), (Le, "le", "at most"))
_GROUPS: dict[str, str] = {"model": "{variant: B/16}", "optimizer": "{name: adamw, lr: 0.001}", "stages": "pretrain"}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the sentence that names its key."""

    key: str  # dotted; "": the whole recipe
    text: str


def mistakes(error: ValidationError, *, tree: Any, root: type[BaseModel]) -> list[Mistake]:
    """All mistakes that were found in `tree`, which should be a `root`, each once."""
    details = error.errors(include_url=False, include_context=True)
    return list(dict.fromkeys(_mistake(each, place=_find(each["loc"], tree=tree, root=root)) for each in details))


def truths(tree: Any, *, root: type[BaseModel], key: str = "") -> list[Mistake]:
    """Where true or false (in YAML also yes, no, on, off) stands for a number, which pydantic would take for 1 or 0."""
    found: list[Mistake] = []
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        field = root.model_fields.get(name) if isinstance(name, str) else None
        if field is None:
            continue
        place, group = f"{key}{name}", _group(field)
        if group is not None:
            for number, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                found += truths(each, root=group, key=f"{place}." if number is None else f"{place}.{number}.")
        elif bool not in _branches(field.annotation) and any(
            isinstance(each, bool) for each in (value if isinstance(value, list) else [value])
        ):
            found.append(Mistake(place, f"{place} is {show(value)}: {_advice(value, field=field, name=name)}"))
    return found


@dataclass(frozen=True)
class _Place:
    """Where something is wrong: its dotted key, and the model and field that it is, if the recipe knows it."""

    key: str
    group: type[BaseModel] | None  # that holds the field
    name: str
    field: FieldInfo | None


def _find(location: Sequence[int | str], *, tree: Any, root: type[BaseModel]) -> _Place:
    """Follows a location of pydantic's, which also counts the branches of unions and the values of pairs."""
    names: list[str] = []
    group: type[BaseModel] | None = root
    holder, field, last = None, None, ""
    for number, part in enumerate(location):
        if group is not None and part in group.model_fields:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
            holder, field, last = group, group.model_fields[str(part)], str(part)
            group = _group(field)
            names.append(last)
        elif isinstance(part, int) and group is ShardsConfig:
            if isinstance(tree, list):  # one of several sets
                names.append(str(part))
                tree = tree[part]
        elif group is not None and number == len(location) - 1:
            holder, field, last = group, None, str(part)
            names.append(last)
    return _Place(one_line(".".join(names)), holder, last, field)


def _mistake(detail: Any, *, place: _Place) -> Mistake:
    key, value = place.key, detail["input"]
    match detail["type"]:
        case "missing" if value is None or isinstance(value, Mapping | BaseModel):
            text = f"key {key} is missing"
        case "extra_forbidden" | "invalid_key":
            known = [] if place.group is None else list(place.group.model_fields)
            close = difflib.get_close_matches(place.name, known, n=1)
            text = f"unknown key {key}" + (f", did you mean {close[0]}?" if close else "")
        case "value_error":
            message = one_line(str(detail["ctx"]["error"]))
            text = f"{key}: {message}" if key and not message.startswith(key) else message
        case _ if place.field is None:
            text = f"{key or 'it'} is {show(value)}: give keys and their values"
        case _:
            value = {} if isinstance(value, BaseModel) else value
            text = f"{key} is {show(value)}: {_advice(value, field=place.field, name=place.name)}"
    return Mistake(key, text)


def show(value: Any) -> str:
    """A value as it was written, or what kind of thing it is."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case Mapping():
            return "a group of keys"
        case list() | tuple():
            text = f"[{', '.join(map(show, value[:4]))}{', ...' if len(value) > 4 else ''}]"
        case int() | float() | str():
            text = repr(value)
        case _:
            return f"a {type(value).__name__}"
    return one_line(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text):,} characters)")


def _advice(value: Any, *, field: FieldInfo, name: str) -> str:
    if field.annotation is str and DURATION in field.metadata:
        number = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else "10"
        return f"give a length with its unit, such as {number} epochs or {number} steps"
    if field.annotation is str and BYTES in field.metadata:
        return "give a size with its unit, such as 100 GB"
    if isinstance(value, int | float) and str in _branches(field.annotation):
        return f"give text, in quotes if it is a number, such as '{value}'"
    choices = [str(each) for kind in _branches(field.annotation) for each in _choices(kind)]
    close = difflib.get_close_matches(str(value), choices, n=1) if isinstance(value, str) else []
    return f"give {_expected(field, name=name)}" + (f" (did you mean {close[0]}?)" if close else "")


def _expected(field: FieldInfo, *, name: str) -> str:
    """What a key may be, in words."""
    kinds = _branches(field.annotation)
    words = (each for kind in kinds for each in _words(kind, bounds=field.metadata, field=field, name=name))
    return ", or ".join(dict.fromkeys(words))


def _words(kind: Any, *, bounds: Sequence[Any], field: FieldInfo, name: str) -> Iterator[str]:
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        more = [each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
        yield from _words(inner, bounds=[*bounds, *more], field=field, name=name)
    elif _choices(kind):
        *first, last = map(str, _choices(kind))
        yield f"{', '.join(first)} or {last}" if first else last
    elif kind is bool:
        yield "true or false"
    elif kind in (int, float):
        yield f"a {'whole ' if kind is int else ''}number{_range(bounds)}"
    elif kind is ShardsConfig:
        yield "a folder or URL of shards, or a group of keys with one called shards"
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        example = _GROUPS.get(name) or ", ".join(list(kind.model_fields)[:3])
        yield f"a group of keys, such as {example}"
    elif get_origin(kind) is tuple:
        each, *others = get_args(kind)
        if each is ShardsConfig:
            yield "a folder or URL of shards, a group of keys with one called shards, or a list of these"
        elif others == [...]:
            inside = ", or ".join(_words(each, bounds=(), field=field, name=name))
            yield f"a list, each of it {inside}"
        else:
            yield f"two numbers, such as [{', '.join(f'{number:.3g}' for number in field.default)}]"
    elif kind is str:
        yield "text"


def _range(bounds: Sequence[Any]) -> str:
    """The bounds in words that follow "a number"."""
    words: list[str] = []
    for bound in bounds:
        for kind, attribute, phrase in _BOUNDS:
            if isinstance(bound, kind):
                number: Any = getattr(bound, attribute)
                words.append(f"{phrase} {number:,}" if isinstance(number, int) else f"{phrase} {number:g}")
    return f" {' and '.join(words)}" if words else ""


def _branches(annotation: Any) -> list[Any]:
    """The kinds of a union, without None; of anything else, itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for kind in get_args(annotation) if kind is not type(None)]
    return [annotation]


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds, or a list of."""
    for kind in _branches(field.annotation):
        for each in (kind, *(get_args(kind) if get_origin(kind) is tuple else ())):
            if isinstance(each, type) and issubclass(each, BaseModel):
                return each
    return None
