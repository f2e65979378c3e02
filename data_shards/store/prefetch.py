"""Download upcoming shards during training: background threads of each rank, over the shared cache.

They take shards in turns, in training order, up to a number of bytes ahead, so that the store's delay and the disk of
one pass under the other's transfer. A turn lasts until its shard has room: none further ahead takes it. The prefetcher
marks these shards as wanted, so that no prefetcher evicts them; only idle shards make room. It retries until training
has passed the shard, whose reader reports errors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet
from shardvit.data_shards.store.cache import TOUCH_SECONDS, CacheFull
from shardvit.data_shards.store.remote_errors import DownloadStopped
from shardvit.data_shards.store.store import Store

# Shards in use need room too, as do those of the node's other ranks, which share the cache.
_LOOKAHEAD_SHARE = 1 / 4
# Once everything is local, steps cost only their planning; further ahead is useless.
_MOST_STEPS_AHEAD = 1000
_NO_ROOM_SECONDS = 1.0
_FIRST_DELAY_SECONDS, _MOST_DELAY_SECONDS = 1.0, 30.0
_CLOSE_SECONDS = 5.0
_SHARDS_AT_ONCE = 2  # each takes four ranges of memory


def start_prefetch(
    store: Store | None, shards: ShardSet, *, upcoming: Iterator[tuple[int, Sequence[int]]]
) -> Prefetcher | None:
    """Start a prefetcher; None if every shard is a local file (`upcoming` is not touched)."""
    if store is None or store.cache is None or shards.is_local:
        return None
    lookahead_bytes = int(store.cache.limit_bytes * _LOOKAHEAD_SHARE)
    return Prefetcher(store, shards.shards, upcoming=upcoming, lookahead_bytes=lookahead_bytes)


class Prefetcher:
    """Fetch upcoming shards in threads that live until `close`.

    `upcoming` has (step, numbers of shards first needed there), in ascending order, maybe endless; one thread at a
    time iterates. `lookahead_bytes` limits the shards ahead of training; one is always allowed.
    """

    def __init__(
        self,
        store: Store,
        entries: Sequence[ShardEntry],
        *,
        upcoming: Iterator[tuple[int, Sequence[int]]],
        lookahead_bytes: int,
    ) -> None:
        self._store, self._entries = store, entries
        self._turns, self._taking = self._take(upcoming), threading.Lock()
        self._lookahead_bytes = lookahead_bytes
        self._changed = threading.Condition()
        self._step = -1
        self._closed = threading.Event()
        self._ahead: dict[int, tuple[int, int]] = {}  # shard -> the step that needs it, its bytes
        self._coming: set[int] = set()  # those of them that are under way
        self._touched_at = time.monotonic()
        self.error: Exception | None = None  # the latest, for debugging
        self._threads = [
            threading.Thread(target=self._run, name="shard-prefetch", daemon=True) for _ in range(_SHARDS_AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    def reached(self, step: int) -> None:
        """Say that all steps before `step` have their samples."""
        with self._changed:
            self._step = max(self._step, step)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop; a running transfer is aborted and leaves nothing behind."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                with contextlib.ExitStack() as turn:
                    turn.enter_context(self._taking)
                    shard, step = next(self._turns, (None, 0))
                    if shard is None:
                        return
                    try:
                        self._fetch(shard, step, on_claimed=turn.close)
                    finally:
                        self._coming.discard(shard)
        except DownloadStopped:
            pass
        except Exception as error:  # noqa: BLE001 - without prefetching, training is only slower
            self.error = error

    def _take(self, upcoming: Iterator[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int]]:
        """Yield (shard, step) when there is room for it; DownloadStopped on `close`."""
        for step, shards in upcoming:
            self._wait_while(lambda step=step: self._step < step - _MOST_STEPS_AHEAD)
            for shard in shards:
                self._wait_while(lambda step=step, shard=shard: self._step <= step and not self._has_room(shard))
                self._coming.add(shard)
                self._ahead[shard] = step, self._entries[shard].num_bytes or 0
                yield shard, step

    def _fetch(self, shard: int, step: int, *, on_claimed: Callable[[], None]) -> None:
        """Fetch a shard, unless training gets there first; `on_claimed` ends its turn, and may be called again."""
        delay = _FIRST_DELAY_SECONDS
        while self._step <= step:
            try:
                self._store.prefetch(self._entries[shard], stop=self._pulse, on_claimed=on_claimed)
                self._ahead[shard] = step, self._store.keep(self._entries[shard]) or 0
                return
            except CacheFull:
                self._pause(_NO_ROOM_SECONDS)
            except DownloadStopped:
                raise
            except Exception as error:  # noqa: BLE001 - the reader will get the same error and report it
                self.error = error
                on_claimed()
                self._pause(delay)
                delay = min(2 * delay, _MOST_DELAY_SECONDS)

    def _has_room(self, shard: int) -> bool:
        for each, (step, _) in list(self._ahead.items()):
            if step < self._step:
                self._ahead.pop(each, None)
        ahead_bytes = sum(size for _, size in list(self._ahead.values()))
        return not self._ahead or ahead_bytes + (self._entries[shard].num_bytes or 0) <= self._lookahead_bytes

    def _wait_while(self, condition: Callable[[], bool], *, poll_seconds: float = TOUCH_SECONDS) -> None:
        """DownloadStopped on `close`."""
        while not self._closed.is_set() and condition():
            with self._changed:
                if not self._closed.is_set():
                    self._changed.wait(poll_seconds)
            self._pulse()
        if self._closed.is_set():
            raise DownloadStopped

    def _pause(self, seconds: float) -> None:
        """Wait, even if training gets there; DownloadStopped on `close`."""
        end = time.monotonic() + seconds
        self._wait_while(lambda: time.monotonic() < end, poll_seconds=min(seconds, TOUCH_SECONDS))

    def _pulse(self) -> bool:
        """True to stop; every few seconds, mark shards ahead as still wanted. Called several times a second."""
        if not self._closed.is_set() and time.monotonic() - self._touched_at > TOUCH_SECONDS:
            self._touched_at = time.monotonic()
            for shard, (step, _) in list(self._ahead.items()):
                if step < self._step or shard in self._coming:
                    continue
                if self._store.keep(self._entries[shard]) is None:
                    self._ahead.pop(shard, None)  # a reader needed its room
        return self._closed.is_set()
