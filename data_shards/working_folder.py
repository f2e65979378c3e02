"""No process of ours imports from the working folder, which may hold a `model.py` or a `torch.py` of the user's own.

`python -m` and `python -c`, with which launchers and Python itself start processes, look there first, unless
PYTHONSAFEPATH is set: so it is, for all that our commands start. What runs as `python -m launch...` without it drops
the folder itself (`launch/__init__.py`), too late for a `launch.py` in there and for what a launcher imports: so the
commands in the pages have it, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SAFE_PATH = {"PYTHONSAFEPATH": "shardvit"}  # any value switches it on; this one says that the user did not


def leave_out() -> None:
    """Leave the working folder out of the imports of all processes that this one starts."""
    for name, value in SAFE_PATH.items():
        os.environ.setdefault(name, value)


def users_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For the user's own commands, whose Python imports as it always does."""
    return {name: value for name, value in environ.items() if (name, value) not in SAFE_PATH.items()}
