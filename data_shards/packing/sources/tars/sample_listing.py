"""List the samples of a tar, or of a folder, into a parquet file of the work folder: a part that any worker can do.

A local tar costs a small read a member. A remote one is read in order, once, without keeping it; of members above 4 MiB
only the headers. Labels in files cost a request each. A .tar.gz is decompressed into the work folder, from where its
images are read. Reads no image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import inner_name, refuse_links
from shardvit.data_shards.packing.sources.base import GZIPPED, LeftOut
from shardvit.data_shards.packing.sources.decompress import decompressed, open_bytes
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles, stamp_of
from shardvit.data_shards.reading.tar_summary import read_labels
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.tar_index import grouped
from shardvit.data_shards.shards.tar_walk import Member, Pread, TarDamage, walk_tar
from shardvit.data_shards.shards.webdataset_parts import split_name
from shardvit.data_shards.store.bucket import Listed
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.store.ranges import list_url, read_range, stat_url

_VERSION = 1
_MOST_LABEL_BYTES = 1 << 24


@dataclass(frozen=True)
class SampleTars:
    """Tars to list: the request of `list_tar`."""

    locations: tuple[str, ...]  # absolute local paths, URLs
    stems: tuple[str, ...]  # folders of their images' names; unique
    labels: tuple[LabelSpec | None, ...]  # None: the last part of `stems`
    work: str
    root: str = ""  # of folders of samples in files, in place of tars: `root` and a stem is a location


@dataclass(frozen=True)
class TarSamples:
    """The samples of one tar, and what is wrong with it."""

    files: LocatedFiles  # their images; its path is the tar's location, to be shown
    labels: NDArray[np.int32]  # [samples]: index in `values`
    values: tuple[str, ...]  # different labels, as JSON lists of numbers and names
    damage: str = ""
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(
        cls, files: LocatedFiles, labels: Iterable[str], damage: str = "", left_out: Iterable[LeftOut] = ()
    ) -> TarSamples:
        """Number the samples' labels, JSON lists."""
        known: dict[str, int] = {}
        codes = [known.setdefault(label, len(known)) for label in labels]
        return cls(files, np.array(codes, np.int32), tuple(known), damage, tuple(left_out))

    def take(self, rows: NDArray[np.int64]) -> TarSamples:
        return replace(self, files=self.files.take(rows), labels=self.labels[rows])


def list_tar(request: SampleTars, number: int) -> str:
    """List a tar, as `kept_listing` says; UserError if it is unsafe."""
    location, work = request.locations[number], open_folder(request.work)
    listed = [*list_url(location)] if request.root else None
    num_bytes, stamp = state_of(location) if listed is None else (0, str(stamp_of(listed)))

    def samples(spool: str) -> TarSamples:
        if listed is not None:
            return _of_files(listed, request, number)
        container, size = Container("tar", location, stamp), num_bytes
        if is_gzipped(location):
            container, size = _unpacked(location, work, file=spool)
        with open_bytes(container.location, size, stamp=container.stamp) as read:
            found = _of_tar(read, size, request, number)
        places = zip(found.files.names, found.files.sizes.tolist(), strict=True)
        stamps = np.array([stamp_of(*place, stamp) for place in places], np.uint64)
        return replace(found, files=replace(found.files, containers=(container,), stamps=stamps))

    identity = (_VERSION, location, num_bytes, stamp, request.stems[number], request.labels[number])
    return kept_listing(work, number, identity, samples)


def kept_listing(work: Folder, number: int, identity: object, samples: Callable[[str], TarSamples]) -> str:
    """Write `listing/NNNNN-MARK.parquet` unless it is there, and return its name.

    `samples` gets the name in `work` of a tar for images that cannot be read in place.
    """
    digest = hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()
    mark = f"{number:05d}-{digest[:16]}"
    if work.size(file := f"listing/{mark}.parquet") is None:
        write_listing(work, file, samples(f"spool/{mark}.tar"))
    return file


def write_listing(work: Folder, file: str, samples: TarSamples) -> None:
    """Write the samples of one container for `read_listing`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = samples.files
    buffers = [pa.py_buffer(np.append(np.int64(0), files.names.ends)), pa.py_buffer(files.names.blob)]
    names = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(files.names), [None, *buffers])
    columns = {"name": names, "offset": files.offsets, "size": files.sizes, "stamp": files.stamps}
    (container,) = files.containers
    facts = {name: getattr(samples, name) for name in ("values", "damage", "left_out")}
    facts |= {"path": files.path, "container": [container.kind, container.location, container.stamp]}
    written = BytesIO()
    pq.write_table(
        pa.table({**columns, "label": samples.labels}, metadata={b"tar": json.dumps(facts).encode()}), written
    )
    work.write(file, written.getvalue())


def read_listing(work: Folder, file: str) -> TarSamples:
    """Read what `list_tar` wrote."""
    import pyarrow.parquet as pq

    table = pq.read_table(BytesIO(work.read(file)))
    facts, count = json.loads((table.schema.metadata or {})[b"tar"]), table.num_rows
    _, ends, blob = table["name"].combine_chunks().buffers() if count else (None, bytes(8), b"")
    names = Texts(np.frombuffer(blob, np.uint8), np.frombuffer(ends, np.int64)[1 : count + 1])
    offsets, sizes, stamps, labels = (table[name].to_numpy() for name in ("offset", "size", "stamp", "label"))
    container = Container(*facts["container"])
    files = LocatedFiles.of(facts["path"], container, names, sizes=sizes, stamps=stamps, offsets=offsets)
    return TarSamples(
        files, labels, tuple(facts["values"]), facts["damage"], tuple(LeftOut(*each) for each in facts["left_out"])
    )


def state_of(location: str) -> tuple[int, str]:
    """Return a tar's size and stamp; UserError if it is not there."""
    try:
        num_bytes, stamp = stat_url(location)
    except FileNotFoundError:
        raise UserError(f"{redacted(location)}: there is no such tar; correct the pattern or copy it there") from None
    if num_bytes is None:
        raise UserError(f"{redacted(location)}: the server does not tell its size; copy it to a folder first")
    return num_bytes, stamp


def is_gzipped(location: str) -> bool:
    """True for a .tar.gz or .tgz, whatever follows in a URL."""
    return redacted(location).lower().endswith(GZIPPED)


def _unpacked(gzipped: str, work: Folder, *, file: str) -> tuple[Container, int]:
    """Decompress a tar into the work folder, unless it is there; return it and its size."""
    place = join(work.location, file)
    if is_local(place):
        decompressed(gzipped, local_path(place), report=lambda line: None)
    elif work.size(file) is None:
        with TemporaryDirectory() as beside:
            decompressed(gzipped, plain := Path(beside, "plain.tar"), report=lambda line: None)
            work.put(file, plain)
    num_bytes, stamp = state_of(place)
    return Container("tar", place, stamp), num_bytes


def _of_tar(read: Pread, num_bytes: int, request: SampleTars, number: int) -> TarSamples:
    shown = redacted(request.locations[number])
    members: list[Member] = []
    contents: dict[int, bytes] = {}
    links: list[str] = []
    damage = ""
    try:
        for member in walk_tar(read, end=num_bytes, links=links):
            members.append(member._replace(name=inner_name(member.name, archive=shown)))
            if _is_label(members[-1].name, request.labels[number]):
                contents[member.offset] = read(min(member.size, _MOST_LABEL_BYTES), member.offset)
    except TarDamage as error:
        damage = str(error)
    refuse_links(links, archive=shown)
    return _samples(members, contents, request, number, damage=damage)


def _of_files(listed: Sequence[Listed], request: SampleTars, number: int) -> TarSamples:
    """List samples in files, their stamps as a `FolderTree` has them."""
    members = [Member(name, row, size or 0) for row, (name, size, _) in enumerate(listed)]
    contents = {
        row: read_range(join(request.locations[number], name), 0, min(size, _MOST_LABEL_BYTES))
        for name, row, size in members
        if _is_label(name, request.labels[number])
    }
    samples, above = _samples(members, contents, request, number), request.stems[number]
    images = [(join(above, name), *about) for name, *about in (listed[row] for row in samples.files.offsets.tolist())]
    files = LocatedFiles.of(
        samples.files.path,
        Container("folder", request.root),
        [name for name, *_ in images],
        sizes=samples.files.sizes,
        stamps=[stamp_of(*image) for image in images],
    )
    return replace(samples, files=files)


def _is_label(name: str, labels: LabelSpec | None) -> bool:
    split = split_name(name)
    return labels is not None and split is not None and split[1] == labels.part


def _samples(
    members: Sequence[Member], contents: Mapping[int, bytes], request: SampleTars, number: int, *, damage: str = ""
) -> TarSamples:
    """Group members to samples; `contents` are the labels' by the members' offsets."""
    stem, labels = request.stems[number], request.labels[number]
    found = grouped(members, label=None if labels is None else labels.part, damage=damage)
    left_out, index = list(found.left_out), found.index
    values: list[list[int | str]] = [[stem.rpartition("/")[2]]] * len(index)
    if labels is not None:
        good, values = read_labels(index, lambda size, offset: contents[offset], labels=labels, left_out=left_out)
        index = index.take(good)
    rows = dict[str, int]()
    for row, (key, extension) in enumerate(zip(index.keys, index.image_extension, strict=True)):
        if rows.setdefault(f"{stem}/{key}.{extension}", row) != row:
            left_out.append((key, "is there already, earlier in the tar"))
    kept, path = [*rows.values()], redacted(request.locations[number])
    sizes, offsets = index.image_size[kept], index.image_offset[kept]
    files = LocatedFiles.of(
        path, Container("tar", ""), [*rows], sizes=sizes, stamps=np.zeros(len(kept)), offsets=offsets
    )
    unusable = (LeftOut(f"{stem}/{key}".lstrip("/"), reason) for key, reason in left_out)
    return TarSamples.of(files, [json.dumps(values[row]) for row in kept], damage, unusable)
