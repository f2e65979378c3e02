"""Exceptions of the data path: mistakes that the user can fix, and damaged samples.

The command line prints a `UserError` without a traceback and exits with code 2. A `CorruptSample` is substituted and
counted by the loader, or stops it. Any other exception is a bug or a machine fault, and keeps its traceback.
"""

from dataclasses import dataclass

from data_shards.text import printable


class UserError(ValueError):
    """The user's mistake: one printable sentence with the file, key or flag and what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may name what a file holds


class AgreedError(UserError):
    """Found by one process and raised by all, so one of them reports it."""


class SampleError(UserError):
    """A sample that cannot be read: only one process meets it, so that process must report it."""


class WorkerDied(RuntimeError):
    """A data worker process has died; the message names the sample that it was reading."""


class UnreadableImage(ValueError):
    """Bytes that are not a whole image; `str(error)` is the reason, in a few words."""


@dataclass(frozen=True)
class Fault:
    """A damaged sample, or a whole shard (then without a key)."""

    shard: str  # its printable name
    key: str
    reason: str


class CorruptSample(ValueError):
    """One sample is damaged; the rest of its shard may be whole. `shard` is a printable name, `reason` a few words."""

    def __init__(self, shard: str, key: str, reason: str) -> None:
        super().__init__(shard, key, reason)  # not the message: pickling calls the class with these
        self.shard = shard
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r} of {self.shard}: {self.reason}"
