"""Exceptions of the data path: user mistakes and damaged samples.

The command line prints a `UserError` without a traceback and exits with code 2. The loader substitutes and counts a
`CorruptSample`, or stops. Any other exception is a bug or a machine fault and keeps its traceback.
"""

from dataclasses import dataclass

from shardvit.data_shards.text import printable


class UserError(ValueError):
    """A user's mistake, in one printable sentence: the file, key or flag, and what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote a file


class AgreedError(UserError):
    """Found by one process, raised by all, reported by one."""


class SampleError(UserError):
    """An unreadable sample: only one process meets it, so that process must report it."""


class WorkerDied(RuntimeError):
    """A data worker died; the message names the sample it was reading."""


class OwnCodeFailed(RuntimeError):
    """An exception in the user's own code, where it travels from a data worker; its argument is the traceback."""

    def __str__(self) -> str:
        return str(self.args[0]).strip().rpartition("\n")[2]


class UnreadableImage(ValueError):
    """Bytes that are not a whole image; `str(error)` is a short reason."""


@dataclass(frozen=True)
class Fault:
    """A damaged sample, or a whole shard (with an empty key)."""

    shard: str  # its printable name
    key: str
    reason: str


class CorruptSample(ValueError):
    """A damaged sample, in a shard that may otherwise be whole. `shard` is a printable name, `reason` a few words."""

    def __init__(self, shard: str, key: str, reason: str) -> None:
        super().__init__(shard, key, reason)  # not the message: unpickling calls the class with these
        self.shard = shard
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r} of {self.shard}: {self.reason}"
