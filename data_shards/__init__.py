"""Images -> WebDataset shards -> samples -> batches. Knows nothing of `model` or `pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardvit.data_shards.reading.opening import open_shards
    from shardvit.data_shards.reading.streaming import as_webdataset

__all__ = ["as_webdataset", "open_shards"]
_MODULES = {
    "as_webdataset": "shardvit.data_shards.reading.streaming",
    "open_shards": "shardvit.data_shards.reading.opening",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
