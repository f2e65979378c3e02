"""Custom models that this process may run: the digests of trusted files, with a loader each. No torch."""

from collections.abc import Callable
from typing import Any

ALLOWED: dict[str, Callable[[str], Any]] = {}
"""SHA-256 of a file -> loads a name of it."""
