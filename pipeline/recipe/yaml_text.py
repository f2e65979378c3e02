"""Read YAML with PyYAML's safe loader and the YAML 1.2 core schema; one sentence per error.

Dates, on, off, yes and no are text. Refuses duplicate keys and numbers that YAML 1.1 reads differently (017, 1:30,
1_000). Bounds depth, size, aliases and digits, so no file takes long.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line

_TAG = "tag:yaml.org,2002:"
_DEEPEST = 50
_MOST_VALUES = 20_000  # with aliases expanded
_MOST_DIGITS = 100
_MOST_BYTES = 1 << 20
# YAML 1.2.2, section 10.3.2, and YAML 1.1's merge key.
_CORE = {
    f"{_TAG}{kind}": re.compile(rf"(?:{pattern})\Z")
    for kind, pattern in {
        "null": r"~|null|Null|NULL|",
        "bool": r"true|True|TRUE|false|False|FALSE",
        "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "merge": r"<<",
    }.items()
}
_LIKE_A_NUMBER = re.compile(r"[-+]?\.?[0-9][\w.:+-]*\Z")


class _Refused(Exception):
    """Forbidden content; the text names the place."""


def read_yaml_file(path: Path) -> Any:
    """Read a file; UserError if that fails, or as `read_yaml`."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise UserError(f"{path} is no recipe: it has {size:,} bytes, and a recipe is a text of a few thousand")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        advice = "give a text file, saved as UTF-8"
        raise UserError(f"{path} is not valid YAML: byte {error.start:,} is no UTF-8; {advice}") from error
    return read_yaml(text, source=str(path))


def read_yaml(text: str, *, source: str) -> Any:
    """Parse a recipe's YAML, or raise UserError; `source` names it in messages."""
    try:
        if end := re.search("[\x85\u2028\u2029]", text):
            line = text.count("\n", 0, end.start()) + 1
            raise _Refused(f"line {line} has U+{ord(end[0]):04X}, which ends a line in YAML 1.1 alone: delete it")
        return yaml.load(text, Loader=_Loader)
    except _Refused as error:
        raise UserError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {_reason(error)}") from None


def write_yaml(tree: Any) -> str:
    """Write YAML with the same meaning in versions 1.1 and 1.2."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML version would read as another type."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: list(_CORE.items())}  # noqa: RUF012


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, recursive or multiplying aliases, and values that Python cannot hold."""

    yaml_implicit_resolvers = {None: list(_CORE.items())}  # noqa: RUF012 - as in the base class

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._sizes: dict[int, int] = {}  # values in each complete node, aliases expanded
        self._path: list[str] = []

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        line, is_alias = event.start_mark.line + 1, isinstance(event, yaml.AliasEvent)
        if isinstance(event, yaml.ScalarEvent) and (event.implicit[0] or event.tag in _NUMBERS):
            _demand_clear(event.value, line=line)
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
        for key, _ in node.value:  # before merging `<<`, which may repeat keys
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
        if isinstance(node, ScalarNode) and node.tag in _NUMBERS:
            digits = len(node.value)
            if digits > _MOST_DIGITS:
                line = node.start_mark.line + 1
                raise _Refused(f"line {line} has a number of {digits:,} digits: at most {_MOST_DIGITS} are taken")
        try:
            made = super().construct_object(node, deep=deep)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):  # such as !!int many
            kind = node.tag.removeprefix(_TAG)
            raise ConstructorError(None, None, f"this cannot be read as {kind}", node.start_mark) from None
        if isinstance(made, str) and (found := re.search("[\0\x85\u2028\u2029]", made)):
            raise _Refused(f"line {node.start_mark.line + 1} has U+{ord(found[0]):04X}, which no name or path can hold")
        return made


def _construct_whole(loader: _Loader, node: Any) -> int:
    return _whole(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}int", _construct_whole)


def _whole(text: str) -> int:
    return int(text, 0 if text[1:2] in ("o", "x") else 10)


def _demand_clear(text: str, *, line: int) -> None:
    """Refuse YAML 1.1 numbers that are another number or text in YAML 1.2."""
    if len(text) > _MOST_DIGITS or not _LIKE_A_NUMBER.match(text):
        return
    try:
        old = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):  # such as 2024-13-45
        return
    new = next((number(text) for tag, number in _NUMBERS.items() if _CORE[tag].match(text)), "text")
    if isinstance(old, int | float) and old != new:
        numbers = f"{old}," if new == "text" else f"{old}, {new},"
        raise _Refused(
            f"line {line}: {text} is {old} in YAML 1.1 and {new} in YAML 1.2: write {numbers} or '{text}' for text"
        )


_NUMBERS: dict[str, Callable[[str], float]] = {f"{_TAG}int": _whole, f"{_TAG}float": float}


_REASONS = (
    (
        "mapping values are not allowed",
        "a colon is where none can be: indent the line as its neighbours, or quote the text",
    ),
    (r"found character '\\t'", "a tab is where only spaces may be: indent by spaces"),
    ("could not find expected ':'", "there is no colon behind a key: write key: value"),
    ("but found another document", "a second document begins: leave out the ---"),
    (r"could not determine a constructor for the tag '([^']*)'", r"a tag (\1) has no effect in a recipe: leave it out"),
    (r"found undefined alias '?([^']*)'?", r"the alias *\1 names no anchor: write &\1 where it is to come from"),
    ("found unhashable key", "a group or list stands where a key must be: quote the text"),
    (
        r"expected <block end>, but found '.*'",
        "it is indented unlike its neighbours, or something is missing before it",
    ),
    ("found unexpected end of stream", "a quotation mark has no partner"),
    ("expected the node content, but found '<stream end>'|got '<stream end>'", "a bracket or brace has no partner"),
)


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position:,} is none that text may have: give a text file"
    problem = str(getattr(error, "problem", None) or error)
    matches = ((re.search(pattern, problem), words) for pattern, words in _REASONS)
    problem = next((match.expand(words) for match, words in matches if match), problem)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return one_line(problem) if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {one_line(problem)}"
