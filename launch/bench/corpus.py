"""Plan a corpus of made-up images: time and peak memory from columns to the tables of the plan.

Run `python -m shardvit.launch.bench.corpus 1000000 3000000 10000000`. Each number of images is a process of its own.
The images are members of 10,000 tars that are not there, named as in ImageNet: planning reads none. Listing costs what
the disk or the store costs, and is not measured here. Output in records/corpus.txt. Five minutes.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shardvit.data_shards.packing import pack as packing
from shardvit.data_shards.packing.sources.base import ImageSet, Source
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.launch.bench.measure import setting

_CLASSES, _TARS, _NAMES_AT_ONCE = 1000, 10_000, 10_000


def main() -> None:
    """Measure each size in a process of its own, and extrapolate from the last two."""
    parser = argparse.ArgumentParser(description="Planning a large corpus: seconds and memory.")
    parser.add_argument("images", type=int, nargs="+")
    parser.add_argument("--here", action="store_true", help="in this process, for one size")
    chosen = parser.parse_args()
    if chosen.here:
        plan(chosen.images[0])
        return
    print(setting("pyarrow", "numpy"))
    print(f"{'images':>14}{'s':>8}{'CPU s':>8}{'peak MB':>10}{'plan MB':>10}{'source MB':>11}")
    peaks: list[tuple[int, float]] = []
    for count in chosen.images:
        command = [sys.executable, "-m", "shardvit.launch.bench.corpus", "--here", str(count)]
        line = subprocess.check_output(command, text=True).strip().splitlines()[-1]
        print(line, flush=True)
        peaks.append((count, float(line.split()[3].replace(",", ""))))
    if len(peaks) > 1:
        (fewer, less), (more, most) = peaks[-2:]
        each = (most - less) / (more - fewer)
        for count in (10**8, 10**9):
            print(f"{count:>14,}: {(most + each * (count - more)) / 1000:,.1f} GB by {each * 1e6:.0f} bytes an image")


def plan(count: int) -> None:
    """Plan a made source and print a row."""
    source = made_source(count)
    images = source.splits["train"]
    columns = (
        *vars(images.files).values(),
        images.rows,
        images.labels,
        images.files.names.blob,
        images.files.names.ends,
    )
    source_mb = sum(each.nbytes for each in columns if isinstance(each, np.ndarray)) / 1e6
    packing.open_source = lambda *_, **__: source
    with tempfile.TemporaryDirectory(prefix="shardvit-corpus-") as work:
        start, before = time.monotonic(), time.process_time()
        packing.pack("made", Path(work) / "out", step="plan", report=lambda line: None)
        seconds, cpu = time.monotonic() - start, time.process_time() - before
        plan_mb = sum(path.stat().st_size for path in Path(work).rglob("*") if path.is_file()) / 1e6
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"{count:>14,}{seconds:>8.0f}{cpu:>8.0f}{peak_mb:>10,.0f}{plan_mb:>10,.0f}{source_mb:>11,.0f}")


def made_source(count: int) -> Source:
    """Make a source as a listing of tars gives it."""
    rows = np.arange(count)
    labels = rows % _CLASSES
    each = len(_name(0))
    blob = np.empty(count * each, np.uint8)  # in pieces, so that making it does not count
    for start in range(0, count, _NAMES_AT_ONCE):
        names = "".join(map(_name, range(start, min(start + _NAMES_AT_ONCE, count)))).encode()
        blob[start * each : start * each + len(names)] = np.frombuffer(names, np.uint8)
    files = LocatedFiles(
        "made",
        tuple(Container("tar", f"/nowhere/{number:05d}.tar", "1-1") for number in range(_TARS)),
        Texts(blob, (rows + 1) * each),
        (rows % _TARS).astype(np.int32),
        rows * 4096,
        np.full(count, 100, np.int64),  # small, so that a disk has room for the shards
        rows.astype(np.uint64),
    )
    classes = tuple(f"n{number:08d}" for number in range(_CLASSES))
    return Source("made", classes, {"train": ImageSet(files, rows, labels)})


def _name(number: int) -> str:
    return f"n{number % _CLASSES:08d}/n{number % _CLASSES:08d}_{number:09d}.JPEG"


if __name__ == "__main__":
    main()
