"""Write the statistics that `check --decode --statistics` makes of a split: beside its manifest, or elsewhere.

The rows of parts, which engines bring in any order, wait in the system's temporary folder: 100 bytes an image.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardvit.data_shards.checking.scan import PartScan
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets.statistics import STATISTICS_FILE, write_statistics
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, Manifest, Shard
from shardvit.data_shards.shards.shard_set import Report, ShardSet
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.folders import Folder, open_folder


class SplitTable:
    """Take the rows out of each part as it comes; `scratch` holds them."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def take(self, scan: PartScan) -> None:
        if scan.statistics:
            self._file(scan.part.shard, scan.part.number).write_bytes(scan.statistics)
        scan.statistics = b""

    def rows(self) -> Iterator[tuple[int, bytes]]:
        for shard, part in sorted(tuple(map(int, file.name.split("-"))) for file in self._scratch.iterdir()):
            yield shard, self._file(shard, part).read_bytes()

    def _file(self, shard: int, part: int) -> Path:
        return self._scratch / f"{shard}-{part}"


@contextmanager
def split_table(shards: ShardSet, output: str | None, *, report: Report) -> Iterator[SplitTable]:
    """Write the table at the end of the block. UserError at once if it cannot be written there."""
    folder = _folder(shards, output)
    shown = redacted(folder.location)
    try:
        folder.write(f".{STATISTICS_FILE}", b"")
        folder.remove(f".{STATISTICS_FILE}")
        with tempfile.TemporaryDirectory(prefix="shardvit-statistics-") as scratch:
            yield (table := SplitTable(Path(scratch)))
            (source, *_) = shards.shards.sources
            names = list(shards.shards.files) if source.folder else [entry.name for entry in shards.shards]
            files = tuple(Shard(name, 0, 0, "") for name in names)
            described = Manifest(Path(), shards.name, shards.split, shards.classes, files, "", labels=source.labels)
            write_statistics(folder, described, table.rows())
    except (OSError, StoreError) as error:
        raise UserError(f"{shown}: the statistics cannot be written there ({error}); give --output FOLDER") from None
    report(f"{shown}/{STATISTICS_FILE}: written")


def _folder(shards: ShardSet, output: str | None) -> Folder:
    if output is not None:
        folder = open_folder(output)
        return folder if shards.split in ("", "all") else folder.at(shards.split)
    (source, *others) = shards.shards.sources
    if not source.folder or others or source.manifest != MANIFEST_FILE:
        raise UserError(
            f"--statistics: {redacted(shards.source)} is no folder with a {MANIFEST_FILE} of all its samples; "
            "say with --output FOLDER where to write its table"
        )
    return open_folder(source.folder)
