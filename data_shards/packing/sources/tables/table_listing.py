"""List a part of a table into a parquet file of the work folder, and its images into a plain tar beside it, once.

Costs one reading of the image, label and key columns, the images' size on disk, and the memory of 64 images. An image
is stamped by its bytes. Paths are only listed: their files are read where they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from shardvit.data_shards.packing.sources.base import LeftOut
from shardvit.data_shards.packing.sources.label_list import clean_path
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles
from shardvit.data_shards.packing.sources.tables.columns import Columns, Rows, read_rows
from shardvit.data_shards.packing.sources.tars.sample_listing import TarSamples, kept_listing, state_of
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.text import one_line

_VERSION = 1
PATH_MARK = "\0"  # between STEM/ROW and the path that the table gives


@dataclass(frozen=True)
class TablePart:
    """Some rows of a table; `name` is its path in the source."""

    location: str
    stamp: str
    name: str
    rows: Rows

    def unusable(self, row: int, reason: str) -> LeftOut:
        return LeftOut(self.name, reason, row=row)


@dataclass(frozen=True)
class TableParts:
    """The request of `list_table`. Paths in a table are relative to `root`, the table's folder below the source."""

    parts: tuple[TablePart, ...]
    columns: Columns
    root: str  # the source's folder
    work: str


def list_table(request: TableParts, number: int) -> str:
    """List some rows, as `kept_listing` says; UserError if the table is damaged.

    Images are named STEM/ROW, with `PATH_MARK` and the table's own path or key if it has any; paths by themselves.
    """
    part, work = request.parts[number], open_folder(request.work)
    identity = (_VERSION, part, request.columns, request.root)
    return kept_listing(work, number, identity, lambda spool: _listed(part, request, work, spool))


def _listed(part: TablePart, request: TableParts, work: Folder, spool: str) -> TarSamples:
    beside = local_path(work.location) if is_local(work.location) else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    left_out: list[LeftOut] = []
    with TemporaryDirectory(dir=beside, prefix="spool-") as folder:
        plain = Path(folder, "spool.tar")
        with plain.open("wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            found = [*_taken(part, request.columns, tar, left_out)]
        if is_spooled := any(each.size for each in found):
            work.put(spool, plain)
    if is_spooled:
        left_out += [part.unusable(each.row, "has no image") for each in found if not each.size]
        found = [each for each in found if each.size]
        container = Container("tar", place := join(work.location, spool), state_of(place)[1])
    else:
        found = [*_placed(found, request.root, part, left_out)]
        container = Container("folder", request.root)
    stem = os.path.splitext(part.name)[0]
    files = LocatedFiles.of(
        redacted(part.location),
        container,
        [f"{stem}/{each.row}{PATH_MARK}{each.given}" if is_spooled else each.given for each in found],
        sizes=[each.size for each in found],
        stamps=[each.stamp for each in found],
        offsets=[each.offset for each in found],
    )
    return TarSamples.of(files, (each.label for each in found), left_out=left_out)


class _Taken(NamedTuple):
    row: int
    given: str  # path or key in the table, or ""
    label: str  # JSON list of numbers and names
    offset: int = 0
    size: int = 0  # 0: a path alone
    stamp: int = 0


def _taken(part: TablePart, columns: Columns, tar: tarfile.TarFile, left_out: list[LeftOut]) -> Iterator[_Taken]:
    """Yield the rows, their bytes put into a tar."""
    for row, (image, label, key) in enumerate(read_rows(part.location, part.rows, columns), part.rows.begin):
        inside = image if isinstance(image, dict) else {}
        data = image if isinstance(image, bytes) else inside.get("bytes")
        path = image if isinstance(image, str) else inside.get("path")
        values = label if isinstance(label, list) else [label if columns.label else 0]
        if not data and not path:
            left_out.append(part.unusable(row, "has no image"))
        elif any(each in (None, "", -1) for each in values):
            left_out.append(part.unusable(row, "has no label"))
        else:
            taken = _Taken(row, str(path or "" if key is None else key), json.dumps(values))
            if data:
                info = tarfile.TarInfo(f"{row:08d}")
                info.size = len(data)
                stamp = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
                taken = taken._replace(offset=tar.offset + BLOCK_BYTES, size=len(data), stamp=stamp)
                tar.addfile(info, BytesIO(data))
            yield taken


def _placed(found: list[_Taken], root: str, part: TablePart, left_out: list[LeftOut]) -> Iterator[_Taken]:
    """Yield what lies below the source, by its path there."""
    top, below = f"{root.rstrip('/')}/", part.name.rpartition("/")[0]
    for each in found:
        path = each.given.removeprefix(top)
        try:
            if "://" in path:
                raise ValueError(f"{one_line(path)} is a URL outside of SOURCE: img2dataset downloads such")
            inside = clean_path(path, root=local_path(root) if is_local(root) else None)
            is_relative = path == each.given and not path.startswith("/")
            yield each._replace(given=f"{below}/{inside}" if below and is_relative else inside)
        except ValueError as error:
            left_out.append(part.unusable(each.row, f"cannot be used: {error}"))
