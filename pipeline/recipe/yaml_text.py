"""PyYAML's safe loader, with one sentence for each error.

Stricter than YAML 1.1: duplicate keys are refused; a date stays text, and so do on, off, yes and no, as in YAML 1.2.
Depth, size, aliases and digits are bounded, so that any file is read or refused in a moment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from data_shards.errors import UserError
from data_shards.text import one_line

_TAG = "tag:yaml.org,2002:"
_DEEPEST = 50
_MOST_VALUES = 20_000  # aliases written out
_MOST_DIGITS = 100
_MOST_BYTES = 1 << 20


class _Refused(Exception):
    """The content is not allowed; the text names the place."""


def read_yaml_file(path: Path) -> Any:
    """The content of a file; UserError if it cannot be read or is not a recipe's YAML."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise UserError(f"{path} is no recipe: it has {size:,} bytes, and a recipe is a text of a few thousand")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not valid YAML: byte {error.start:,} is no UTF-8; give a text file, saved as UTF-8"
        ) from error
    return read_yaml(text, source=str(path))


def read_yaml(text: str, *, source: str) -> Any:
    """The content of a text, called `source` in messages; UserError if it is not a recipe's YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except _Refused as error:
        raise UserError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {_reason(error)}") from None


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, aliases that multiply or contain themselves, and values that Python cannot hold."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag != f"{_TAG}timestamp" and (tag != f"{_TAG}bool" or first in "tTfF")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._sizes: dict[int, int] = {}  # of the nodes that are complete: values in them, aliases written out
        self._path: list[str] = []

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        line = self.peek_event().start_mark.line + 1
        is_alias = self.check_event(yaml.AliasEvent)
        self._path.append(index.value if isinstance(index, ScalarNode) else "")
        if len(self._path) > _DEEPEST:
            raise _Refused(f"line {line} opens the {_DEEPEST}th group or list within another: none may be so deep")
        before = self._values
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self._path.pop()
        if is_alias:
            if id(node) not in self._sizes:
                raise _Refused(f"an alias in line {line} stands inside of what it repeats")
            self._values += self._sizes[id(node)]
        else:
            self._values += 1
            self._sizes[id(node)] = self._values - before
        if self._values > _MOST_VALUES:
            raise _Refused(f"it says more than {_MOST_VALUES:,} values, aliases written out, up to line {line} alone")
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:  # before `<<` is written out, which may well repeat keys
            if not isinstance(key, ScalarNode) or key.tag == f"{_TAG}merge":
                continue
            line, first = key.start_mark.line + 1, lines.get((key.tag, key.value))
            if first is not None:
                name = one_line(".".join([*filter(None, self._path), key.value]))
                where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                raise _Refused(f"key {name} is given twice, {where}: leave one out")
            lines[key.tag, key.value] = line
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        if isinstance(node, ScalarNode) and node.tag in (f"{_TAG}int", f"{_TAG}float"):
            digits = len(node.value)
            if digits > _MOST_DIGITS:
                line = node.start_mark.line + 1
                raise _Refused(f"line {line} has a number of {digits:,} digits: at most {_MOST_DIGITS} are taken")
        try:
            made = super().construct_object(node, deep=deep)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):  # such as !!int many
            kind = node.tag.removeprefix(_TAG)
            raise ConstructorError(None, None, f"this cannot be read as {kind}", node.start_mark) from None
        if isinstance(made, str) and "\0" in made:
            raise _Refused(f"line {node.start_mark.line + 1} has a NUL character, which no name or path can hold")
        return made


_REASONS = (
    (
        r"mapping values are not allowed",
        "a colon is where none can be: indent the line as its neighbours are, or put the text into quotes",
    ),
    (r"found character '\\t'", "a tab is where only spaces may be: indent by spaces"),
    (r"could not find expected ':'", "there is no colon behind a key: write key: value"),
    (r"but found another document", "a second document begins: leave out the ---"),
    (r"could not determine a constructor for the tag '([^']*)'", r"a tag (\1) means nothing in a recipe: leave it out"),
    (r"found undefined alias '?([^']*)'?", r"the alias *\1 names no anchor: write &\1 where it is to come from"),
    (r"found unhashable key", "a group or list stands where a key must be: put the text into quotes"),
    (
        r"expected <block end>, but found '(.*)'",
        r"it is indented unlike its neighbours, or something is missing before it",
    ),
    (r"found unexpected end of stream", "a quotation mark has no partner"),
    (r"expected the node content, but found '<stream end>'|got '<stream end>'", "a bracket or brace has no partner"),
)


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position:,} is none that text may have: give a text file"
    problem = str(getattr(error, "problem", None) or error)
    for pattern, words in _REASONS:
        match = re.search(pattern, problem)
        if match:
            problem = match.expand(words)
            break
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return one_line(problem) if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {one_line(problem)}"
