"""Tars of other tools, without a manifest, and their indexes: img2dataset's, open_clip's, timm's, webdataset's own.

They are indexed once, in parallel (see `foreign.tar`), into a folder of the user's cache: one file per tar and finally
`set.json`, so an interrupted run resumes. The next open compares each tar's size and mtime, or its ETag (one request
each, concurrently); a `pipe:` has neither and is never compared. Processes of one machine wait for the one that
indexes. Files of changed tars stay behind; the folder can be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from data_shards.errors import UserError
from data_shards.processes import block_interrupts, end_with_parent, num_cores
from data_shards.reading.tar_summary import FoundLabels, TarSummary, index_tar, labels_from, peek, summary_from
from data_shards.shards.labels import LabelSpec
from data_shards.shards.location import PIPE, is_local, local_path, redacted
from data_shards.shards.manifest import write_json
from data_shards.shards.shard_set import Report, ShardEntry, ShardsSpec
from data_shards.text import parse_json, show_duration

if TYPE_CHECKING:
    from data_shards.store.store import Store

_VERSION = 1  # of the indexes; raised when older ones cannot be used
# Indexing holds the GIL, so threads do not help; but a process takes 0.2 to 2 s to start.
_WORTH_PROCESSES_SECONDS = 4.0
_MOST_PROCESSES = 32
_REMOTE_THREADS = 8  # each holds a whole tar in the store's cache
_STAT_THREADS = 32
_PROGRESS_SECONDS = 5.0
_PEEKED_TARS = 3

_ABSENT = TarSummary(0, 0, "there is no such tar", 0, (), "", "")


@dataclass(frozen=True)
class Tar:
    """One tar and what was found in it."""

    entry: ShardEntry
    facts: TarSummary


@dataclass(frozen=True)
class Indexed:
    """All tars in their order, and their labels."""

    tars: tuple[Tar, ...]
    labels: LabelSpec
    found: FoundLabels


@dataclass(frozen=True)
class Indexing:
    """Indexes tars, or reads the indexes of an earlier run."""

    spec: ShardsSpec  # says where the labels are
    urls: Sequence[str]  # absolute local paths, URLs, pipes
    source: str  # what messages call them all
    index_folder: Path  # for the indexes of all sets; this one gets a folder in it
    report: Report  # takes lines on the progress
    store: Store | None  # for what is not local; None: all are

    def result(self) -> Indexed:
        """The indexes, from an earlier run if the tars are unchanged.

        Raises:
            UserError: the label is not given and ambiguous, or the folder cannot be written.
            StoreError: a tar could not be fetched.
        """
        try:
            stated = None if self.spec.label is None else LabelSpec.parse(self.spec.label, kind=self.spec.kind)
        except ValueError as error:
            raise UserError(f"{self.source}: label: {error}") from None
        try:
            if (saved := self._saved()) is not None:
                return saved
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / "lock", report=self.report, source=self.source):
                # Another process may have done it meanwhile.
                return self._saved() or self._index(stated or self._cls_if_there())
        except OSError as error:
            raise UserError(
                f"{self.source}: its indexes cannot be kept in {self._folder} ({error.strerror}): set XDG_CACHE_HOME "
                "to a folder that you may write to"
            ) from error

    def _saved(self) -> Indexed | None:
        try:
            content = parse_json((self._folder / "set.json").read_bytes())
            files = [entry["file"] for entry in content["tars"]]
            if files != [self._target(number).name for number in range(len(self.urls))]:
                return None
            labels = LabelSpec(**content["label"])
            facts = [summary_from(entry["facts"]) for entry in content["tars"]]
            return self._result(facts, labels, labels_from(content["found"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _index(self, labels: LabelSpec) -> Indexed:
        facts, found = self._index_all(labels)
        content = {
            "source": self.source,
            "label": asdict(labels),
            "found": {**asdict(found), "names": sorted(found.names)},
            "tars": [{"file": self._target(number).name, "facts": asdict(one)} for number, one in enumerate(facts)],
        }
        write_json(self._folder / "set.json", content)
        return self._result(facts, labels, found)

    def _result(self, facts: Sequence[TarSummary], labels: LabelSpec, found: FoundLabels) -> Indexed:
        tars = [Tar(self._entry(number, labels, one), one) for number, one in enumerate(facts)]
        return Indexed(tuple(tars), labels, found)

    def _entry(self, number: int, labels: LabelSpec, facts: TarSummary) -> ShardEntry:
        url = self.urls[number]
        return ShardEntry(
            url=url,
            name=redacted(url),
            num_samples=facts.num_samples,
            # The store's cache key depends on it, and a pipe's size is not known beforehand.
            num_bytes=facts.num_bytes if is_local(url) else None,
            sha256="",
            index=self._target(number),
            labels=labels,
            stamp=self._found[number][1],
            index_digest=facts.digest,
            pixels_digest=facts.pixels,
        )

    @cached_property
    def _folder(self) -> Path:
        identity = repr((_VERSION, list(self.urls), self.spec.label, self.spec.kind))
        return self.index_folder / hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    @cached_property
    def _found(self) -> list[tuple[str, str]]:
        """For each tar its fingerprint ("absent" for none) and its entry's `stamp`."""
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            return list(pool.map(self._fingerprint, self.urls))

    def _fingerprint(self, url: str) -> tuple[str, str]:
        from data_shards.store.download import MissingObject

        try:
            if is_local(url):
                status = os.stat(local_path(url))
                # mtime, which can be set at will, and ctime, which cannot.
                return f"{status.st_size} {status.st_mtime_ns}", f"{status.st_mtime_ns} {status.st_ctime_ns}"
            assert self.store is not None
            if url.startswith(PIPE):
                return "pipe", ""
            fingerprint = self.store.fingerprint(url)
            return fingerprint, fingerprint
        except (FileNotFoundError, NotADirectoryError, MissingObject):
            return "absent", ""
        except OSError as error:
            raise UserError(f"{url}: cannot be read ({error.strerror})") from None

    def _target(self, number: int) -> Path:
        content = repr((self.urls[number], self._found[number][0]))
        return self._folder / (hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".npz")

    def _index_all(self, labels: LabelSpec) -> tuple[list[TarSummary], FoundLabels]:
        count = len(self.urls)
        begun = last_line = time.monotonic()
        tars = "1 tar" if count == 1 else f"{count:,} tars"
        self.report(f"{self.source}: indexing {tars}, once; the indexes are kept in {self._folder}")
        facts = {number: _ABSENT for number, (print_, _) in enumerate(self._found) if print_ == "absent"}
        found = FoundLabels()
        todo = [number for number in range(count) if number not in facts]
        for number, (facts_here, labels_here) in self._each(todo, labels):
            facts[number] = facts_here
            found |= labels_here
            now = time.monotonic()
            if now - last_line >= _PROGRESS_SECONDS and len(facts) < count:
                last_line = now
                left_seconds = (now - begun) / len(facts) * (count - len(facts))
                self.report(f"{self.source}: {len(facts):,} of {count:,} tars, {show_duration(left_seconds)} left")
        num_samples = sum(one.num_samples for one in facts.values())
        self.report(f"{self.source}: {num_samples:,} samples, {found} in {labels.text}")
        return [facts[number] for number in range(count)], found

    def _each(self, todo: list[int], labels: LabelSpec) -> Iterator[tuple[int, tuple[TarSummary, FoundLabels]]]:
        """(tar number, what was found in it), in the order of completion."""
        pool: Executor
        if all(map(is_local, self.urls)):
            begun = time.monotonic()
            for done, number in enumerate(todo, start=1):
                yield number, self._index_one(number, labels)
                left = len(todo) - done
                processes = min(_processes(), left)
                if processes > 1 and (time.monotonic() - begun) / done * left > _WORTH_PROCESSES_SECONDS:
                    todo = todo[done:]
                    break
            else:
                return
            # Spawned: a fork copies locks of other threads, and the fork server is kept for the loader's workers.
            spawned = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, mp_context=spawned, initializer=end_with_parent)
        else:
            pool = ThreadPoolExecutor(_REMOTE_THREADS)
        try:
            with block_interrupts():
                futures = {self._submit(pool, number, labels): number for number in todo}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: Executor, number: int, labels: LabelSpec) -> Future[tuple[TarSummary, FoundLabels]]:
        url = self.urls[number]
        if is_local(url):
            target = self._target(number)
            return pool.submit(index_tar, str(local_path(url)), target=target, labels=labels, name=redacted(url))
        return pool.submit(self._index_one, number, labels)

    def _index_one(self, number: int, labels: LabelSpec) -> tuple[TarSummary, FoundLabels]:
        with self._local_copy(number, labels) as path:
            return index_tar(path, target=self._target(number), labels=labels, name=redacted(self.urls[number]))

    @contextmanager
    def _local_copy(self, number: int, labels: LabelSpec) -> Iterator[str]:
        url = self.urls[number]
        if is_local(url):
            yield str(local_path(url))
            return
        assert self.store is not None
        with open(self.store.open_file(self._entry(number, labels, _ABSENT)), "rb") as tar:
            yield f"/dev/fd/{tar.fileno()}"  # it may be evicted from the cache meanwhile

    def _cls_if_there(self) -> LabelSpec:
        labels = LabelSpec(kind=self.spec.kind)
        present = [number for number, (print_, _) in enumerate(self._found) if print_ != "absent"]
        parts: set[str] = set()
        suggestions: dict[str, None] = {}
        for number in present[:_PEEKED_TARS]:
            with self._local_copy(number, labels) as path:
                parts_here, suggestions_here = peek(path)
            if "cls" in parts_here:
                return labels
            parts |= parts_here
            suggestions |= dict.fromkeys(suggestions_here)
        if not parts:
            return labels  # No tar can be read: the damage is what to report.
        choice = f"give label: {' or '.join(suggestions)}" if suggestions else "none of these can be a label"
        found = ", ".join(sorted(parts))
        raise UserError(f"{self.source}: its samples have no .cls member to be the label, only {found}: {choice}")


def _processes() -> int:
    """Worker processes to start; a daemon, such as a worker of the loader, may have none."""
    if multiprocessing.current_process().daemon:
        return 1
    return min(num_cores(), _MOST_PROCESSES)


@contextmanager
def _locked(path: Path, *, report: Report, source: str) -> Iterator[None]:
    """Hold the lock file; the kernel releases it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{source}: another process is indexing it; waiting for that")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
