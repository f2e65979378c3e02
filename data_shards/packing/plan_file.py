"""The plan on disk or in a store: what a worker needs to make a shard, and what remains to be done at the end.

    plan.json            `PackJob`
    left_out.jsonl       what is not planned, as lines of unreadable.jsonl
    plan/00000.parquet   the images of some shards, a row group each; whole/...: with the duplicates that are dropped

A worker reads one part of a megabyte or so; 10^8 images take about 5 GB, written part by part.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from shardvit.data_shards.durable import lines_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.packing.image import PACKED_LIMIT, Resize
from shardvit.data_shards.packing.shard_plan import Line, ShardPlan, Start, shard_file
from shardvit.data_shards.packing.sources.base import ImageSet, Int64s, LeftOut, SplitName
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles
from shardvit.data_shards.packing.work import work_folder
from shardvit.data_shards.sets.arrow_columns import arrow_array, numbers_of
from shardvit.data_shards.sets.live import lists_of
from shardvit.data_shards.shards.location import is_local, redacted
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.folders import Folder, open_folder
from shardvit.data_shards.text import parse_json
from shardvit.data_shards.vocabulary import LabelKind

if TYPE_CHECKING:
    import pyarrow as pa

JOB_FILE, LEFT_OUT_FILE = "plan.json", "left_out.jsonl"
_PART_ROWS, _PART_SHARDS = 1 << 16, 64  # most of a parquet file, which a worker reads whole
_COLUMNS = ("container", "offset", "size", "stamp", "number")


@dataclass(frozen=True)
class PlanTable:
    """Planned shards in order, split by split: images of each, and a mark of all that its bytes depend on."""

    name: str  # folder of the tables
    splits: Mapping[SplitName, int]  # shards of each
    sizes: Sequence[int]
    marks: Sequence[str]
    shards_per_part: int

    def split(self, number: int) -> tuple[SplitName, int]:
        """Return a shard's split and its number there."""
        for split, count in self.splits.items():
            if number < count:
                return split, number
            number -= count
        raise IndexError(number)

    def part(self, number: int) -> tuple[str, int]:
        """Return the file that holds a shard's images, and their row group in it."""
        return f"{self.name}/{number // self.shards_per_part:05d}.parquet", number % self.shards_per_part

    @property
    def parts(self) -> list[str]:
        return sorted({self.part(number)[0] for number in range(0, len(self.sizes), self.shards_per_part)})


@dataclass(frozen=True)
class PackJob:
    """A planned packing, as its workers and its end need it; `content` is what pack.json will say of it."""

    out: str
    content: dict[str, Any]
    name: str
    classes: tuple[str, ...]
    kind: LabelKind
    containers: tuple[Container, ...]
    plan: PlanTable
    whole: PlanTable  # the same, unless duplicates are dropped
    excluded: Mapping[str, int]  # counts, for `Counts`
    start: Start = field(default_factory=Start)

    @property
    def request(self) -> Mapping[str, Any]:
        """The request, without its defaults; see `PackRequest.as_json`."""
        return self.content["request"]

    @property
    def source(self) -> str:
        return self.request["source"]

    @property
    def resize(self) -> Resize | None:
        return Resize(**found) if (found := self.request.get("resize")) else None

    @property
    def channels(self) -> int:
        """0: colours."""
        return self.request.get("channels", 0)

    @property
    def work(self) -> Folder:
        return work_folder(self.out)

    @property
    def result(self) -> Folder:
        """Folder that shards and manifests are put into."""
        return self.work.at("result") if is_local(self.out) and not self.start.packing else open_folder(self.out)

    @property
    def lists(self) -> Folder:
        """Folder of the packing's lists: the result, unless it is appended to a set."""
        return lists_of(self.result, self.start.packing)

    @property
    def pixel_limit(self) -> PixelLimit:
        return replace(PACKED_LIMIT, pixels=self.request.get("max_image_pixels", PACKED_LIMIT.pixels))

    def file(self, number: int, table: PlanTable | None = None) -> str:
        """`train/NAME-train-000007.tar`: a shard's place in the result."""
        split, at = (table or self.plan).split(number)
        return f"{split}/{shard_file(self.name, split, at + self.start.shards.get(split, 0))}"

    def shard(self, number: int, table: PlanTable | None = None) -> ShardPlan:
        """Read the images of a shard."""
        return next(self.shards([number], table))

    def shards(self, numbers: Iterable[int], table: PlanTable | None = None) -> Iterator[ShardPlan]:
        """Read the images of shards, each file of neighbours once."""
        table, numbers = table or self.plan, list(numbers)
        for number, found in zip(numbers, self._read(table, numbers), strict=True):
            yield self._shard(number, table, found)

    def _shard(self, number: int, table: PlanTable, found: pa.Table) -> ShardPlan:
        split = table.split(number)[0]
        numbers, labels = numbers_of(found.column("number")), numbers_of(found.column("label"))
        files = LocatedFiles(
            self.source,
            self.containers,
            _texts(found),
            numbers_of(found.column("container")).astype(np.int32),
            numbers_of(found.column("offset")),
            numbers_of(found.column("size")),
            numbers_of(found.column("stamp")).view(np.uint64),
        )
        if self.kind == "multi":
            labels = labels.reshape(len(numbers), -1)
        images = ImageSet(files, np.arange(len(numbers)), labels)
        file = self.file(number, table).rpartition("/")[2]
        return ShardPlan(file, images, numbers, self.classes, split, self.start.images)

    def numbers(self, table: PlanTable) -> Int64s:
        """Read all images' numbers in the source, in the plan's order."""
        pieces = [numbers_of(each.column("number")) for each in self._read(table, range(len(table.sizes)), ["number"])]
        return np.concatenate([np.zeros(0, np.int64), *pieces])

    def lines(self, table: PlanTable, positions: Iterable[int]) -> dict[int, Line]:
        """Format images by their positions in the plan, with their keys; reads each shard once."""
        starts = np.cumsum([0, *table.sizes])
        wanted = np.array(sorted(positions), dtype=np.int64)
        lines: dict[int, Line] = {}
        at_shard = np.searchsorted(starts, wanted, side="right") - 1
        numbers = np.unique(at_shard).tolist()
        for number, shard in zip(numbers, self.shards(numbers, table), strict=True):
            for position in wanted[at_shard == number].tolist():
                at = position - int(starts[number])
                lines[position] = {**shard.line(at), "key": shard.key(at)}
        return lines

    def _read(self, table: PlanTable, numbers: Iterable[int], columns: list[str] | None = None) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        opened, file = "", None
        for number in numbers:
            name, group = table.part(number)
            if file is None or name != opened:
                opened, file = name, pq.ParquetFile(pa.BufferReader(self.work.read(name)))
            yield file.read_row_group(group, columns=columns, use_threads=False).combine_chunks()


def shards_per_part(sizes: Sequence[int]) -> int:
    """Choose how many shards' images a file of the plan holds."""
    return max(1, min(_PART_SHARDS, _PART_ROWS // max(sizes)))


def write_table(shards: Sequence[ShardPlan], name: str, job: PackJob, *, first: Mapping[int, int]) -> PlanTable:
    """Write the plan's images, a row group a shard; `first`: id of a split's files -> number of its first container."""
    import pyarrow.parquet as pq

    sizes = [len(shard) for shard in shards]
    per_part = shards_per_part(sizes)
    splits: dict[SplitName, int] = {}
    marks: list[str] = []
    table = PlanTable(name, splits, sizes, marks, per_part)
    options = (job.resize, job.pixel_limit.pixels, version("pillow"), version("simplejpeg"), job.classes)
    options += (job.channels,) if job.channels else ()
    base = hashlib.sha256(repr(options).encode())
    for start in range(0, len(shards), per_part):
        stream, writer = io.BytesIO(), None
        for shard in shards[start : start + per_part]:
            splits[shard.split] = splits.get(shard.split, 0) + 1
            files = shard.images.files.take(shard.images.rows)
            marks.append(_mark(shard, files, base))
            rows = _arrow(shard, files, first[id(shard.images.files)])
            writer = writer or pq.ParquetWriter(stream, rows.schema, use_dictionary=False, compression="zstd")
            writer.write_table(rows, row_group_size=len(shard))
        assert writer is not None
        writer.close()
        job.work.write(table.part(start)[0], stream.getvalue())
    return table


def save_job(job: PackJob, left_out: Iterable[LeftOut]) -> None:
    """Write plan.json, last, and left_out.jsonl."""
    job.work.write(LEFT_OUT_FILE, lines_text(each.as_json() for each in left_out))
    content = asdict(job) | ({"whole": None} if job.whole is job.plan else {})
    del content["out"]
    job.work.write(JOB_FILE, json.dumps(content).encode())


def load_job(out: str) -> PackJob | None:
    """Read plan.json; None if there is none, UserError if it is broken."""
    work = work_folder(out)
    try:
        content = parse_json(work.read(JOB_FILE))
        plan = PlanTable(**content["plan"])
        content |= {"plan": plan, "whole": PlanTable(**content["whole"]) if content["whole"] else plan}
        content |= {"containers": tuple(Container(**each) for each in content["containers"])}
        content |= {"classes": tuple(content["classes"]), "start": Start(**content["start"])}
        job = PackJob(out, **content)
        _ = job.source, job.resize, job.pixel_limit, job.channels  # raise if the request is broken
        return job
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{redacted(work.location)}: its {JOB_FILE} is broken; delete this folder") from None


def _mark(shard: ShardPlan, files: LocatedFiles, base: Any) -> str:
    """Hash everything the tar's bytes depend on: images, labels, order, and in `base` options and versions."""
    digest = base.copy()
    digest.update(shard.file.encode())
    for array in (shard.labels, shard.numbers + shard.first_number, files.stamps, files.names.ends, files.names.blob):
        digest.update(f"{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


def _arrow(shard: ShardPlan, files: LocatedFiles, first: int) -> pa.Table:
    import pyarrow as pa

    ends = np.concatenate([np.zeros(1, np.int32), files.names.ends.astype(np.int32)])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(files.names.blob)]
    names = pa.Array.from_buffers(pa.binary(), len(files), buffers)
    labels = arrow_array(shard.labels.reshape(-1), pa.int64())
    if shard.labels.ndim == 2:
        labels = pa.FixedSizeListArray.from_arrays(labels, shard.labels.shape[1])
    values = (files.container + np.int32(first), files.offsets, files.sizes, files.stamps, shard.numbers)
    arrays = (arrow_array(each, pa.from_numpy_dtype(each.dtype)) for each in values)
    return pa.Table.from_arrays([names, *arrays, labels], names=["name", *_COLUMNS, "label"])


def _texts(table: pa.Table) -> Texts:
    found = table.column("name").combine_chunks()
    _, ends, blob = found.buffers()
    places = np.frombuffer(ends, np.int32)[found.offset : found.offset + len(found) + 1].astype(np.int64)
    whole = np.frombuffer(blob, np.uint8) if blob is not None else np.zeros(0, np.uint8)
    return Texts(whole[places[0] : places[-1]], places[1:] - places[0])
