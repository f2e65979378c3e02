"""Record this process's versions, git revision and host, for checkpoints and MLflow's source tags.

Restoring a checkpoint reports differences, never refuses them. MLflow itself finds the commit only under `python -m`.
Costs four git calls (about 20 ms) and package metadata reads per stage; works without git. setup.py, which runs this
file by itself (so it imports the standard library only), leaves the tags in a wheel.
"""

import contextlib
import functools
import getpass
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("shardvit", "torch", "deepspeed", "accelerate", "timm", "numpy")
_NOT_COMPARED = ("host", "time")
COMMIT_FILE = "commit.json"  # beside the four rooms of a wheel
_SHARDVIT = Path(__file__).parents[2]


def written_by() -> dict[str, str]:
    """Return the record of this process that a checkpoint stores."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "revision": revision(),
        "host": platform.node(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def changed_since(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List differences, such as "torch 2.14.0 -> 2.15.0"."""
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in now
        if name not in _NOT_COMPARED and name in before and before[name] != now[name]
    ]


@functools.cache
def source_tags() -> dict[str, str]:
    """Return MLflow's source tags: program, user, commit."""
    # Without arguments, which may hold a URL with a password.
    tags = {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(KeyError, OSError, ImportError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags | source_revision()


def revision() -> str:
    """Return shardvit's commit, with " with changes" behind it if files differed; "unknown" without one."""
    tags = source_revision()
    return tags.get("mlflow.source.git.commit", "unknown") + (
        " with changes" if tags.get("shardvit.git.dirty") == "true" else ""
    )


def source_revision() -> dict[str, str]:
    """Return `git_tags` of this clone, or those of the one that this wheel was made from."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((_SHARDVIT / COMMIT_FILE).read_text(encoding="utf-8"))
    return git_tags(Path(__file__))


def git_tags(source_file: Path) -> dict[str, str]:
    """Return commit, branch and dirty state of the repository that tracks `source_file`. {} if none tracks it, as for a
    package installed inside another repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source_file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", source_file.name)
        return {
            "mlflow.source.git.commit": git("rev-parse", "HEAD"),
            "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "shardvit.git.dirty": "true" if git("status", "--porcelain", "--untracked-files=no") else "false",
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a clone, not installed
        return "not installed"
