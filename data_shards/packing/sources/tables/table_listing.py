"""List a part of a table into a parquet file of the work folder, and its images into a plain tar beside it, once.

Costs one reading of the image, label and key columns, the images' size on disk, and the memory of 64 images. An image
is stamped by its bytes. Paths are only listed: their files are read where they lie.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from shardvit.data_shards.packing.sources.label_list import clean_path
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles
from shardvit.data_shards.packing.sources.tables.columns import Columns, Rows, read_rows
from shardvit.data_shards.packing.sources.tars.sample_listing import TarSamples, state_of, write_listing
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES
from shardvit.data_shards.store.folders import open_folder
from shardvit.data_shards.text import one_line

_VERSION = 1
PATH_MARK = "\0"  # between STEM/ROW and the path that the table gives


@dataclass(frozen=True)
class TablePart:
    """Some rows of a table; `stem` is its path in the source without the ending."""

    location: str
    stamp: str
    stem: str
    rows: Rows


@dataclass(frozen=True)
class TableParts:
    """The request of `list_table`. Paths in a table are relative to `root`, the table's folder below the source."""

    parts: tuple[TablePart, ...]
    columns: Columns
    root: str  # the source's folder
    work: str


def list_table(request: TableParts, number: int) -> str:
    """Write `listing/NNNNN-MARK.parquet` unless it is there, and return its name; UserError if the table is damaged.

    Images are named STEM/ROW, with `PATH_MARK` and the table's own path or key if it has any; paths by themselves.
    """
    part, columns, work = request.parts[number], request.columns, open_folder(request.work)
    identity = repr((_VERSION, part, columns, request.root)).encode("utf-8", "surrogateescape")
    mark = f"{number:05d}-{hashlib.sha256(identity).hexdigest()[:16]}"
    file = f"listing/{mark}.parquet"
    if work.size(file) is not None:
        return file
    place = join(work.location, f"spool/{mark}.tar")
    beside = local_path(work.location) if is_local(work.location) else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    listing = _Listing(columns)
    with TemporaryDirectory(dir=beside, prefix="spool-") as folder:
        plain = Path(folder, "spool.tar")
        with plain.open("wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for row, (image, label, key) in enumerate(read_rows(part.location, part.rows, columns), part.rows.begin):
                listing.add(tar, f"{part.stem}/{row}", image, label, key)
        if listing.is_spooled:
            work.put(f"spool/{mark}.tar", plain)
    container = Container("folder", request.root)
    if listing.is_spooled:
        container = Container("tar", place, state_of(place)[1])
    elif columns.form != "bytes":
        listing.place_paths(request.root, below=part.stem.rpartition("/")[0])
    write_listing(work, file, listing.samples(container, shown=redacted(part.location)))
    return file


class _Listing:
    def __init__(self, columns: Columns) -> None:
        self.columns, self.is_spooled = columns, False
        self.names, self.places, self.codes = list[str](), list[tuple[int, int, int]](), list[int]()
        self.known: dict[str, int] = {}
        self.left_out: list[tuple[str, str]] = []

    def add(self, tar: tarfile.TarFile, name: str, image: Any, label: Any, key: Any) -> None:
        """Take a row: spool its bytes, or note its path."""
        path = image.get("path") if isinstance(image, dict) else image if isinstance(image, str) else None
        data = image.get("bytes") if isinstance(image, dict) else image if isinstance(image, bytes) else None
        if not data and not path:
            self.left_out.append((name, "has no image"))
            return
        values = label if isinstance(label, list) else [label]
        if self.columns.label and (label is None or any(each in (None, "", -1) for each in values)):
            self.left_out.append((name, "has no label"))
            return
        place = 0, 0, 0
        if data:
            info = tarfile.TarInfo(f"{len(self.names):08d}")
            info.size = len(data)
            place = tar.offset + BLOCK_BYTES, len(data), _stamp(data)
            tar.addfile(info, BytesIO(data))
            self.is_spooled = True
        given = key if isinstance(key, str | int) else path
        self.names.append(name if given is None else f"{name}{PATH_MARK}{given}")
        self.places.append(place)
        values = [] if not self.columns.label else values
        self.codes.append(self.known.setdefault(json.dumps(values), len(self.known)))

    def place_paths(self, root: str, *, below: str) -> None:
        """Name the files by their paths below `root`; leave out what leads outside."""
        kept = list[int]()
        top = f"{root.rstrip('/')}/"
        for row, name in enumerate(self.names):
            given = name.partition(PATH_MARK)[2]
            try:
                is_whole = given.startswith(("/", top))
                path = given.removeprefix(top)
                if "://" in path:
                    raise ValueError(f"the path {one_line(given)} is a URL outside SOURCE; img2dataset downloads those")
                inside = clean_path(path, root=local_path(root) if is_local(root) else None)
                self.names[row] = f"{below}/{inside}" if below and not is_whole else inside
                kept.append(row)
            except ValueError as error:
                self.left_out.append((name.partition(PATH_MARK)[0], str(error)))
        self.names, self.places, self.codes = (
            [column[row] for row in kept] for column in (self.names, self.places, self.codes)
        )

    def samples(self, container: Container, *, shown: str) -> TarSamples:
        """Return what was listed; images without bytes are left out if others have them."""
        kept = [row for row, (_, size, _) in enumerate(self.places) if size or not self.is_spooled]
        lost = [self.names[row].partition(PATH_MARK)[0] for row in sorted({*range(len(self.names))} - {*kept})]
        offsets, sizes, stamps = np.array([self.places[row] for row in kept], object).reshape(-1, 3).T
        names, codes = Texts.of(self.names[row] for row in kept), np.array([self.codes[row] for row in kept], np.int32)
        of_container = np.zeros(len(kept), np.int32)
        columns = of_container, offsets.astype(np.int64), sizes.astype(np.int64), stamps.astype(np.uint64)
        left_out = [*self.left_out, *((name, "has no image") for name in lost)]
        return TarSamples(
            LocatedFiles(shown, (container,), names, *columns), codes, tuple(self.known), left_out=tuple(left_out)
        )


def _stamp(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
