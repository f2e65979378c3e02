"""Each room's `__init__` says in three lines what lives there, who imports it and what it imports: held to the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("data_shards", "launch", "model", "pipeline")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "bench" not in path.parts
}
FOLDERS = {name for name, path in FILES.items() if path.name == "__init__.py"}
ROOMS = sorted(FOLDERS - {*PACKAGES})


@cache
def imports(module: str) -> set[str]:
    """The modules of ours that a module imports, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{each.name}" for each in node.names]
            found.update(name if name in FILES else node.module for name in names)
    return found & FILES.keys()


def seen_from(room: str, module: str) -> str:
    """What a room calls a module that is outside it: a room beside it, the files beside it, or another package."""
    parent = room.rpartition(".")[0]
    if module.partition(".")[0] not in room.split("."):
        return module.partition(".")[0]
    if not f"{module}.".startswith(f"{parent}."):
        parent = room.partition(".")[0]
    inner = module.removeprefix(f"{parent}.").partition(".")[0]
    return inner if f"{parent}.{inner}" in FOLDERS else f"files of {parent}"


def test_rooms_are_found() -> None:
    assert len(ROOMS) > 20


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_who_imports_it_and_what_it_imports(room: str) -> None:
    text = ast.get_docstring(ast.parse(FILES[room].read_text(encoding="utf-8"))) or ""
    words = re.fullmatch(r".+\n\nImported by: (.+)\.\nImports: (.+)\.", re.sub(r"\n +", " ", text))
    assert words, text
    inside = {name for name in FILES if f"{name}.".startswith(f"{room}.")}
    importers = {name for name in FILES.keys() - inside if imports(name) & inside}
    imported = {each for name in inside for each in imports(name) - inside - {room.partition(".")[0]}}
    for said, true in zip(words.groups(), (importers, imported), strict=True):
        assert said == ", ".join(sorted({seen_from(room, name) for name in true}))
