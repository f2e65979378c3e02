"""Pre-train, re-head and fine-tune Vision Transformers on WebDataset shards.

The public names are those of `__all__`, as docs/api.md describes them; all others are private and may change. Each is
imported when it is first used, so `import shardvit` costs next to nothing and imports no other library.

The four packages stand in the repository's top folder; here they are links, which a wheel has as folders.
"""

TYPE_CHECKING = False  # as typing's, without importing it
if TYPE_CHECKING:
    from typing import Any

    from shardvit.data_shards.errors import UserError as UserError
    from shardvit.data_shards.reading.streaming import as_webdataset as as_webdataset
    from shardvit.launch.api.created_model import create_model as create_model
    from shardvit.launch.api.loaded_model import LoadedModel as LoadedModel
    from shardvit.launch.api.loaded_run import LoadedRun as LoadedRun
    from shardvit.launch.api.loaded_run import load_run as load_run
    from shardvit.launch.api.measures import evaluate as evaluate
    from shardvit.launch.api.measures import pack as pack
    from shardvit.launch.api.measures import transfer as transfer
    from shardvit.launch.api.running import RunFailed as RunFailed
    from shardvit.launch.api.running import plan as plan
    from shardvit.launch.api.running import run as run
    from shardvit.launch.api.shard_loader import OpenedShards as OpenedShards
    from shardvit.launch.api.shard_loader import ShardLoader as ShardLoader
    from shardvit.launch.api.shard_loader import open_shards as open_shards
    from shardvit.model.own.custom import OwnModel as OwnModel
    from shardvit.pipeline.ranks.stopping import Stopped as Stopped

__version__ = "0.1.0"
__all__ = [
    "LoadedModel",
    "LoadedRun",
    "OpenedShards",
    "OwnModel",
    "RunFailed",
    "ShardLoader",
    "Stopped",
    "UserError",
    "as_webdataset",
    "create_model",
    "evaluate",
    "load_run",
    "open_shards",
    "pack",
    "plan",
    "run",
    "transfer",
]
_PLACES = {  # name -> its module; a new one also goes into __all__, the imports above and docs/api.md
    "LoadedModel": "launch.api.loaded_model",
    "LoadedRun": "launch.api.loaded_run",
    "OpenedShards": "launch.api.shard_loader",
    "OwnModel": "model.own.custom",
    "RunFailed": "launch.api.running",
    "ShardLoader": "launch.api.shard_loader",
    "Stopped": "pipeline.ranks.stopping",
    "UserError": "data_shards.errors",
    "as_webdataset": "data_shards.reading.streaming",
    "create_model": "launch.api.created_model",
    "evaluate": "launch.api.measures",
    "load_run": "launch.api.loaded_run",
    "open_shards": "launch.api.shard_loader",
    "pack": "launch.api.measures",
    "plan": "launch.api.running",
    "run": "launch.api.running",
    "transfer": "launch.api.measures",
}


def __getattr__(name: str) -> "Any":
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
