"""Open a set of shards as a plain `webdataset.WebDataset`, for custom training loops.

It streams whole tars in webdataset's order, with its shuffling, and passes over samples that are not in the set (see
`rows` of a manifest, and parts). No index is read or made, so other tools' tars open immediately. README.md's promises
about order and resuming hold only for our own loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import is_packed, open_shards, tar_urls
from shardvit.data_shards.shards.holdout import rows_of
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet
from shardvit.data_shards.shards.webdataset_parts import library

if TYPE_CHECKING:
    from webdataset.compat import WebDataset

    from shardvit.data_shards.store.store import Store


def as_webdataset(
    shards: ShardSet | Path | str,
    *,
    shard_numbers: Iterable[int] | None = None,
    store: Store | None = None,
    shardshuffle: int | bool = False,
    **options: Any,
) -> WebDataset:
    """Open shards as a `webdataset.WebDataset`: each sample once an epoch, its members undecoded.

    Args:
        shards: the result of `open_shards`, or a location: a folder, a pattern of tars, a URL.
        shard_numbers: which of the shards, such as `range(10)`; None: all.
        store: downloads, verifies and caches remote shards; None: webdataset streams them from their URLs.
        shardshuffle: number of shards shuffled together; False: in order.
        options: more arguments of `WebDataset`. Several processes need a `nodesplitter`, such as
            `webdataset.split_by_node`; DataLoader workers share the shards, so use at most as many workers.

    UserError as in `open_shards`, and for an unknown shard, or both a store and a cache_dir.
    """
    if store is not None and options.get("cache_dir"):  # webdataset would bypass the store
        raise UserError("as_webdataset: give store or cache_dir, not both: the store has a cache of its own")
    entries = _entries(shards, store=store)
    if shard_numbers is not None:
        try:
            entries = [entries[number] for number in shard_numbers]
        except IndexError:
            raise UserError(f"shard_numbers: there are {len(entries)} shards, 0 to {len(entries) - 1}") from None
    if not entries:
        raise UserError(
            f"{shards if isinstance(shards, Path) else redacted(str(shards))}: there is no tar to be opened"
        )
    webdataset = library()
    dataset = webdataset.WebDataset([entry.url for entry in entries], shardshuffle=shardshuffle, **options)
    by_url = {entry.url: entry for entry in entries}
    for number, stage in enumerate(dataset.pipeline):
        if isinstance(stage, webdataset.cache.StreamingOpen):
            dataset.pipeline[number] = _Opener(by_url, store=store, otherwise=stage)
    if any(entry.subset for entry in entries):
        dataset.append(_Chosen(by_url))
    return dataset


def _entries(shards: ShardSet | Path | str, *, store: Store | None) -> list[ShardEntry]:
    if isinstance(shards, ShardSet):
        return list(shards.shards)
    location = str(shards)
    if is_packed(location):
        return list(open_shards(location, store=store).shards)
    return [
        ShardEntry(url, redacted(url), num_samples=0, num_bytes=None, sha256="", index=None, labels=LabelSpec())
        for url in tar_urls(location)
    ]


class _Chosen:
    """Passes on the samples that a set has of its tars, by their places in these."""

    def __init__(self, entries: Mapping[str, ShardEntry]) -> None:
        self._entries = entries

    def __call__(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        entry, row, rows = None, 0, frozenset[int]()
        for sample in samples:
            row += 1
            if entry is None or sample["__url__"] != entry.url or row == entry.stored_samples:  # a tar may come twice
                entry, row = self._entries[sample["__url__"]], 0
                rows = frozenset(rows_of(entry.subset).tolist() if entry.subset else range(entry.num_samples))
            if row in rows:
                yield sample


class _Opener:
    """Replaces webdataset's `StreamingOpen`, which cuts paths at "?" and "#" and leaves files open."""

    def __init__(self, entries: Mapping[str, ShardEntry], *, store: Store | None, otherwise: Any) -> None:
        self._entries, self._store, self._otherwise = entries, store, otherwise

    def __call__(self, sources: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for source in sources:
            url: str = source["url"]
            if self._store is None and not is_local(url):
                yield from self._otherwise([source])
                continue
            try:
                stream = self._open(url)
            except Exception as error:  # noqa: BLE001 - webdataset's handler decides
                if self._otherwise.handler(error):
                    continue
                break
            with stream:
                yield {"url": url, "stream": stream}

    def _open(self, url: str) -> BinaryIO:
        if self._store is None:
            return open(local_path(url), "rb")
        return open(self._store.open_file(self._entries[url]), "rb")
