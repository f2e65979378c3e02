"""`--from http|s3` of the data benchmark: readers of a set in a store on loopback, with delays added to each request.

Each reader runs in a fresh process without a cache, in turns, at every delay. The server counts the requests that were
open at once: *per connection* is images/s over the most of them.
"""

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.text import table
from shardvit.launch.bench.data_methods import WORKERS, Work
from shardvit.launch.bench.data_peers import prepare_mosaic
from shardvit.launch.bench.data_prepare import SHARDS, Photographs, lay_out
from shardvit.launch.bench.data_server import RunningStore, StoreKind, running_store
from shardvit.launch.bench.measure import child_environment, run_told

DELAYS_MS = (1, 10, 50)
READERS = ("plain", "ours", "fsspec", "webdataset", "mosaic")

_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Pass:
    """One pass of one reader over the set."""

    reader: str
    delay_ms: float
    seconds: float  # after the imports, to the last batch
    first_seconds: float  # to the first batch
    cpu_seconds: float
    images: int
    requests: int
    connections: int  # most requests open at once
    megabytes: float


@dataclass(frozen=True)
class ReaderFigures:
    """Medians over the rounds."""

    images_per_second: float
    connections: int
    first_seconds: float
    cpu_ms: float  # an image
    requests: float
    megabytes: float

    @property
    def per_connection(self) -> float:
        return self.images_per_second / self.connections


def prepare_remote(photographs: Photographs, work: Work, *, images: int) -> None:
    """Make the set that readers read, and Mosaic's beside it if that is installed."""
    lay_out(photographs.contents, work.images, images=images)
    pack(str(work.images), work.shards.parent, samples_per_shard=-(-images // SHARDS), report=lambda _: None)
    if _has_mosaic():
        prepare_mosaic(work)
        work.mosaic.rename(work.shards.parent / "mosaic")


def measure_remote(
    work: Work,
    kind: StoreKind,
    *,
    images: int,
    rounds: int,
    workers: int = WORKERS,
    readers: Sequence[str] = READERS,
    delays_ms: Sequence[float] = DELAYS_MS,
) -> tuple[list[Pass], dict[str, str]]:
    """Read the set of `prepare_remote` in turns; returns what was measured, and who was left out, with the reason."""
    skipped = {name: reason for name in readers if (reason := _hindrance(name, kind))}
    names = sorted(path.name for path in work.shards.glob("*.tar"))
    passes: list[Pass] = []
    with running_store(kind, work.shards.parent) as store:
        for _ in range(rounds):
            for delay_ms in delays_ms:
                for reader in readers:
                    if reader in skipped:
                        continue
                    try:
                        one = _pass(store, reader, names, delay_ms, images=images, workers=workers, root=work.root)
                    except RuntimeError as error:
                        skipped[reader] = str(error)
                        passes = [each for each in passes if each.reader != reader]
                        continue
                    passes.append(one)
                    print(f"{kind} {delay_ms} ms {reader}: {one.images / one.seconds:.0f} images/s", flush=True)
    return passes, skipped


def _hindrance(reader: str, kind: StoreKind) -> str | None:
    match reader:
        case "mosaic" if kind == "http":
            return "Mosaic streaming has no downloader for HTTP"
        case "mosaic" if not _has_mosaic():
            return "mosaicml-streaming is not installed"
        case "webdataset" if not shutil.which(program := "curl" if kind == "http" else "aws"):
            return f"webdataset reads {kind} by {program}, which is not installed"
        case _:
            return None


def _has_mosaic() -> bool:
    return util.find_spec("streaming") is not None


def _pass(
    store: RunningStore,
    reader: str,
    names: Sequence[str],
    delay_ms: float,
    *,
    images: int,
    workers: int,
    root: Path,
) -> Pass:
    with tempfile.TemporaryDirectory(prefix="cache-", dir=root) as cache:
        request = {"reader": reader, "url": store.url, "endpoint": store.endpoint, "names": names}
        request |= {"cache": cache, "workers": workers}
        store.reset(delay_ms=delay_ms)
        told = run_told(
            lambda descriptor: [
                *(sys.executable, "-m", "shardvit.launch.bench.data_transfer"),
                json.dumps({"descriptor": descriptor, **request}),
            ],
            env={**child_environment(temporary=root), **store.environment},
            timeout_seconds=_TIMEOUT_SECONDS,
            samples_memory=False,
        )
        traffic = store.reset(delay_ms=0)
    if told.failure:
        raise RuntimeError(told.failure)
    ready, end = told.marks["ready"], told.marks["end"]
    return Pass(
        reader,
        delay_ms,
        seconds=end["seconds"] - ready["seconds"],
        first_seconds=told.marks["first"]["seconds"] - ready["seconds"],
        cpu_seconds=end["cpu_seconds"] - ready["cpu_seconds"],
        images=end["images"] or images,
        requests=traffic.requests,
        connections=max(1, traffic.most_open),
        megabytes=traffic.megabytes,
    )


def rows_of(passes: Sequence[Pass]) -> Mapping[tuple[str, float], ReaderFigures]:
    """Summarise by reader and delay."""
    groups: dict[tuple[str, float], list[Pass]] = {}
    for each in passes:
        groups.setdefault((each.reader, each.delay_ms), []).append(each)
    return {
        key: ReaderFigures(
            images_per_second=statistics.median(each.images / each.seconds for each in group),
            connections=max(each.connections for each in group),
            first_seconds=statistics.median(each.first_seconds for each in group),
            cpu_ms=statistics.median(1000 * each.cpu_seconds / each.images for each in group),
            requests=statistics.median(each.requests for each in group),
            megabytes=statistics.median(each.megabytes for each in group),
        )
        for key, group in groups.items()
    }


def remote_lines(kind: StoreKind, passes: Sequence[Pass], skipped: Mapping[str, str]) -> list[str]:
    """Format the table of one kind of store."""
    return [*(f"not run: {name} from {kind}: {why}" for name, why in skipped.items()), *_table(kind, rows_of(passes))]


def _table(kind: StoreKind, rows: Mapping[tuple[str, float], ReaderFigures]) -> Iterator[str]:
    delays = sorted({delay for _, delay in rows})
    heads = ("reader", "images/s", "connections", "a connection", "first s", "CPU ms/image", "requests", "MB")
    lines: list[Sequence[str]] = [(f"{kind}, delay ms", *heads)]
    for delay in delays:
        for reader in dict.fromkeys(name for name, _ in rows):
            if (row := rows.get((reader, delay))) is not None:
                lines.append(
                    (
                        f"{delay:g}",
                        reader,
                        f"{row.images_per_second:.0f}",
                        str(row.connections),
                        f"{row.per_connection:.0f}",
                        f"{row.first_seconds:.2f}",
                        f"{row.cpu_ms:.2f}",
                        f"{row.requests:.0f}",
                        f"{row.megabytes:.0f}",
                    )
                )
    yield from table(lines, align="llr").split("\n")
