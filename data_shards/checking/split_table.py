"""Write the statistics that `check --decode --statistics` makes of a split: beside its manifest, or elsewhere.

The rows of parts, which engines bring in any order, wait in the system's temporary folder: 100 bytes an image.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardvit.data_shards.checking.scan import PartScan
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets.statistics import STATISTICS_FILE, write_statistics
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, Manifest, Shard
from shardvit.data_shards.shards.shard_set import Report, ShardSet
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.store.ranges import RangedFile


@contextmanager
def split_table(shards: ShardSet, output: str | None, *, report: Report) -> Iterator[Callable[[PartScan], None]]:
    """Yield what takes the rows of each part, and write the table at the end of the block.

    UserError at once if it cannot be written there, or packing's table, which knows more, would be lost.
    """
    folder = _folder(shards, output)
    if _has_paths(table := join(folder.location, STATISTICS_FILE)):
        raise UserError(
            f"{redacted(table)}: packing wrote it, with the images' paths in their source, which check does not know; "
            "remove it first, or give --output FOLDER for another"
        )
    with _explained(folder):
        folder.write(f".{STATISTICS_FILE}", b"")
        folder.remove(f".{STATISTICS_FILE}")
    with tempfile.TemporaryDirectory(prefix="shardvit-statistics-") as scratch:

        def take(scan: PartScan) -> None:
            if scan.statistics:  # else the shard is lost
                Path(scratch, f"{scan.part.shard:09}-{scan.part.number:09}").write_bytes(scan.statistics)
            scan.statistics = b""

        yield take
        source = shards.shards.sources[0]
        names = list(shards.shards.files) if source.folder else [entry.name for entry in shards.shards]
        files = tuple(Shard(name, 0, 0, "") for name in names)
        described = Manifest(
            Path(), shards.name, shards.split, shards.classes, files, "", labels=source.labels, channels=shards.channels
        )
        parts = sorted(Path(scratch).iterdir())
        with _explained(folder):
            rows = ((int(part.name.partition("-")[0]), part.read_bytes()) for part in parts)
            write_statistics(folder, described, rows)
    report(f"{redacted(folder.location)}/{STATISTICS_FILE}: written")


def _has_paths(table: str) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(RangedFile(table)) as file:
            paths = file.read_row_group(0, columns=["path"]).column(0)
            return paths.null_count < len(paths)
    except (OSError, StoreError, KeyError, IndexError, ValueError, pa.ArrowException):
        return False  # there is none, or none that can be read


@contextmanager
def _explained(folder: Folder) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreError) as error:
        where = redacted(folder.location)
        raise UserError(f"{where}: the statistics cannot be written there ({error}); give --output FOLDER") from None


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
