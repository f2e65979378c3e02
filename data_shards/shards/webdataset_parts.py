"""Import webdataset on first use, without torch (3 s, 600 MB) in processes that have not loaded it.

webdataset needs torch only for the base classes of its pipelines. Its modules for tars, names and URLs are loaded as a
package of another name, whose `pytorch` module is empty: 0.1 s.
"""

import importlib
import importlib.util
import re
import sys
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any, Protocol

_WITHOUT_TORCH = "webdataset_without_torch"
_lock = Lock()


class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


def part(module: str) -> Any:
    """Import `webdataset.MODULE`: "writer", "tariterators", "shardlists" or "gopen"."""
    if "torch" in sys.modules:
        return importlib.import_module(f"webdataset.{module}")
    with _lock:
        if _WITHOUT_TORCH not in sys.modules:
            spec = importlib.util.find_spec("webdataset")
            assert spec is not None and spec.submodule_search_locations is not None
            package, pytorch = ModuleType(_WITHOUT_TORCH), ModuleType(f"{_WITHOUT_TORCH}.pytorch")
            package.__path__ = list(spec.submodule_search_locations)
            for name in ("DataLoader", "IterableDataset", "TorchTensor"):
                setattr(pytorch, name, type(name, (), {}))
            sys.modules |= {pytorch.__name__: pytorch, package.__name__: package}
    return importlib.import_module(f"{_WITHOUT_TORCH}.{module}")


def library() -> Any:
    """Import all of webdataset, with torch, for its pipelines."""
    return importlib.import_module("webdataset")


def tar_writer(stream: _Writable) -> Any:
    """Make a `TarWriter` whose bytes depend only on the content: no time, user or group."""
    return part("writer").TarWriter(stream, user="", group="", mode=0o444, mtime=0, encoder=False, compress=False)


def split_name(name: str) -> tuple[str, str] | None:
    """Split a tar member's name into (key, extension) by webdataset's rule, at the first dot of the file name.

    None for a name without a dot, a hidden file (webdataset takes a Mac's "d/._x.jpg" for part of a sample "d/"), or
    __SO__, its mark for metadata.
    """
    if name.rpartition("/")[2].startswith("."):
        return None
    if name.startswith("__") and re.match(r"__[^/]*__($|/)", name):
        return None
    key, extension = _base_plus_ext()(name)
    return None if key is None else (key, extension.lower())


def expand_urls(pattern: str) -> list[str]:
    """Expand braces, and ${NAME} by WDS_NAME except in a pipe; ValueError for a lone brace, KeyError if unset."""
    shardlists = part("shardlists")
    if pattern.startswith("pipe:") or "::" in pattern:  # "::" may be an IPv6 address, which expand_urls would cut
        return list(shardlists.braceexpand.braceexpand(pattern))
    try:
        return shardlists.expand_urls(pattern)
    except AssertionError as error:
        raise KeyError(str(error).rpartition(" ")[2].removeprefix("wds_")) from None


@cache
def _base_plus_ext() -> Any:
    return part("tariterators").base_plus_ext
