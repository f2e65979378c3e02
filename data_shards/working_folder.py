"""Keep the working folder, which may hold a user's `model.py` or `torch.py`, out of our processes' imports.

`python -m` and `python -c` search it first unless PYTHONSAFEPATH is set, so our commands set it for every process they
start. `launch/__init__.py` drops the folder where it was not set: too late for a `launch.py` in it.
"""

import os
from collections.abc import Mapping

import shardvit

SAFE_PATH = {"PYTHONSAFEPATH": "shardvit"}  # any value switches it on; this one marks it as ours


def leave_out() -> None:
    """Set PYTHONSAFEPATH for every process started from here."""
    for name, value in SAFE_PATH.items():
        os.environ.setdefault(name, value)


def import_folder() -> str:
    """Return the folder to import `shardvit` from: of a clone `src`, which has no `model` or `pipeline` beside it."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(shardvit.__file__)))
    alone = os.path.join(folder, "src")
    return alone if os.path.isdir(os.path.join(alone, "shardvit")) else folder


def users_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for the user's own commands, without our setting."""
    return {name: value for name, value in environ.items() if (name, value) not in SAFE_PATH.items()}
