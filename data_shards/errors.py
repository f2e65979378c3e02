"""The exceptions of the data path: what the user can mend, and what is wrong with one sample.

A `UserError` carries one sentence that names the file, the key or the flag and says what to change. The command line
prints it without a traceback and exits with code 2. A `CorruptSample` never reaches the user as it is: the loader
puts another sample in its place and counts it, or stops. Everything else that is raised is our own mistake or the
machine's, and keeps its traceback.
"""

from __future__ import annotations

from data_shards.text import printable


class UserError(ValueError):
    """A mistake of the user's; `str(error)` is the whole message, fit to be printed as it is."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may name what a file holds


class SampleError(UserError):
    """A sample that cannot be read: one process alone comes upon it, so that process must speak up."""


class WorkerDied(RuntimeError):
    """A process that reads ahead is gone; the message says which sample it was reading."""


class UnreadableImage(ValueError):
    """Bytes that are no image, or none that is whole; `str(error)` is the reason, in a few words."""


class CorruptSample(ValueError):
    """One sample is damaged; the rest of its shard may be whole.

    Args:
        shard: the shard's name, fit to be shown.
        key: the sample's key in it.
        reason: what is wrong, in a few words.
    """

    def __init__(self, shard: str, *, key: str, reason: str) -> None:
        super().__init__(f"sample {key!r} of {shard}: {reason}")
        self.shard = shard
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        """Keyword-only arguments do not survive pickling by themselves."""
        return _corrupt_sample, (self.shard, self.key, self.reason)


def _corrupt_sample(shard: str, key: str, reason: str) -> CorruptSample:
    return CorruptSample(shard, key=key, reason=reason)
