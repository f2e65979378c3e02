"""A packed set that images are appended to: what it has, and how plan, manifests and statistics go on from there.

    OUT/appended/001/pack.json    the request of what was appended first, and the digests of the manifests before it
    OUT/appended/001/...          its images.bin, duplicates.jsonl, ... as in OUT
    OUT/train/manifest-DIGEST.json    the manifest before

An appended packing counts from when the last manifest that it changes is another than before. Killed until then, it is
done again from the manifests before it, with the same names, so nothing is appended twice, nor half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import manifest_of
from shardvit.data_shards.sets.keeping import replace_manifest
from shardvit.data_shards.sets.statistics import open_table, rows_by_shard, unreadable_of
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, Manifest, json_text, manifest_name
from shardvit.data_shards.store.folders import Folder
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import parse_json

PACK_FILE = "pack.json"
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class LiveSet:
    """A packed set; `packings` are the contents of their pack.json, in order."""

    folder: Folder
    packings: tuple[dict[str, Any], ...]
    manifests: Mapping[str, Manifest]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifests["train"].classes

    def lists(self, packing: int) -> Folder:
        return lists_of(self.folder, packing)

    def find(self, content: Mapping[str, object]) -> int | None:
        """Return the packing that was of the same request and source, if any."""
        same = parse_json(json_text({key: content[key] for key in ("request", "fingerprint")}))
        found = ({key: packing.get(key) for key in same} == same for packing in self.packings)
        return next((number for number, is_same in enumerate(found) if is_same), None)

    def statistics(
        self, split: str, more: Iterator[tuple[int, bytes]], *, unreadable: int
    ) -> tuple[Iterator[tuple[int, bytes]], list[int]] | None:
        """Put the rows of more shards, and their unreadable images, behind those of a split (see `write_statistics`).

        None if the split has no table.
        """
        none_before = [0] * len(self.packings)
        if (before := self.manifests.get(split)) is None:
            return more, [*none_before, unreadable]
        if (table := open_table(self.folder.at(split))) is None:
            return None
        known = [*unreadable_of(table), *none_before][: len(self.packings)]  # without those of a killed attempt
        behind = ((len(before.shards) + number, rows) for number, rows in more)
        return chain(rows_by_shard(table, before), behind), [*known, unreadable]

    def finish(self, content: Mapping[str, object], both: Mapping[str, Manifest]) -> None:
        """Replace the manifests, that of train last, after the packing's pack.json."""
        before = {split: manifest.digest for split, manifest in self.manifests.items()}
        changed = [split for split in reversed([*both]) if both[split].digest != before.get(split)]
        text = json_text({**content, "before": before, "last": changed[-1]})
        self.lists(len(self.packings)).write(PACK_FILE, text.encode())
        for split in changed:
            replace_manifest(self.folder.at(split), both[split])


def lists_of(out: Folder, packing: int) -> Folder:
    """Return the folder of a packing's lists; 0 is the one that made the set."""
    return out.at(f"appended/{packing:03d}") if packing else out


def open_live(folder: Folder) -> LiveSet:
    """Open a set to append to it; UserError if it is none, or was packed by other means."""
    shown = redacted(folder.location)
    packings = list(_packings(folder))
    if not packings:
        raise UserError(f"{shown}: there is no {PACK_FILE} of a set to append to; leave out --append to make one")
    if "train" not in (manifests := manifests_in(folder)):
        raise UserError(f"{shown}: there is no train/{MANIFEST_FILE} to append to; leave out --append to make a set")
    entry = packings[-1]
    if len(packings) > 1 and manifests[entry["last"]].digest == (before := entry["before"]).get(entry["last"]):
        packings.pop()  # killed
        for split in [split for split in manifests if split not in before]:
            folder.remove(f"{split}/{MANIFEST_FILE}")
        manifests = {split: _as_before(folder, split, manifests[split], digest) for split, digest in before.items()}
    return LiveSet(folder, tuple(packings), manifests)


def manifests_in(folder: Folder) -> dict[str, Manifest]:
    """Read the manifests of a packed set's splits."""
    splits = [split for split in _SPLITS if folder.size(f"{split}/{MANIFEST_FILE}") is not None]
    return {split: manifest_of(join(folder.location, split), store=Store()) for split in splits}


def _packings(folder: Folder) -> Iterator[dict[str, Any]]:
    for number in count():
        lists = lists_of(folder, number)
        try:
            yield dict(parse_json(lists.read(PACK_FILE)))
        except FileNotFoundError:
            return
        except (ValueError, TypeError):
            file = redacted(join(lists.location, PACK_FILE))
            raise UserError(f"{file}: it is broken; pack into another folder") from None


def _as_before(folder: Folder, split: str, now: Manifest, digest: str) -> Manifest:
    if now.digest == digest:
        return now
    return replace(manifest_of(join(folder.at(split).location, manifest_name(digest)), store=Store()), root=now.root)


def _channels(manifest: Manifest) -> str:
    return f"{manifest.channels} channels of {manifest.dtype}" if manifest.channels else "colours of 8 bits"


def join_manifests(before: Mapping[str, Manifest], added: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Put a set's shards and those appended together; all splits get all classes."""
    classes = next(iter(added.values())).classes
    both: dict[str, Manifest] = {}
    for split in _SPLITS:
        old, new = before.get(split), added.get(split)
        if old is None or new is None:
            if one := old or new:
                both[split] = replace(one, classes=classes)
            continue
        if (old.channels, old.dtype) != (new.channels, new.dtype):
            raise UserError(
                f"{old.name} has {_channels(old)}, and what is appended {_channels(new)}: give the same "
                "--channels, and images of that type"
            )
        without = tuple(digest for digest in old.without_matches_of if digest in new.without_matches_of)
        both[split] = replace(old, classes=classes, shards=(*old.shards, *new.shards), without_matches_of=without)
    return both
