"""Keep the working folder, which may hold a user's `model.py` or `torch.py`, out of our processes' imports.

`python -m` and `python -c` look there first unless PYTHONSAFEPATH is set, so our commands set it for all they start.
`launch/__init__.py` drops the folder where it was not set: too late for a `launch.py` in there.
"""

import os
from collections.abc import Mapping

SAFE_PATH = {"PYTHONSAFEPATH": "shardvit"}  # any value switches it on; this one says that the user did not


def leave_out() -> None:
    """Set it for all processes that this one starts."""
    for name, value in SAFE_PATH.items():
        os.environ.setdefault(name, value)


def users_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for the user's own commands, without our setting."""
    return {name: value for name, value in environ.items() if (name, value) not in SAFE_PATH.items()}
