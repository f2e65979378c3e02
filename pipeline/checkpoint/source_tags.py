"""Which code runs, by whom: MLflow's source tags. MLflow finds the commit by itself for `python -m` only.

Costs four calls of git, some 20 ms. Knows nothing of mlflow; git that is absent or unhappy means fewer tags.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import subprocess
import sys
from pathlib import Path


@functools.cache
def source_tags() -> dict[str, str]:
    """Tags of the running program: its name, its user and the commit of this package."""
    # Only the program's name: its arguments may hold a URL with a password.
    tags = {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(KeyError, OSError, ImportError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags | git_tags(Path(__file__))


def git_tags(source_file: Path) -> dict[str, str]:
    """Commit, branch, and whether tracked files differ, of the repository that tracks `source_file`; else {}.

    A package that is installed somewhere inside another repository is not tracked by it: that commit is not
    ours.
    """

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
