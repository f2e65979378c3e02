"""The writer: tars to the byte as webdataset's TarWriter makes them, and digests of what was read."""

import hashlib
import io
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from data_shards.packing.image import Resize
from data_shards.packing.shard_plan import ShardPlan
from data_shards.packing.shard_writer import image_digest, plan_mark, read_digests, write_shards
from data_shards.packing.work import ShardRecord
from data_shards.progress_line import Progress
from data_shards.sources.base import ArrayImages
from data_shards.tars.tar_index import build_index, index_path, read_index


def plan(count: int, *, kind: str = "single", file: str = "x-train-000000.tar", seed: int = 0) -> ShardPlan:
    draw = np.random.default_rng(seed)
    images = ArrayImages("here", draw.integers(0, 256, (count, 5, 7), dtype=np.uint8), np.zeros(count, dtype=np.int64))
    labels = np.arange(count) % 3
    if kind == "multi":
        labels = np.stack([np.arange(count) % 3 - 1, np.arange(count) % 2], axis=1)
    order = draw.permutation(count)
    return ShardPlan(file, images, order, labels, ("cat", "dog", "owl"), first_number=7)


def written(plans: list[ShardPlan], folder: Path, *, num_threads: int = 2) -> tuple[dict[str, ShardRecord], list[str]]:
    saved: list[str] = []

    def save(record: ShardRecord) -> None:
        assert (folder / record.shard.file).stat().st_size == record.shard.num_bytes
        assert index_path(folder / record.shard.file).stat().st_size == record.index_bytes
        saved.append(record.shard.file)

    paths = {folder / each.file: each for each in plans}
    with Progress(sum(map(len, plans)), lambda line: None) as progress:
        return write_shards(paths, resize=None, num_threads=num_threads, progress=progress, save=save), saved


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("count", [1, 6, 7, 23])
def test_tars_are_those_of_webdatasets_writer(tmp_path: Path, count: int, kind: str):
    from webdataset.writer import TarWriter

    shard = plan(count, kind=kind)
    records, saved = written([shard], tmp_path)
    stream = io.BytesIO()
    with TarWriter(cast(Any, stream), encoder=False, mtime=0, user="", group="") as tar:
        for position, index in enumerate(shard.indices):
            extension, label = shard.label_member(position)
            tar.write({"__key__": shard.key(position), "png": shard.images.read(int(index)), extension: label})
    content = (tmp_path / shard.file).read_bytes()
    assert content == stream.getvalue()
    record = records[shard.file]
    assert record.shard.sha256 == hashlib.sha256(content).hexdigest() and record.shard.num_samples == count
    assert saved == [shard.file]
    part = "cls" if kind == "single" else "json"
    index = read_index(index_path(tmp_path / shard.file), label=part)
    assert list(index.keys) == [shard.key(i) for i in range(count)]
    assert np.array_equal(index.image_offset, build_index(tmp_path / shard.file, label=part).image_offset)


def test_records_hold_the_digest_of_each_image(tmp_path: Path):
    shards = [plan(5, file="a.tar"), plan(3, file="b.tar", seed=1)]
    records, saved = written(shards, tmp_path)
    assert sorted(saved) == ["a.tar", "b.tar"]
    expected = b"".join(image_digest(shard.images.read(int(i))) for shard in shards for i in shard.indices)
    assert b"".join(records[shard.file].image_digests for shard in shards) == expected
    with Progress(8, lambda line: None) as progress:
        assert read_digests(shards, num_threads=2, progress=progress) == expected


def test_the_mark_changes_with_all_that_makes_a_shard():
    base = plan(6)
    marks = [plan_mark(base, resize=None)]
    assert plan_mark(plan(6), resize=None) == marks[0]
    other_label = base.labels.copy()
    other_label[2] = (other_label[2] + 1) % 3
    pixels = base.images.pixels.copy()  # type: ignore[attr-defined]
    pixels[3, 0, 0] ^= 1
    changed = ArrayImages("here", pixels, base.images.labels)
    for shard, resize in (
        (base, Resize(3)),
        (base, Resize(3, quality=91)),
        (plan(6, file="y.tar"), None),
        (plan(5), None),
        (ShardPlan(base.file, base.images, base.indices[::-1].copy(), base.labels, base.classes, 7), None),
        (ShardPlan(base.file, base.images, base.indices, other_label, base.classes, 7), None),
        (ShardPlan(base.file, base.images, base.indices, base.labels, ("cat", "dog", "elk"), 7), None),
        (ShardPlan(base.file, base.images, base.indices, base.labels, base.classes, 8), None),
        (ShardPlan(base.file, changed, base.indices, base.labels, base.classes, 7), None),
    ):
        marks.append(plan_mark(shard, resize=resize))
    assert len(set(marks)) == len(marks)


def test_an_error_in_saving_stops_all_and_comes_out(tmp_path: Path):
    def save(record: ShardRecord) -> None:
        raise OSError(28, "No space left on device")

    shards = {tmp_path / f"{i}.tar": plan(40, file=f"{i}.tar") for i in range(9)}
    with pytest.raises(OSError, match="No space"), Progress(360, lambda line: None) as progress:
        write_shards(shards, resize=None, num_threads=2, progress=progress, save=save)
    assert not list(tmp_path.glob("*.tar"))
