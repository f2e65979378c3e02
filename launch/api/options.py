"""Parse the Python API's arguments as the command line does: recipes, overrides, commands' options as keywords."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardvit.data_shards.errors import UserError

PathLike = str | os.PathLike[str]
RecipeLike = PathLike | Mapping[str, Any]
Options = TypeVar("Options")

_OUTPUTS = ("json_file", "output", "force")  # of commands; a function returns its result


def options_of(kind: type[Options], given: Mapping[str, Any], *, beside: type[Any] | None = None) -> Options:
    """Make a command's options; text becomes a path, a list a tuple. UserError for a bad value, and for a name that
    neither `kind` nor `beside` has."""
    own = {each.name for each in fields(kind)} - {*_OUTPUTS}  # pyright: ignore[reportArgumentType]
    known = own | {each.name for each in fields(beside)} - {*_OUTPUTS} if beside else own
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        raise UserError(f"there is no option {name}: {advice}")
    try:
        return TypeAdapter(kind).validate_python({name: value for name, value in given.items() if name in own})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise UserError(f"{first['loc'][0]}: {first['msg']}") from None


def recipe_of(given: RecipeLike) -> str | dict[str, Any]:
    """Return what `load_recipe` takes; UserError for a mapping that YAML cannot say."""
    return _plain(given, of="the recipe") if isinstance(given, Mapping) else os.fspath(given)


def texts_of(overrides: Mapping[str, Any]) -> list[str]:
    """Write overrides as on the command line; JSON is YAML, too."""
    return [f"{key}={json.dumps(_plain(value, of=f'override {key}'))}" for key, value in overrides.items()]


def _plain(value: Any, *, of: str) -> Any:
    """Turn tuples into lists, paths into text, NumPy's numbers into Python's."""

    def other(each: Any) -> Any:
        if isinstance(each, os.PathLike):
            return os.fspath(each)
        if hasattr(each, "item"):
            return each.item()
        raise UserError(f"{of}: {type(each).__name__} is no value of a recipe: give text, a number, a list or a dict")

    try:
        return json.loads(json.dumps(value, default=other))
    except TypeError as error:  # a key
        raise UserError(f"{of}: {error}") from None
