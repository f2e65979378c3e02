"""Statistics of a set's images, a row a sample in shard order: `SET/SPLIT/statistics.parquet`.

Mean and deviation are of a regular grid of at most 64 x 64 pixels (all pixels of a small image): 40 µs a photograph
that is decoded anyway. Each shard's rows are a small parquet file of its own until `write_statistics` joins them, which
takes 32 bytes of memory a sample to find duplicates, and once the table's size of scratch space.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.sets.arrow_columns import arrow_array, numbers_of
from shardvit.data_shards.shards.location import join
from shardvit.data_shards.store.ranges import RangedFile
from shardvit.data_shards.text import brief, parse_json
from shardvit.data_shards.vocabulary import MOST_CHANNELS

if TYPE_CHECKING:
    import pyarrow as pa

    from shardvit.data_shards.images.crops import Pixels
    from shardvit.data_shards.shards.manifest import Manifest
    from shardvit.data_shards.store.folders import Folder

STATISTICS_FILE = "statistics.parquet"
CHANNELS = "rgb"
ROWS = 100_000  # of a row group
DIGEST_BYTES = 16
_GRID = 64  # most pixels a side
_FACTS = b"shardvit"  # the key of what the file says of the set, as JSON


class ImageStatistics(NamedTuple):
    """An image as it is in the shard; width and height are 0, and moments missing, if it cannot be decoded."""

    width: int
    height: int
    bytes: int
    means: Sequence[float]  # of each channel, 0 to 255, or with channels as they are read (`images.channels`)
    stds: Sequence[float]
    digest: str  # hex


class SampleStatistics(NamedTuple):
    """A sample's row; `path` is its place in the source (None: unknown), labels are numbers of classes."""

    row: int  # in the tar
    key: str
    path: str | None
    labels: Sequence[int]
    image: ImageStatistics


def image_statistics(pixels: Pixels | None, data: bytes, *, digest: bytes = b"") -> ImageStatistics:
    """Measure an image, [height, width, channels], or None; `digest` of `data` saves hashing (see `data_digest`)."""
    digest = digest or data_digest(data)
    if pixels is None:
        return ImageStatistics(0, 0, len(data), (), (), digest.hex())
    height, width = pixels.shape[:2]
    steps = -(-height // _GRID), -(-width // _GRID)
    (down, right), (first, left) = steps, ((height - 1) % steps[0] // 2, (width - 1) % steps[1] // 2)
    grid = pixels[first::down, left::right].reshape(-1, pixels.shape[2]).astype(np.float64)
    # Sums of integers below 2^53 are exact, so the rows of colours are the same on every machine. BLAS is 3 times as
    # fast as sum.
    mean = np.ones(len(grid)) @ grid / len(grid)
    std = np.sqrt(np.maximum(np.diagonal(grid.T @ grid) / len(grid) - mean * mean, 0.0))
    return ImageStatistics(width, height, len(data), mean.tolist(), std.tolist(), digest.hex())


def data_digest(data: bytes) -> bytes:
    """Hash an image's bytes, as packing does."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def moment_names(channels: int) -> list[str]:
    """Name the columns of moments: mean_r, ..., std_b, or mean_1, ..., std_N of so many channels."""
    return [f"{name}_{each}" for name in ("mean", "std") for each in (range(1, channels + 1) if channels else CHANNELS)]


def schema(channels: int = 0) -> pa.Schema:
    """Columns of the table."""
    import pyarrow as pa

    moments = [(name, pa.float32()) for name in moment_names(channels)]
    return pa.schema(
        [
            ("shard", pa.int32()),  # number in the manifest
            ("row", pa.int32()),  # in the tar
            ("key", pa.string()),
            ("path", pa.string()),
            ("labels", pa.list_(pa.int64())),
            ("width", pa.int32()),
            ("height", pa.int32()),
            ("bytes", pa.int64()),
            *moments,
            ("digest", pa.string()),
            ("duplicate", pa.bool_()),  # an earlier sample of the split has its bytes
        ]
    )


def to_parquet(samples: Sequence[SampleStatistics], *, channels: int = 0) -> bytes:
    """Pack the rows of a shard, or of a part of it, for `write_statistics`."""
    import pyarrow as pa

    fields = [*schema(channels)][1:-1]  # without shard and duplicate
    unknown = [None] * len(moment_names(channels))
    rows: list[tuple[object, ...]] = []
    for row, key, path, labels, image in samples:
        moments = [*image.means, *image.stds] or unknown
        rows.append((row, _text(key), path and _text(path), labels, *image[:3], *moments, image.digest))
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    arrays = [arrow_array(column, field.type) for field, column in zip(fields, columns, strict=True)]
    return _packed(pa.Table.from_arrays(arrays, schema=pa.schema(fields)))


def _packed(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    pq.write_table(table, sink := BytesIO(), compression="zstd")
    return sink.getvalue()


def _text(text: str) -> str:
    """Replace what is no Unicode in names of files, for Arrow has only UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write_statistics(
    folder: Folder,
    manifest: Manifest,
    parts: Iterable[tuple[int, bytes]],
    *,
    unreadable: Sequence[int] = (),
    scratch: Path | None = None,
) -> None:
    """Write `folder`'s table: `parts` are shards' numbers in the manifest and their rows (`to_parquet`), in order.

    `unreadable` counts the images that each packing left out of the shards. `scratch` is a local folder (default: the
    system's).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = {
        "name": manifest.name,
        "split": manifest.split,
        "labels": manifest.labels.kind,
        "classes": manifest.classes,
        "shards": [shard.file for shard in manifest.shards],
        "unreadable": unreadable,
    } | ({"channels": manifest.channels} if manifest.channels else {})
    whole = (columns := schema(manifest.channels)).with_metadata({_FACTS: json.dumps(facts)})
    digests = bytearray()
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".statistics-") as scratch_name:
        before, result = (Path(scratch_name) / name for name in ("rows", STATISTICS_FILE))
        with pq.ParquetWriter(before, plain := columns.remove(len(columns) - 1), compression="zstd") as writer:
            for table in _regrouped(parts, plain):
                digests += bytes.fromhex("".join(table.column("digest").to_pylist()))
                writer.write_table(table)
        is_copy = repeated(np.frombuffer(digests, np.uint64).reshape(-1, DIGEST_BYTES // 8))
        rows, done = pq.ParquetFile(before), 0
        with pq.ParquetWriter(result, whole, compression="zstd") as writer:
            for number in range(rows.num_row_groups):
                table = rows.read_row_group(number)
                is_copied = is_copy[done : done + len(table)] & (numbers_of(table.column("width")) > 0)
                copies = arrow_array(is_copied, pa.bool_())
                writer.write_table(table.append_column(whole.field("duplicate"), copies).cast(whole))
                done += len(table)
        folder.put(STATISTICS_FILE, result)


def _regrouped(parts: Iterable[tuple[int, bytes]], plain: pa.Schema) -> Iterator[pa.Table]:
    """Cut into tables of `ROWS` rows, so that the file does not depend on how the work was cut."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    waiting: list[pa.Table] = []
    for number, content in parts:
        table = pq.ParquetFile(pa.BufferReader(content)).read()
        shard = arrow_array(np.full(len(table), number, np.int32), pa.int32())
        waiting.append(table.add_column(0, plain.field("shard"), shard))
        while sum(map(len, waiting)) >= ROWS:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, ROWS).combine_chunks()
            waiting = [whole.slice(ROWS)]
    if sum(map(len, waiting)):
        yield pa.concat_tables(waiting).combine_chunks()


def open_table(folder: Folder) -> RangedFile | None:
    """Open a split's table, which is read by ranges; None if there is none."""
    try:
        return RangedFile(join(folder.location, STATISTICS_FILE))
    except FileNotFoundError:
        return None


def unreadable_of(table: RangedFile) -> list[int]:
    """Return `unreadable` of `write_statistics`."""
    import pyarrow.parquet as pq

    return read_facts(pq.read_schema(table).metadata)["unreadable"]


def rows_by_shard(table: RangedFile | Path, manifest: Manifest) -> Iterator[tuple[int, bytes]]:
    """Cut a table into the rows of the manifest's shards, as `write_statistics` takes them; others are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number_of = {shard.file: number for number, shard in enumerate(manifest.shards)}
    with pq.ParquetFile(table) as file:
        numbers = [number_of.get(name) for name in read_facts(file.schema_arrow.metadata)["shards"]]
        for batch in file.iter_batches(ROWS):
            shards = numbers_of(batch.column("shard"))
            starts = np.flatnonzero(np.diff(shards, prepend=-1))
            for start, stop in zip(starts, [*starts[1:], len(shards)], strict=True):
                if (number := numbers[shards[start]]) is not None:
                    rows = pa.Table.from_batches([batch.slice(start, stop - start)]).replace_schema_metadata()
                    yield number, _packed(rows.drop_columns(["shard", "duplicate"]))


def repeated(digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mark the rows that an earlier row equals: [rows, words]. Takes 16 bytes a row and a sort by each word."""
    order = np.lexsort(digests.T)  # stable: the earliest of equal rows comes first
    marks = np.zeros(len(order), np.bool_)
    is_same = np.ones(max(len(order) - 1, 0), np.bool_)
    for words in digests.T:
        is_same &= words[order[1:]] == words[order[:-1]]
    marks[order[1:][is_same]] = True
    return marks


def read_facts(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return what a table says of its set, from the metadata of its schema; KeyError or ValueError if it is another."""
    facts = parse_json((metadata or {})[_FACTS])
    if "channels" in facts and not 0 <= facts["channels"] <= MOST_CHANNELS:  # so many columns get names
        raise ValueError(f"'channels' is {brief(facts['channels'])}, not 1 to {MOST_CHANNELS}")
    return facts
