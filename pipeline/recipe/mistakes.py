"""Turn pydantic's errors into sentences: the key, its value, and accepted values (from the recipe's JSON schema)."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from shardvit.data_shards.text import one_line

_LONGEST_SHOWN = 60
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}
_GROUPS: dict[str, str] = {"model": "{variant: B/16}", "optimizer": "{name: adamw, lr: 0.001}", "stages": "pretrain"}
_BRANCH = re.compile(r"[a-z-]+\[.*\]")  # pydantic's name of one kind of value among several, such as tuple[int]
_SET, _SHARDS = "ShardsConfig", "a group of keys with one called shards"

Schema = dict[str, Any]
"""JSON schema of a key, or of a group of keys (has "properties")."""


@dataclass(frozen=True)
class Mistake:
    """A sentence about one key."""

    key: str  # dotted; "": the whole recipe
    text: str


def mistakes(error: ValidationError, *, tree: Any, root: type[BaseModel]) -> list[Mistake]:
    """List the validation errors of `tree` without repetitions."""
    schema, details = _schema_of(root), error.errors(include_url=False, include_context=True)
    found = list(dict.fromkeys(_mistake(each, tree=tree, root=schema) for each in details))
    # Where a name or a group of keys may stand, a wrong key of the group says more.
    return [each for each in found if not any(other.key.startswith(f"{each.key}.") for other in found)]


def truths(tree: Any, *, root: type[BaseModel]) -> list[Mistake]:
    """List booleans given for numbers, which pydantic accepts as 1 or 0."""
    return list(_truths(tree, group=_schema_of(root), key=""))


def _truths(tree: Any, *, group: Schema, key: str) -> Iterator[Mistake]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        field = group["properties"].get(name) if isinstance(name, str) else None
        if field is None:
            continue
        place, inner = f"{key}{name}", _group(field)
        if inner is not None and not isinstance(value, bool):
            sets = {f"{place}.{number}.": each for number, each in enumerate(value)} if isinstance(value, list) else {}
            for inside, each in (sets or {f"{place}.": value}).items():
                yield from _truths(each, group=inner, key=inside)
        elif any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value])) and not any(
            kind.get("type") == "boolean" for kind in _kinds(field)
        ):
            yield Mistake(place, f"{place} is {show(value)}: {_advice(value, field=field, name=name)}")


def _find(location: Sequence[int | str], *, tree: Any, root: Schema) -> tuple[str, str, Schema | None, Schema | None]:
    """Resolve pydantic's location, which includes union branches and pair positions: full key, name, group, field."""
    names: list[str] = []
    group: Schema | None = root
    holder, field, last = None, None, ""
    for number, part in enumerate(location):
        if group is not None and part in group["properties"]:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
            holder, field, last = group, group["properties"][part], str(part)
            group = _group(field)
            names.append(last)
        elif isinstance(part, int) and group is not None and group["title"] == _SET:
            if isinstance(tree, list):  # one of several sets
                names.append(str(part))
                tree = tree[part]
        elif group is not None and number == len(location) - 1 and not _BRANCH.fullmatch(str(part)):
            holder, field, last = group, None, str(part)
            names.append(last)
    return one_line(".".join(names)), last, holder, field


def _ending_in(name: str, *, given: str, root: Schema) -> list[str]:
    """List full keys that end in `name`: in the stage of `given`, else with * for any stage."""
    keys = [key for key in _keys(root) if key.endswith(f".{name}")]
    stage = re.match(r"stages\.\w+\.", given)
    of_stage = [key for key in keys if stage and key.startswith(stage[0])]
    return of_stage or list(dict.fromkeys(re.sub(r"^stages\.\w+\.", "stages.*.", key) for key in keys))


def _keys(group: Schema, before: str = "") -> Iterator[str]:
    for name, field in group["properties"].items():
        yield before + name
        for kind in _kinds(field):
            yield from _keys(kind, f"{before}{name}.") if "properties" in kind else ()


def _mistake(detail: Any, *, tree: Any, root: Schema) -> Mistake:
    (key, name, group, field), value = _find(detail["loc"], tree=tree, root=root), detail["input"]
    match detail["type"]:
        case "missing" if value is None or isinstance(value, Mapping | BaseModel):
            text = f"key {key} is missing"
        case "extra_forbidden" | "invalid_key":
            known = group["properties"] if group else ()
            meant = _ending_in(name, given=key, root=root) or difflib.get_close_matches(name, known, n=1)
            text = f"unknown key {key}" + (f", did you mean {' or '.join(meant)}?" if meant else "")
        case "value_error":
            message = one_line(str(detail["ctx"]["error"]))
            text = f"{key}: {message}" if key and not message.startswith(key) else message
        case _ if field is None:
            text = f"{key or 'it'} is {show(value)}: give keys and their values"
        case _:
            value = {} if isinstance(value, BaseModel) else value
            text = f"{key} is {show(value)}: {_advice(value, field=field, name=name)}"
    return Mistake(key, text)


def show(value: Any) -> str:
    """Format a value as written, or its type."""
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


def _advice(value: Any, *, field: Schema, name: str) -> str:
    if field.get("format") == "duration":
        number = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else "10"
        return f"give a length with its unit, such as {number} epochs or {number} steps"
    if field.get("format") == "bytes":
        return "give a size with its unit, such as 100 GB"
    kinds = _kinds(field)
    takes_text = any(each.get("type") == "string" and not _choices(each) for each in kinds)
    if isinstance(value, int | float) and takes_text:
        return f"give text, in quotes if it is a number, such as '{value}'"
    choices = [choice for each in kinds for choice in _choices(each)]
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    expected = ", or ".join(dict.fromkeys(_words(each, field=field, name=name) for each in kinds))
    return f"give {expected}" + (f" (did you mean {close[0]}?)" if close else "")


def _words(kind: Schema, *, field: Schema, name: str) -> str:
    """Describe accepted values; `kind`: one branch of the key's schema `field`."""
    if choices := _choices(kind):
        *first, last = choices
        return f"{', '.join(first)} or {last}" if first else last
    group = _group(kind)
    match kind:
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "integer" | "number" as number}:
            bounds = [f"{words} {kind[bound]:,}" for bound, words in _BOUNDS.items() if bound in kind]
            return " ".join([f"a {'whole ' if number == 'integer' else ''}number", " and ".join(bounds)]).rstrip()
        case {"prefixItems": [_, _, _, _]}:  # color_jitter
            return "a number of at least 0, or three or four (the hue's is at most 0.5), such as [0.4, 0.4, 0.4, 0.1]"
        case {"prefixItems": _}:
            example = field["default"] or (0.75, 1.33)  # of crop_ratio
            return f"two numbers, such as [{', '.join(f'{number:.3g}' for number in example)}]"
        case {"items": _} if group and group["title"] == _SET:
            return f"a folder or URL of shards, {_SHARDS}, or a list of these"
        case {"items": items}:
            each = ", or ".join(_words(inner, field=field, name=name) for inner in _kinds(items))
            return f"a list, each of it {each}"
        case _ if group and group["title"] == _SET:
            return f"a folder or URL of shards, or {_SHARDS}"
        case _ if group:
            return f"a group of keys, such as {_GROUPS.get(name) or ', '.join(list(group['properties'])[:3])}"
        case _:
            return "text"


def _kinds(field: Schema) -> list[Schema]:
    return [kind for kind in field.get("anyOf", field.get("oneOf", [field])) if kind.get("type") != "null"]


def _choices(kind: Schema) -> list[str]:
    return [str(each) for each in kind.get("enum", [kind["const"]] if "const" in kind else [])]


def _group(field: Schema) -> Schema | None:
    for kind in _kinds(field):
        for each in (kind, kind.get("items", {})):
            if "properties" in each:
                return each
    return None


@cache
def _schema_of(root: type[BaseModel]) -> Schema:
    named: dict[str, Schema] = {}

    def resolved(part: Schema) -> Schema:
        return named.setdefault(part["$ref"], {}) if "$ref" in part else part

    schema = json.loads(json.dumps(root.model_json_schema()), object_hook=resolved)
    for name, part in schema.pop("$defs", {}).items():
        named.setdefault(f"#/$defs/{name}", {}).update(part)
    return schema
