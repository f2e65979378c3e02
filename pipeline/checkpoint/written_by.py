"""Who wrote a checkpoint: versions, code revision, host, time. Kept in it, and compared when it is restored.

Costs a few calls of git and reads of packages' metadata, once a stage. What differs is told and never refused: whether
a version matters is the reader's to judge.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.checkpoint.source_tags import git_tags

_PACKAGES = ("shardvit", "torch", "deepspeed", "accelerate", "timm", "numpy")
_NOT_COMPARED = ("host", "time")


def written_by() -> dict[str, str]:
    """Facts of this process, as a checkpoint keeps them."""
    tags = git_tags(Path(__file__))
    revision = tags.get("mlflow.source.git.commit", "unknown")
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "revision": revision + (" with changes" if tags.get("shardvit.git.dirty") == "true" else ""),
        "host": platform.node(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def changed_since(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between the writer and this process, as "torch 2.14.0 -> 2.15.0"."""
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in now
        if name not in _NOT_COMPARED and name in before and before[name] != now[name]
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its folder, without being installed
        return "not installed"
