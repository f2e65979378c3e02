"""Load a function or class of the user's own from FILE:NAME, and call it. Never touches sys.path."""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from shardvit.data_shards.errors import UserError

OwnCode = Annotated[str, Field(pattern=r"\.py:[A-Za-z_]\w*$")]


@cache
def load_own(code: str) -> Any:
    """Load it, once a process. UserError if there is no such file or name."""
    file, _, name = code.rpartition(":")
    module = "shardvit_own_" + Path(file).resolve().as_posix().replace("/", "_").removesuffix(".py")
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None or not Path(file).is_file():
            raise UserError(f"{code}: there is no file {file}")
        sys.modules[module] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    if not hasattr(sys.modules[module], name):
        raise UserError(f"{code}: {file} has no {name}")
    return getattr(sys.modules[module], name)


def run_own(function: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Call it."""
    return function(*inputs, **more)
