"""Open any shard as a local file with its index: from a local path, HTTP, s3, gs, a command.

Local shards are opened in place. All others are downloaded once per node, verified, indexed and cached; `remote`
describes a store's settings. Opening a cached shard takes about a millisecond. Needs no torch.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import PIPE, Commands, is_local, local_path, redacted, require_no_command
from shardvit.data_shards.shards.shard_index import ShardIndex
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.shards.tar_index import build_index, open_index, read_index
from shardvit.data_shards.store.cache import Cache, CacheConfig, Evict, PartialShard
from shardvit.data_shards.store.download import Downloads, MissingObject, RetryPolicy, StoreError
from shardvit.data_shards.store.remote_errors import DownloadStopped, Stop, Wrong

__all__ = ["MissingObject", "OpenShard", "RetryPolicy", "Store", "StoreError"]

_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class OpenShard:
    """A shard that stays readable after the cache evicts it; the caller must close the descriptor."""

    descriptor: int
    index: ShardIndex


@dataclass(frozen=True)
class _Fetch:
    entry: ShardEntry
    evict: Evict = "any"
    stop: Stop = lambda: False
    on_claimed: Callable[[], None] = lambda: None
    wants_index: bool = True


class Store:
    """Open shards wherever they are; one per process. Picklable: a copy has no descriptors and no connections.

    Without a `cache`, remote shards are refused. `commands` is "run" only if the user has typed the locations, or the
    recipe that contains them; "refuse" opens nothing that may run a program.
    """

    def __init__(
        self,
        cache: CacheConfig | None = None,
        *,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        commands: Commands = "refuse",
    ) -> None:
        self.cache = cache
        self._commands: Commands = commands
        self._cache = None if cache is None else Cache(cache)
        self._downloads = Downloads(retry or RetryPolicy(), sleep=sleep, commands=commands)
        self._fingerprints: dict[str, str] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copy the table: a prefetching thread may add to it during pickling."""
        return {**vars(self), "_fingerprints": dict(self._fingerprints)}

    def read_small(self, url: str, *, most_bytes: int) -> bytes:
        """Read a small remote file; MissingObject or StoreError if that fails, UserError if above `most_bytes`."""
        sink = _Memory(url, most_bytes=most_bytes)
        self._downloads.download(url, sink=sink)
        return bytes(sink.content)

    def size(self, url: str) -> int | None:
        """Size of a remote object in bytes; None: unknown, as for a pipe. Raises as `read_small` does."""
        return self._downloads.about(url)[0]

    def fingerprint(self, url: str) -> str:
        """Size and ETag or time of a remote object, which change with it ("" for a pipe); raises as `read_small`."""
        num_bytes, fingerprint = self._downloads.about(url)
        return f"{num_bytes} {fingerprint}" if fingerprint else ""

    def open(self, entry: ShardEntry) -> OpenShard:
        """Open a shard and its index; StoreError if it cannot be fetched, UserError for damage or an unusable cache."""
        if is_local(entry.url):
            index = open_index(local_path(entry.url), label=entry.labels.part, index=entry.index, name=entry.name)
            return OpenShard(_open_local(entry.url), index)
        descriptor, name, index = self._cached(_Fetch(entry))
        try:
            return OpenShard(descriptor, index or self._index(entry, descriptor, name=name))
        except BaseException:
            os.close(descriptor)
            raise

    def open_file(self, entry: ShardEntry) -> int:
        """Open a shard's file, complete but not indexed; StoreError and UserError as in `open`."""
        return _open_local(entry.url) if is_local(entry.url) else self._cached(_Fetch(entry, wants_index=False))[0]

    def prefetch(
        self, entry: ShardEntry, *, stop: Stop = lambda: False, on_claimed: Callable[[], None] = lambda: None
    ) -> None:
        """Fetch a shard, or mark it as still wanted, in one attempt that evicts nothing in use.

        `on_claimed` is called once the cache has room for it, if it is not there yet. StoreError and UserError as in
        `open`, CacheFull, and DownloadStopped if `stop` returned True.
        """
        if not is_local(entry.url):
            os.close(self._cached(_Fetch(entry, "idle", stop, on_claimed))[0])

    def keep(self, entry: ShardEntry) -> int | None:
        """Mark a cached shard as still wanted; return its bytes, or None if it is gone."""
        assert self._cache is not None
        descriptor = self._cache.open(self._name(_Fetch(entry, "idle")), num_bytes=entry.num_bytes)
        if descriptor is None:
            return None
        with open(descriptor, "rb"):
            return os.fstat(descriptor).st_size

    def _cached(self, fetch: _Fetch) -> tuple[int, str, ShardIndex | None]:
        """Return a shard's descriptor, its name in the cache, and its index if it had to be built."""
        entry = fetch.entry
        if self._cache is None:
            require_no_command(entry.url, commands=self._commands)
            raise UserError(f"{entry.name} is no local file: set data.cache.folder to a folder for such shards")
        name = self._name(fetch)
        while True:
            descriptor = self._cache.open(name, num_bytes=entry.num_bytes)
            if descriptor is not None:
                return descriptor, name, None
            part = self._cache.begin(name, evict=fetch.evict, stop=fetch.stop, on_claimed=fetch.on_claimed)
            if part is not None:
                with part:
                    # Another process may have finished it between the two calls.
                    descriptor = self._cache.open(name, num_bytes=entry.num_bytes)
                    if descriptor is not None:
                        return descriptor, name, None
                    index = self._download(fetch, part)
                    if index is not None and entry.index is None:
                        self._cache.save_index(index, name, label=entry.labels.part, evict=fetch.evict)
                    return part.publish(), name, index
            fetch.on_claimed()  # by whoever is writing it
            if fetch.stop():
                raise DownloadStopped
            time.sleep(_WAIT_SECONDS)

    def _download(self, fetch: _Fetch, part: PartialShard) -> ShardIndex | None:
        """Download and verify; building the index is part of that, since it reveals a truncated tar."""
        entry, index = fetch.entry, None

        def verify() -> None:
            nonlocal index
            part.finish()
            if not fetch.wants_index:
                return
            try:
                index = _read_or_build(entry, str(part.path))
            except UserError as error:
                if entry.sha256:
                    raise  # these bytes were packed: another download would bring the same
                raise Wrong(str(error).removeprefix(f"{entry.name}: ")) from None

        self._downloads.download(
            entry.url,
            sink=part,
            num_bytes=entry.num_bytes,
            sha256=entry.sha256,
            fingerprint="" if entry.sha256 else self._fingerprint(fetch),
            verify=verify,
            patiently=fetch.evict == "any",
            stop=fetch.stop,
        )
        return index

    def _index(self, entry: ShardEntry, descriptor: int, *, name: str) -> ShardIndex:
        """Read a cached shard's index, through its descriptor: it may be evicted by now."""
        assert self._cache is not None
        label = entry.labels.part
        if entry.index is None and (index := self._cache.load_index(name, label=label)) is not None:
            return index
        index = _read_or_build(entry, f"/dev/fd/{descriptor}")
        if entry.index is None:
            self._cache.save_index(index, name, label=label, evict="any")
        return index

    def _name(self, fetch: _Fetch) -> str:
        """Name the shard in the cache by its content, but not by passwords."""
        url = fetch.entry.url
        if fetch.entry.sha256:
            identity = [fetch.entry.sha256, redacted(url)]
        else:
            # The query stays: it may be all that identifies the file.
            identity = ["", re.sub(r"(?<=://)[^/?#]*@", "", url), self._fingerprint(fetch)]
        # A redacted pipe shows only program and tar, which may be absent or the same for several.
        if url.startswith(PIPE):
            identity.append(url)
        stem = re.sub(r"[^A-Za-z0-9_.+-]", "_", redacted(url).rstrip("/").rpartition("/")[2]).removesuffix(".tar")
        return f"{stem[-80:]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}"

    def _fingerprint(self, fetch: _Fetch) -> str:
        """Return the object's fingerprint when this process first saw it."""
        url = fetch.entry.url
        if url not in self._fingerprints:
            patiently = fetch.evict == "any"
            self._fingerprints[url] = self._downloads.about(url, patiently=patiently, stop=fetch.stop)[1]
        return self._fingerprints[url]


def _open_local(url: str) -> int:
    path = local_path(url)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingObject(f"{path} is not there: check the location, or copy it there") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): check what it is, and your rights to it") from None


def _read_or_build(entry: ShardEntry, path: str) -> ShardIndex:
    if entry.index is None:
        return build_index(path, label=entry.labels.part, name=entry.name)
    index = read_index(entry.index, label=entry.labels.part)
    if index.end > os.stat(path).st_size:
        raise UserError(f"{entry.name}: it is shorter than its index {entry.index} says")
    return index


class _Memory:
    """A `download.ByteSink` for small files."""

    def __init__(self, url: str, *, most_bytes: int) -> None:
        self._url, self._most_bytes = url, most_bytes
        self.content = bytearray()

    def begin(self, *, num_bytes: int | None) -> None:
        self.content.clear()
        self._check(num_bytes or 0)

    def write(self, piece: bytes) -> None:
        self.content += piece
        self._check(len(self.content))

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            most = f"more than {self._most_bytes} bytes, which such a file never has"
            raise UserError(f"{redacted(self._url)} has {most}: check the location")
