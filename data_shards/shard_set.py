"""Any place of shards -> `ShardSet`: a packed folder, local or remote, or tars that other tools made.

Opening is cheap: a packed set costs its manifest and, locally, one `stat` for each shard (in parallel for many);
no shard is read. Tars without a manifest are indexed once (see `foreign`), and then open as fast. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data_shards.errors import UserError
from data_shards.labels import LabelKind, LabelSpec
from data_shards.manifest import MANIFEST_FILE, Manifest, load_manifest, parse_manifest, shard_files
from data_shards.store.location import PIPE, expand_braces, is_local, join, local_path, shown
from data_shards.tars.tar_index import index_path, read_index, readable_index

if TYPE_CHECKING:
    from data_shards.store.store import Store

Damaged = Literal["refuse", "report"]
Report = Callable[[str], None]

_MOST_MANIFEST_BYTES = 1 << 30  # 150 bytes a shard, and the classes


@dataclass(frozen=True)
class ShardEntry:
    """One tar of a set.

    Args:
        url: an absolute local path, a URL that fsspec opens, or "pipe:COMMAND".
        name: what messages call it; never has credentials in it.
        num_samples: samples in it.
        num_bytes: the tar's size; None where it is unknown.
        sha256: the digest of all its bytes; "" where it is unknown.
        index: a local index file; None: beside the tar, or built from it.
        labels: which member of a sample is its label.
        state: "damaged" if it was not what the manifest says when the set was opened, and that was tolerated.
        stamp: changes when the file is written: its times or the store's ETag when the set was opened; "": unknown.
        index_digest: of the keys, image sizes and labels of a tar without a manifest.
        pixels_digest: of the first bytes of a few of its images; "" where its index is older than this.
    """

    url: str
    name: str
    num_samples: int
    num_bytes: int | None
    sha256: str
    index: Path | None
    labels: LabelSpec
    state: Literal["whole", "damaged"] = "whole"
    stamp: str = ""
    index_digest: str = ""
    pixels_digest: str = ""


@dataclass(frozen=True)
class ShardSet:
    """The samples of one split; class number `i` means `classes[i]`.

    Args:
        name: what the data set is called.
        source: where it was opened, fit to be shown.
        split: "train", "val", ...
        classes: names of the classes.
        shards: the tars, in the order that sample numbers follow.
        digest: at most 32 hex digits that change with the content, not with the place.
        damage: what is wrong with it and was tolerated, a sentence each.
        lost_samples: how many are known to be gone (reading finds the others). Packed shards still count them in
            `num_samples`; tars without a manifest do not, and a damaged one is taken to have been as large as the rest.
    """

    name: str
    source: str
    split: str
    classes: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    digest: str
    damage: tuple[str, ...] = ()
    lost_samples: int = 0

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all tars together; None if the size of one is unknown."""
        sizes = [shard.num_bytes for shard in self.shards]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def label_map(self) -> dict[str, int]:
        """Name of a class -> its number."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample may have any number of classes, rather than exactly one."""
        return any(shard.labels.kind == "multi" for shard in self.shards)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Samples of each shard."""
        return tuple(shard.num_samples for shard in self.shards)


@dataclass(frozen=True)
class ShardsSpec:
    """What the user says about a set of shards.

    Args:
        location: a folder with a manifest.json (local, or a URL), a folder of tars, or a pattern of tars
            ("s3://bucket/x-{000..127}.tar", "a.tar::b.tar", "pipe:...").
        label: for tars without a manifest: "cls", "txt" or "json:KEY"; None: `cls`, if it is there.
        kind: for tars without a manifest: one class for each sample, or a list.
        classes: for tars without a manifest: a file with a name a line, a JSON list, or {name: number}; None: they
            are found in the labels.
    """

    location: str
    label: str | None = None
    kind: LabelKind = "single"
    classes: Path | None = None


def open_shards(
    spec: ShardsSpec | str,
    *,
    damaged: Damaged = "refuse",
    index_folder: Path | None = None,
    report: Report = print,
    store: Store | None = None,
) -> ShardSet:
    """Open a set of shards; see `ShardsSpec` for what there is.

    Args:
        spec: where it is; a text is a location that says it all.
        damaged: "refuse" what is damaged, or "report" it in the set's `damage` and go on with the rest.
        index_folder: where the indexes of tars without a manifest are kept; None: in the user's cache folder.
        report: takes a line now and then while tars are indexed.
        store: for what is not local.

    Raises:
        UserError: nothing there, a broken manifest, damage that is refused, labels that are not clear.
        StoreError: a place that cannot be reached.
    """
    if isinstance(spec, str):
        spec = ShardsSpec(spec)
    location = spec.location
    if store is None and not is_local(location):
        from data_shards.store.store import Store

        store = Store()
    if _is_packed(location):
        for name in ("label", "classes"):
            if getattr(spec, name) is not None:
                raise UserError(f"{shown(location)} has a {MANIFEST_FILE}, which says it: leave out {name}")
        if spec.kind != "single":
            raise UserError(f"{shown(location)} has a {MANIFEST_FILE}, which says it: leave out kind")
        return _open_local(location, damaged=damaged) if is_local(location) else _open_remote(location, store=store)
    from data_shards.foreign.opening import open_foreign

    return open_foreign(
        spec, urls=_urls(location), damaged=damaged, index_folder=index_folder, report=report, store=store
    )


def merge_shard_sets(sets: Sequence[ShardSet]) -> ShardSet:
    """Several sets laid end to end; one alone is returned as it is.

    Raises:
        UserError: sets with other classes, or of which one has a list of labels for each sample.
    """
    first = sets[0]
    if len(sets) == 1:
        return first
    for other in sets[1:]:
        if other.classes != first.classes:
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed, their classes differ "
                f"({_difference(first, other)}): pack both from the same list of classes"
            )
        if other.is_multi_label != first.is_multi_label:
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed: in one of them a sample has a list of labels"
            )
    return replace(
        first,
        name=" + ".join(dict.fromkeys(one.name for one in sets)),
        source=" + ".join(one.source for one in sets),
        shards=tuple(shard for one in sets for shard in one.shards),
        digest=hashlib.sha256(json.dumps([one.digest for one in sets]).encode()).hexdigest()[:32],
        damage=tuple(damage for one in sets for damage in one.damage),
        lost_samples=sum(one.lost_samples for one in sets),
    )


def _difference(first: ShardSet, other: ShardSet) -> str:
    for number, (one, two) in enumerate(zip(first.classes, other.classes, strict=False)):
        if one != two:
            return f"number {number} is {one!r} and {two!r}"
    return f"there are {first.num_classes} and {other.num_classes}"


def _is_packed(location: str) -> bool:
    """Whether a manifest belongs there. A local folder of tars may do without, and a pattern or a tar has none."""
    if location.startswith(PIPE):
        return False
    if is_local(location):
        path = local_path(location)
        if path.is_dir():
            return (path / MANIFEST_FILE).is_file() or not any(path.glob("*.tar"))
    return not location.partition("?")[0].endswith(".tar") and expand_braces(location) == [location]


def _urls(location: str) -> list[str]:
    """The tars that a location without a manifest means."""
    if is_local(location) and local_path(location).is_dir():
        return [str(path.absolute()) for path in sorted(local_path(location).glob("*.tar"))]
    return [str(local_path(url).absolute()) if is_local(url) else url for url in expand_braces(location)]


def _open_local(location: str, *, damaged: Damaged) -> ShardSet:
    manifest = load_manifest(local_path(location))  # not made absolute: messages show paths as the user typed them
    files = shard_files(manifest)
    found = [file.damage for file in files if file.damage]
    if found and damaged == "refuse":
        more = f" (and {len(found) - 1} more shards are damaged)" if len(found) > 1 else ""
        raise UserError(found[0] + more)
    root, absolute = str(manifest.root), str(manifest.root.absolute())
    entries = tuple(
        ShardEntry(
            url=os.path.join(absolute, shard.file),
            name=os.path.join(root, shard.file),
            num_samples=shard.num_samples,
            num_bytes=shard.num_bytes,
            sha256=shard.sha256,
            index=None,
            labels=manifest.labels,
            state="damaged" if file.damage else "whole",
            stamp=file.stamp,
        )
        for shard, file in zip(manifest.shards, files, strict=True)
    )
    lost = sum(_lost_samples(entry) for entry in entries if entry.state == "damaged")
    return _packed(manifest, entries, source=str(local_path(location)), damage=tuple(found), lost_samples=lost)


def _lost_samples(entry: ShardEntry) -> int:
    """Samples of a damaged local shard that are not there, by the index beside it, else by the tar's headers."""
    try:
        num_bytes = os.stat(entry.url).st_size
    except OSError:
        return entry.num_samples
    try:
        index = read_index(index_path(entry.url), label=entry.labels.part)
    except (OSError, UserError):
        return max(0, entry.num_samples - len(readable_index(entry.url, label=entry.labels.part).index))
    ends = (index.image_offset + index.image_size, index.label_offset + index.label_size)
    return int(((ends[0] > num_bytes) | (ends[1] > num_bytes)).sum())


def _open_remote(location: str, *, store: Store | None) -> ShardSet:
    from data_shards.store.download import MissingObject

    assert store is not None
    url = join(location, MANIFEST_FILE)
    try:
        content = store.read_small(url, most_bytes=_MOST_MANIFEST_BYTES)
    except MissingObject as error:
        pattern = shown(join(location, "x-")) + "{000..127}.tar"
        raise UserError(f"{error}; tars without a manifest are given as a pattern, such as {pattern}") from None
    manifest = parse_manifest(content, root=Path(), name=shown(url))
    entries = tuple(
        ShardEntry(
            url=join(location, shard.file),
            name=shown(join(location, shard.file)),
            num_samples=shard.num_samples,
            num_bytes=shard.num_bytes,
            sha256=shard.sha256,
            index=None,
            labels=manifest.labels,
        )
        for shard in manifest.shards
    )
    return _packed(manifest, entries, source=shown(location))


def _packed(
    manifest: Manifest,
    entries: tuple[ShardEntry, ...],
    *,
    source: str,
    damage: tuple[str, ...] = (),
    lost_samples: int = 0,
) -> ShardSet:
    return ShardSet(
        name=manifest.name,
        source=source,
        split=manifest.split,
        classes=manifest.classes,
        shards=entries,
        digest=manifest.digest,
        damage=damage,
        lost_samples=lost_samples,
    )
