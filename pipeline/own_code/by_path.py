"""Load a function or class of the user's own by FILE:NAME, digest its file, and show errors from where they are his.

A file is a module of a name of its own, loaded once a process; sys.path is never touched, so it imports what is
installed, not its neighbours. Only what trains and evaluates loads it, because the user typed it there.
"""

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from shardvit.data_shards.errors import OwnCodeFailed, UserError

_CODE = re.compile(r"(.+\.py):([A-Za-z_]\w*)", re.ASCII)
OwnCode = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
"""FILE:NAME, relative to the working folder."""
_PREFIX = "shardvit_own_"


@cache
def load_own(code: str) -> Any:
    """Load it, once a process. UserError if there is no such file or name; what the file raises."""
    file, _, name = code.rpartition(":")
    path = Path(file).resolve()
    module = _PREFIX + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    if module not in sys.modules:
        _content(file)
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None  # the name ends in .py
        sys.modules[module] = made = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(made)
        except BaseException:
            del sys.modules[module]
            raise
    if not callable(found := getattr(sys.modules[module], name, None)):
        raise UserError(f"{code}: {file} has no function or class {name}")
    return found


def own_digests(tree: Any) -> dict[str, str]:
    """Digest the files that a recipe or a part of it names, as "own code FILE". UserError if one cannot be read."""
    files = sorted({found[1] for text in _texts(tree) if (found := _CODE.fullmatch(text))})
    return {f"own code {file}": hashlib.blake2b(_content(file), digest_size=16).hexdigest() for file in files}


def own_traceback(error: BaseException) -> str:
    """Format an error from the first frame in own code on; all of it if there is none."""
    if isinstance(error, OwnCodeFailed):
        return error.args[0]
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_globals.get("__name__", "").startswith(_PREFIX):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file}, which is to be run as own code, cannot be read: {error.strerror}") from None


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)
