"""The exceptions of the data path: what the user can fix, and what is wrong with one sample.

The command line prints a `UserError` without a traceback and exits with code 2. A `CorruptSample` never reaches the
user as it is: the loader substitutes the sample and counts it, or stops. Any other exception is a bug or the machine's
fault, and keeps its traceback.
"""

from __future__ import annotations

from data_shards.text import printable


class UserError(ValueError):
    """A mistake of the user's: one sentence, fit to be printed, with the file, key or flag and what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may name what a file holds


class SampleError(UserError):
    """A sample that cannot be read: only one process meets it, so that process must report it."""


class WorkerDied(RuntimeError):
    """A data worker process has died; the message names the sample that it was reading."""


class UnreadableImage(ValueError):
    """Bytes that are no whole image; `str(error)` is the reason, in a few words."""


class CorruptSample(ValueError):
    """One sample is damaged; the rest of its shard may be whole.

    Args:
        shard: the shard's name, fit to be shown.
        key: the sample's key in it.
        reason: what is wrong, in a few words.
    """

    def __init__(self, shard: str, key: str, reason: str) -> None:
        super().__init__(shard, key, reason)  # not the message: pickling calls the class with these
        self.shard = shard
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r} of {self.shard}: {self.reason}"
