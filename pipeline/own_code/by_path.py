"""Load custom code by path: FILE.py:NAME as typed, FILE.py@SHA256:NAME once a run has recorded it.

Typing a reference trusts the file as it is then. The digest travels with the resolved recipe, so every process of the
run loads that very text or refuses, and a changed file is a changed recipe. References in a run's records are strings:
only training, and a file that the user types again (`trust`), load them. Never touches sys.path: a file's siblings are
found if the user's PYTHONPATH has them.
"""

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from shardvit.data_shards.errors import OwnCodeFailed, UserError
from shardvit.model.own.allowed import ALLOWED

OwnCode = Annotated[str, Field(pattern=r"\.py(@[0-9a-f]{64})?:[A-Za-z_]\w*$")]

_REFERENCE = re.compile(r"(?P<file>.+\.py)(?:@(?P<digest>[0-9a-f]{64}))?:(?P<name>[A-Za-z_]\w*)")
_KEYS = ("custom", "task", "metrics", "callbacks")
_PLACE = re.compile(r"[^'\",\[]*/(?=[^/'\",]+\.py@[0-9a-f]{64}:)")
_MODULE = "shardvit_own_"


def absolute(tree: Any, *, folder: Path) -> Any:
    """Resolve the references in a recipe's keys from the folder of the file that they stand in."""

    def resolve(code: str) -> str:
        file, digest, name = _parts(code)
        return code if digest else f"{os.path.abspath(folder / Path(file).expanduser())}:{name}"

    return _mapped(tree, resolve)


def pinned(tree: Any, *, origin: str) -> Any:
    """Add each file's digest to the references that the user typed. UserError for one that a run recorded, or a file
    that cannot be read."""

    def pin(code: str) -> str:
        file, digest, name = _parts(code)
        if digest:
            raise UserError(
                f"{origin} names own code as a run has recorded it, {Path(file).name}:{name}, which nobody typed: "
                f"read {file}, and if you trust it give the key again, such as loss.custom={file}:{name}"
            )
        return f"{file}@{hashlib.sha256(_read(file)).hexdigest()}:{name}"

    return _mapped(tree, pin)


def references(tree: Any) -> list[str]:
    """List the references in a recipe's keys."""
    found: list[str] = []
    _mapped(tree, lambda code: found.append(code) or code)
    return list(dict.fromkeys(found))


def copies(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield name and text of a copy of each file for reading; its name ends so that nothing imports it."""
    for file, digest in {_parts(code)[:2] for code in references(tree)}:
        yield f"{Path(file).stem}-{digest[:12]}.py.txt", _checked(file, digest=digest).decode("utf-8", "replace")


def without_places(text: str) -> str:
    """Leave out the folders of recorded references: moving a file does not change it."""
    return _PLACE.sub("", text)


def shown(code: str | None) -> str:
    """Format a reference for a message, without the digest."""
    file, _, name = _parts(code or "")
    return f"{file}:{name}"


def _mapped(tree: Any, change: Callable[[str], str], *, key: str = "") -> Any:
    match tree:
        case dict():
            return {name: _mapped(each, change, key=str(name)) for name, each in tree.items()}
        case list() | tuple():
            return [_mapped(each, change, key=key) for each in tree]
        case str() if key in _KEYS and _REFERENCE.fullmatch(tree):
            return change(tree)
        case str() if key in _KEYS and tree.endswith(".py"):
            raise UserError(f"{key} {tree} names a file alone: write {tree}:NAME, a function or class in it")
        case _:
            return tree


def _parts(code: str) -> tuple[str, str, str]:
    match = _REFERENCE.fullmatch(code)
    if match is None:
        raise UserError(f"{code!r} names no own code: write FILE.py:NAME, such as ./mine.py:my_loss")
    return match["file"], match["digest"] or "", match["name"]


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file}, which is to be run as own code, cannot be read: {error.strerror}") from None


def _checked(file: str, *, digest: str) -> bytes:
    source = _read(file)
    if digest and (now := hashlib.sha256(source).hexdigest()) != digest:
        raise UserError(
            f"own code: {file} is not the file that the run began with (SHA-256 {now[:12]}..., not {digest[:12]}...): "
            "bring that one back (its text is in the run's own_code), or begin again with --restart STAGE"
        )
    return source


def allow_model(code: str | None) -> None:
    """Let this process build the model that the user's recipe names; its file is loaded when that happens."""
    if code is not None:
        file, digest, _ = _parts(code)
        ALLOWED[digest] = lambda name: load_own(f"{file}@{digest}:{name}")


def trust_file(file: Path | None) -> None:
    """Let this process build the models of a file that the user typed after --trust; UserError if it is not there."""
    if file is not None:
        path = os.path.abspath(file)
        allow_model(f"{path}@{hashlib.sha256(_read(path)).hexdigest()}:trusted")


@cache
def load_own(code: str) -> Any:
    """Load a function or class, its file once a process. UserError, with the user's frames of the traceback, for a
    missing, changed or failing file, or a name that it lacks or that cannot be called."""
    file, digest, name = _parts(code)
    if not callable(found := getattr(_module(os.path.abspath(file), digest), name, None)):
        raise UserError(f"{file} has no function or class {name}")
    return found


@cache
def _module(file: str, digest: str) -> Any:
    source = _checked(file, digest=digest)
    name = f"{_MODULE}{Path(file).stem}_{hashlib.sha256(file.encode() + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # there for dataclasses and pickle
    try:
        exec(compile(source, file, "exec"), module.__dict__)  # the bytes whose digest was compared
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own file may raise anything
        del sys.modules[name]
        raise UserError(f"own code: {file} cannot be imported:\n{own_traceback(error).rstrip()}") from None
    return module


def own_digests(tree: Any) -> dict[str, str]:
    """Digest the files that a recipe or a part of it names, as "own code FILE". UserError if one cannot be read, or is
    not the recorded one."""
    files = sorted({_parts(code)[:2] for code in references(tree)})
    return {f"own code {file}": hashlib.sha256(_checked(file, digest=digest)).hexdigest() for file, digest in files}


def own_traceback(error: BaseException) -> str:
    """Format an error from the first frame in own code on; all of it if there is none."""
    if isinstance(error, OwnCodeFailed):
        return error.args[0]
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_globals.get("__name__", "").startswith(_MODULE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__, chain=frames is None))
