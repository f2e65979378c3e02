"""Download with retries: back-off with jitter, resumed transfers, verified digests.

Transient faults (5xx, 429, timeouts, cut connections) are retried, by default for ten minutes without progress. A cut
transfer resumes in ranges no larger than the bytes that came through, smaller each time none did: behind a proxy that
cuts every connection it still ends, as long as any bytes arrive. Missing or refused objects fail immediately. Wrong
bytes and failing commands are retried a few times: the source itself may be wrong. Digests take 1 s for 0.5 to 1.5 GB.
"""

import hashlib
import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from shardvit.data_shards.errors import SampleError
from shardvit.data_shards.shards.location import PIPE, Commands, redact_text, redacted
from shardvit.data_shards.store.remote import RANGE_BYTES, Output, Remotes, Stored
from shardvit.data_shards.store.remote_errors import DownloadStopped, Failure, Missing, Refused, Stop, Transient, Wrong

Access = Literal["read", "written"]
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class StoreError(SampleError):
    """A shard or file could not be fetched; the message has its name, the reason and what to do."""


class MissingObject(StoreError):
    """There is no such shard or file."""


@dataclass(frozen=True)
class RetryPolicy:
    """Delays and limits of retries."""

    first_delay_seconds: float = 1.0  # longest wait after the first failure; doubles with each more
    most_delay_seconds: float = 60.0
    give_up_seconds: float = 600.0  # of failures in a row, including waits; 0: one attempt
    wrong_attempts: int = 4  # after wrong bytes or a failing command
    connect_timeout_seconds: float = 20.0
    stall_timeout_seconds: float = 60.0  # without a byte


class ByteSink(Protocol):
    """Receives bytes; `begin` discards those received so far, and announces `num_bytes` (None: unknown)."""

    def begin(self, *, num_bytes: int | None) -> None: ...

    def write(self, piece: bytes) -> None: ...


class Backoff:
    """Count the failures of one task, wait after each, and finally give up.

    Full jitter (Brooker, "Exponential Backoff and Jitter", AWS blog, 2015): waits are uniform below a doubling limit.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: RetryPolicy,
        sleep: Callable[[float], None],
        draw: Callable[[], float],
        access: Access = "read",
    ) -> None:
        self._url, self._policy, self._sleep, self._draw, self._access = url, policy, sleep, draw, access
        self._wrong = 0
        self.progress()

    def progress(self) -> None:
        """Restart the count: the task got further than before."""
        self._failures, self._spent_seconds = 0, 0.0
        self._limit_seconds = self._policy.first_delay_seconds

    def wait(self, failure: Failure, *, spent_seconds: float) -> None:
        """Wait after an attempt of `spent_seconds`; StoreError if it was the last one."""
        url, reason = redacted(self._url), redact_text(str(failure), url=self._url)
        if isinstance(failure, Missing):
            raise MissingObject(f"{url} is not there ({reason}): check the location, or copy it there")
        if isinstance(failure, Refused):
            raise StoreError(
                f"{url} cannot be {self._access} ({reason}): check the location, and the credentials and settings "
                "in the environment, ~/.netrc, ~/.aws or ~/.config/fsspec"
            )
        self._wrong += isinstance(failure, Wrong)
        self._failures += 1
        delay = self._draw() * min(self._limit_seconds, self._policy.most_delay_seconds)
        self._limit_seconds *= 2
        self._spent_seconds += spent_seconds + delay
        if isinstance(failure, Wrong):  # by count alone: a slow machine must not make us blame the network
            if self._wrong >= self._policy.wrong_attempts:
                advice = "run the command by hand" if self._url.startswith(PIPE) else "upload or pack it again"
                raise StoreError(f"{url}: {reason}{_times(self._wrong)}: {advice}")
        elif self._spent_seconds >= self._policy.give_up_seconds:
            raise StoreError(
                f"{url}: {reason}{_times(self._failures)}: check the network and the server, "
                "then run the same command again"
            )
        if self._failures == 3:  # more than a hiccup, and the wait should not look like a hang
            _log.warning("%s: %s; trying again", url, reason)
        self._sleep(delay)


def _times(count: int) -> str:
    return "" if count == 1 else f", {count} times in a row"


class Downloads:
    """Read remote objects with retries; picklable if `sleep`, which takes seconds, is."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        sleep: Callable[[float], None] = time.sleep,
        commands: Commands = "refuse",
        requests: int = 1,
    ) -> None:
        self.policy, self._sleep = policy, sleep
        self._remotes = Remotes(policy.connect_timeout_seconds, policy.stall_timeout_seconds, commands, requests)

    def about(self, url: str, *, patiently: bool = True, stop: Stop = lambda: False) -> tuple[int | None, str]:
        """Size and fingerprint of an object (None and "" if unknown); arguments and errors as in `download`."""
        about = self.retried(url, lambda remote: remote.about(), patiently=patiently, stop=stop)
        return about.num_bytes, about.fingerprint

    def retried(
        self,
        url: str,
        attempt: Callable[[Any], Result],
        *,
        num_bytes: int = 0,
        access: Access = "read",
        patiently: bool = True,
        stop: Stop = lambda: False,
    ) -> Result:
        """Repeat `attempt` at the remote object, of at most `num_bytes`, while it fails; errors as in `download`."""
        backoff = self._backoff(url, patiently=patiently, access=access)
        remote = self._remotes.object(url, stop=stop, num_bytes=num_bytes)
        while True:
            begun = time.monotonic()
            try:
                return attempt(remote)
            except Failure as failure:
                backoff.wait(failure, spent_seconds=time.monotonic() - begun)

    def download(
        self,
        url: str,
        *,
        sink: ByteSink,
        num_bytes: int | None = None,
        sha256: str = "",
        fingerprint: str = "",
        verify: Callable[[], None] = lambda: None,
        patiently: bool = True,
        stop: Stop = lambda: False,
    ) -> None:
        """Write all bytes of `url`, in order, to `sink`, which may restart; StoreError after the last attempt.

        `num_bytes`, `sha256` and `fingerprint` must match unless None or ""; then `verify` may raise `Wrong`. Without
        `patiently` there is one attempt. `stop` is called several times a second; DownloadStopped if it returns True.
        """
        backoff = self._backoff(url, patiently=patiently)
        remote = self._remotes.object(url, stop=stop)
        transfer = _Transfer(sink, num_bytes=num_bytes, sha256=sha256, fingerprint=fingerprint)
        furthest = 0
        while True:
            begun = time.monotonic()
            try:
                transfer.attempt(remote)
                verify()
                return
            except Failure as failure:
                if stop():
                    raise DownloadStopped from None
                if isinstance(failure, Wrong):
                    transfer.forget()
                if transfer.done > furthest and isinstance(failure, Transient):
                    furthest = transfer.done
                    backoff.progress()
                backoff.wait(failure, spent_seconds=time.monotonic() - begun)

    def _backoff(self, url: str, *, patiently: bool, access: Access = "read") -> Backoff:
        policy = self.policy if patiently else replace(self.policy, give_up_seconds=0.0, wrong_attempts=1)
        # Its own generator: jitter must differ between processes and leave the global generator alone.
        draw = random.SystemRandom().random
        return Backoff(url, policy=policy, sleep=self._sleep, draw=draw, access=access)


class _Transfer:
    def __init__(self, sink: ByteSink, *, num_bytes: int | None, sha256: str, fingerprint: str) -> None:
        self._sink = sink
        self._num_bytes, self._sha256, self._fingerprint = num_bytes, sha256, fingerprint
        self._range_bytes = RANGE_BYTES
        self.forget()

    def forget(self) -> None:
        self.done = 0
        self._found = ""  # fingerprint of the object that the bytes came from
        self._digest = hashlib.sha256()

    def attempt(self, remote: Output | Stored) -> None:
        about = remote.about()
        if self._num_bytes is not None and about.num_bytes not in (None, self._num_bytes):
            raise Wrong(f"it has {about.num_bytes} bytes where {self._num_bytes} are expected")
        if self._fingerprint and about.fingerprint != self._fingerprint:
            raise Wrong("it is not the file any more that it was when the shards were opened")
        in_ranges = about.ranges == "yes" or (about.ranges == "with a digest" and self._sha256 != "")
        if not in_ranges or not about.fingerprint or about.fingerprint != self._found:
            self.forget()
            self._sink.begin(num_bytes=about.num_bytes if self._num_bytes is None else self._num_bytes)
        self._found = about.fingerprint
        begin = self.done
        # With a digest to decide, each machine behind one server may have its own fingerprint.
        asked = replace(about, fingerprint="") if self._sha256 else about
        try:
            with closing(
                remote.pieces(asked, begin=begin, range_bytes=self._range_bytes if in_ranges else None)
            ) as pieces:
                for piece in pieces:
                    self._take(piece)
        except Transient:
            quarter = (self.done - begin or self._range_bytes) // 4  # the store requests four ranges of each size
            self._range_bytes = min(RANGE_BYTES, 2 ** (max(1, quarter).bit_length() - 1))
            raise
        if about.num_bytes is not None and self.done != about.num_bytes:
            raise Transient(f"it was cut off after {self.done} of {about.num_bytes} bytes")
        if self._num_bytes is not None and self.done != self._num_bytes:
            raise Wrong(f"it has {self.done} bytes where {self._num_bytes} are expected")
        if self._sha256 and self._digest.hexdigest() != self._sha256:
            raise Wrong("its sha256 digest is not the one that the manifest has")

    def _take(self, piece: bytes) -> None:
        if self._num_bytes is not None and self.done + len(piece) > self._num_bytes:
            raise Wrong(f"it has more than the {self._num_bytes} bytes that are expected")
        self._sink.write(piece)
        if self._sha256:
            self._digest.update(piece)
        self.done += len(piece)
