"""Images -> WebDataset shards -> samples -> batches. Knows nothing of `model` or `pipeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_shards.reading.opening import open_shards
    from data_shards.reading.streaming import as_webdataset

__all__ = ["as_webdataset", "open_shards"]


def __getattr__(name: str) -> Any:
    if name == "as_webdataset":
        from data_shards.reading.streaming import as_webdataset

        return as_webdataset
    if name == "open_shards":
        from data_shards.reading.opening import open_shards

        return open_shards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
