"""Index the tars of other tools, which have no manifest: img2dataset's, open_clip's, timm's, webdataset's own.

They are indexed once, in parallel (see `tar_summary`), into a folder of the user's cache: one file per tar and finally
`set.json`, so an interrupted run resumes. The next open compares each tar's size and mtime, or its ETag (one request
each, concurrently), never a `pipe:`. Other processes on the machine wait for the one that indexes. Files of changed
tars stay behind; the folder can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shardvit.data_shards.durable import locked, replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.processes import num_cores, run_parts
from shardvit.data_shards.reading.tar_summary import FoundLabels, IndexedTar, TarSummary, index_tar, peek
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import PIPE, is_local, local_path, redacted
from shardvit.data_shards.shards.shard_set import Report, ShardEntry, ShardsSpec
from shardvit.data_shards.text import counted, show_duration

if TYPE_CHECKING:
    from shardvit.data_shards.store.store import Store

_VERSION = 1  # of the indexes; increased when older ones are unusable
# Indexing holds the GIL, so threads do not help; but a process takes 0.2 to 2 s to start.
_WORTH_PROCESSES_SECONDS = 4.0
_MOST_PROCESSES = 32
_REMOTE_THREADS = 8  # each holds a whole tar in the store's cache
_STAT_THREADS = 32
_PROGRESS_SECONDS = 5.0
PEEKED_TARS = 3

_ABSENT = IndexedTar(TarSummary(0, 0, "there is no such tar", 0, (), "", ""), FoundLabels())


@dataclass(frozen=True)
class Tar:
    """One tar: its index file's name, and the findings in it."""

    file: str
    facts: TarSummary


@dataclass(frozen=True)
class Indexed:
    """All tars in order, and their labels: the content of set.json."""

    source: str
    label: LabelSpec
    found: FoundLabels
    tars: tuple[Tar, ...]


_INDEXED = TypeAdapter(Indexed)


@dataclass(frozen=True)
class _Work:
    """Arguments of `index_tar` for local tars."""

    paths: list[str]
    targets: list[Path]
    labels: LabelSpec

    def index(self, number: int) -> tuple[int, IndexedTar]:
        path = self.paths[number]
        return number, index_tar(path, target=self.targets[number], labels=self.labels, name=path)


@dataclass(frozen=True)
class Indexing:
    """Index tars, or read the indexes of an earlier run."""

    spec: ShardsSpec  # says where the labels are
    urls: Sequence[str]  # absolute local paths, URLs, pipes
    source: str  # the set's name in messages
    index_folder: Path  # for all sets; each has a folder in it
    report: Report  # for progress lines
    store: Store | None  # for tars that are not local

    def result(self) -> Indexed:
        """Index the tars, or use an earlier run's indexes if the tars are unchanged.

        UserError for an ambiguous label or a folder that cannot be written, StoreError for an unreachable tar.
        """
        try:
            stated = None if self.spec.label is None else LabelSpec.parse(self.spec.label, kind=self.spec.kind)
        except ValueError as error:
            raise UserError(f"{self.source}: label: {error}") from None
        try:
            if (saved := self._saved()) is not None:
                return saved
            self._folder.mkdir(parents=True, exist_ok=True)
            waiting = f"{self.source}: another process is indexing it; waiting for that"
            with locked(self._folder / "lock", waiting=lambda: self.report(waiting)):
                # Another process may have indexed it meanwhile.
                return self._saved() or self._index(stated or self._cls_if_there())
        except OSError as error:
            raise UserError(
                f"{self.source}: its indexes cannot be kept in {self._folder} ({error.strerror}): set XDG_CACHE_HOME "
                "to a folder that you may write to"
            ) from error

    def _saved(self) -> Indexed | None:
        try:
            saved = _INDEXED.validate_json((self._folder / "set.json").read_bytes(), strict=True)
        except (FileNotFoundError, ValueError):
            return None
        return saved if [tar.file for tar in saved.tars] == [target.name for target in self._targets] else None

    def _index(self, labels: LabelSpec) -> Indexed:
        summaries, found = self._index_all(labels)
        tars = tuple(Tar(target.name, facts) for target, facts in zip(self._targets, summaries, strict=True))
        indexed = Indexed(self.source, labels, found, tars)
        replace_text(self._folder / "set.json", _INDEXED.dump_json(indexed, indent=1).decode(), writers="several")
        return indexed

    def entry(self, number: int, labels: LabelSpec, summary: TarSummary) -> ShardEntry:
        url = self.urls[number]
        return ShardEntry(
            url=url,
            name=redacted(url),
            num_samples=summary.num_samples,
            # The store's cache key depends on it, and a pipe's size is unknown beforehand.
            num_bytes=summary.num_bytes if is_local(url) else None,
            sha256="",
            index=self._targets[number],
            labels=labels,
            stamp=self._found[number][1],
            index_digest=summary.digest,
            pixels_digest=summary.pixels,
        )

    @cached_property
    def _folder(self) -> Path:
        return self.index_folder / _hashed((_VERSION, list(self.urls), self.spec.label, self.spec.kind))

    @cached_property
    def _found(self) -> list[tuple[str, str]]:
        """Each tar's fingerprint ("absent" for none) and its entry's `stamp`."""
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            return list(pool.map(self._fingerprint, self.urls))

    def _fingerprint(self, url: str) -> tuple[str, str]:
        from shardvit.data_shards.store.download import MissingObject

        try:
            if is_local(url):
                status = os.stat(local_path(url))
                # mtime can be set at will, ctime cannot.
                return f"{status.st_size} {status.st_mtime_ns}", f"{status.st_mtime_ns} {status.st_ctime_ns}"
            if url.startswith(PIPE):
                return "pipe", ""
            assert self.store is not None
            fingerprint = self.store.fingerprint(url)
            return fingerprint, fingerprint
        except (FileNotFoundError, NotADirectoryError, MissingObject):
            return "absent", ""
        except OSError as error:
            raise UserError(f"{url}: cannot be read ({error.strerror})") from None

    @cached_property
    def _targets(self) -> list[Path]:
        pairs = zip(self.urls, self._found, strict=True)
        return [self._folder / f"{_hashed((url, fingerprint))}.npz" for url, (fingerprint, _) in pairs]

    def _index_all(self, labels: LabelSpec) -> tuple[list[TarSummary], FoundLabels]:
        count = len(self.urls)
        begun = last_line = time.monotonic()
        self.report(f"{self.source}: indexing {counted(count, 'tar')}, once; the indexes are kept in {self._folder}")
        done = {number: _ABSENT for number, (fingerprint, _) in enumerate(self._found) if fingerprint == "absent"}

        def add(indexed: tuple[int, IndexedTar]) -> None:
            nonlocal last_line
            done[indexed[0]] = indexed[1]
            now = time.monotonic()
            if now - last_line >= _PROGRESS_SECONDS and len(done) < count:
                last_line = now
                left_seconds = (now - begun) / len(done) * (count - len(done))
                self.report(f"{self.source}: {len(done):,} of {count:,} tars, {show_duration(left_seconds)} left")

        todo = [number for number in range(count) if number not in done]
        if all(map(is_local, self.urls)):
            work = _Work([str(local_path(url)) for url in self.urls], self._targets, labels)
            while todo:
                add(work.index(todo.pop(0)))
                # Daemons, such as the loader's workers, may not start processes.
                processes = 1 if multiprocessing.current_process().daemon else min(num_cores(), _MOST_PROCESSES)
                if processes > 1 and (time.monotonic() - begun) / len(done) * len(todo) > _WORTH_PROCESSES_SECONDS:
                    run_parts(_Work.index, work, todo, processes=processes, done=add)
                    break
        else:
            with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
                futures = [pool.submit(self._index_remote, number, labels) for number in todo]
                try:
                    for future in as_completed(futures):
                        add(future.result())
                finally:
                    pool.shutdown(cancel_futures=True)
        if missing := [redacted(url) for number, url in enumerate(self.urls) if number not in done]:
            raise UserError(f"{missing[0]}: the process that indexed it crashed: is there enough memory?")
        found = FoundLabels()
        for each in done.values():
            found |= each.labels
        num_samples = sum(each.facts.num_samples for each in done.values())
        self.report(f"{self.source}: {num_samples:,} samples, {found} in {labels.text}")
        return [done[number].facts for number in range(count)], found

    def _index_remote(self, number: int, labels: LabelSpec) -> tuple[int, IndexedTar]:
        with self._local_copy(number, labels) as path:
            name = redacted(self.urls[number])
            return number, index_tar(path, target=self._targets[number], labels=labels, name=name)

    @contextmanager
    def _local_copy(self, number: int, labels: LabelSpec) -> Iterator[str]:
        url = self.urls[number]
        if is_local(url):
            yield str(local_path(url))
            return
        assert self.store is not None
        with open(self.store.open_file(self.entry(number, labels, _ABSENT.facts)), "rb") as tar:
            yield f"/dev/fd/{tar.fileno()}"  # the cache may evict it meanwhile

    def _cls_if_there(self) -> LabelSpec:
        labels = LabelSpec(kind=self.spec.kind)
        present = [number for number, (fingerprint, _) in enumerate(self._found) if fingerprint != "absent"]

        def peeked(number: int) -> tuple[set[str], list[str]]:
            with self._local_copy(number, labels) as path, open(path, "rb", buffering=0) as tar:
                return peek(partial(os.pread, tar.fileno()), os.fstat(tar.fileno()).st_size)

        demand_cls(map(peeked, present[:PEEKED_TARS]), source=self.source)
        return labels


def demand_cls(peeked: Iterable[tuple[set[str], list[str]]], *, source: str, key: str = "label:") -> None:
    """UserError unless some of the first tars (see `peek`) have .cls members; says which to give as `key`."""
    parts: set[str] = set()
    suggestions: dict[str, None] = {}
    for parts_here, suggestions_here in peeked:
        if "cls" in parts_here:
            return
        parts |= parts_here
        suggestions |= dict.fromkeys(suggestions_here)
    if parts:  # else no tar can be read, and the damage is reported instead
        choice = f"give {key} {' or '.join(suggestions)}" if suggestions else "none of these can be a label"
        found = ", ".join(sorted(parts))
        raise UserError(f"{source}: its samples have no .cls member to be the label, only {found}: {choice}")


def _hashed(identity: object) -> str:
    return hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()[:32]
