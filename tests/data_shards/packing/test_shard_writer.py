"""The writer: tars to the byte as webdataset's TarWriter makes them, and digests of what was read."""

import base64
import hashlib
import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shardvit.data_shards.packing.image import PACKED_LIMIT, Resize
from shardvit.data_shards.packing.plan_file import PackJob, PlanTable, write_table
from shardvit.data_shards.packing.shard_plan import ShardPlan
from shardvit.data_shards.packing.shard_writer import ShardRecord, write_shard
from shardvit.data_shards.packing.sources.base import ImageSet, array_images
from shardvit.data_shards.packing.sources.located import LocatedFiles, folder_files
from shardvit.data_shards.shards.manifest import Shard
from shardvit.data_shards.shards.tar_index import build_index, index_path, read_index


def plan(count: int, *, kind: str = "single", file: str = "x-train-000000.tar", seed: int = 0) -> ShardPlan:
    draw = np.random.default_rng(seed)
    images = array_images("here", draw.integers(0, 256, (count, 5, 7), dtype=np.uint8), np.zeros(count, dtype=np.int64))
    labels = np.arange(count) % 3
    if kind == "multi":
        labels = np.stack([np.arange(count) % 3 - 1, np.arange(count) % 2], axis=1)
    order = draw.permutation(count)
    return ShardPlan(file, images.take(order, labels), 7 + order, ("cat", "dog", "owl"))


def written(shard: ShardPlan, folder: Path) -> ShardRecord:
    record = write_shard(shard, folder / shard.file, pixel_limit=PACKED_LIMIT)
    assert (folder / shard.file).stat().st_size == record.shard.num_bytes
    assert index_path(folder / shard.file).stat().st_size == record.index_bytes
    return record


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("count", [1, 6, 7, 23])
def test_tars_are_those_of_webdatasets_writer(tmp_path: Path, count: int, kind: str):
    from webdataset.writer import TarWriter

    shard = plan(count, kind=kind)
    record = written(shard, tmp_path)
    stream = io.BytesIO()
    with TarWriter(cast(Any, stream), encoder=False, mtime=0, user="", group="") as tar:
        for position in range(len(shard)):
            extension, label = shard.label_member(position)
            tar.write({"__key__": shard.key(position), "png": shard.images.read(position), extension: label})
    content = (tmp_path / shard.file).read_bytes()
    assert content == stream.getvalue()
    assert record.shard.sha256 == hashlib.sha256(content).hexdigest() and record.shard.num_samples == count
    part = "cls" if kind == "single" else "json"
    index = read_index(index_path(tmp_path / shard.file), label=part)
    assert list(index.keys) == [shard.key(i) for i in range(count)]
    assert np.array_equal(index.image_offset, build_index(tmp_path / shard.file, label=part).image_offset)


NO_TABLE = PlanTable("", {}, [], [], 1)
JPEG = base64.b85decode(
    "|JeWF01!$>Nk#wx0RR9200961|JwjV08lqPMm#c5MnOheRZw4e$bxuoZg};txsk~K|NsC0|NsC0|NsC0|NsC0|NsC0|NsC0|NsC0|NsC0|NsC0|Np"
    "=M3kU!K009935di<h02BZL00000000000000000004|HJ?k5CH%H0000000000000000095m00;pA002J#8~@n"
)
PNG = base64.b85decode("iBL{Q4GJ0x0000DNk~Le00001000012mk;806Kn~RR9103Q0skRCwBBU<UvI2>=L<tGNLH0000<MNUMnLSTX")


def write_files(root: Path) -> LocatedFiles:
    """Files of bytes that no library's version changes."""
    names = [f"train/cat/im {row}.x" for row in range(6)]
    (root / "train/cat").mkdir(parents=True)
    for row, name in enumerate(names):
        (root / name).write_bytes((JPEG, PNG)[row % 2] + bytes(row * 300))
    return folder_files(root, names)


@pytest.mark.parametrize(
    ("labels", "sha256"),
    [
        (np.arange(6) % 3, "4f5f50ffa9fcba13622527920b88bbeb771f9aed8945fff41f7b14ac10f8d3c1"),
        (
            np.stack([np.arange(6) % 3 - 1, np.arange(6) % 2], axis=1),
            "909d523ae683e6db92cb001150c52269f99379d843b4fd9a1e351a9d375a70c6",
        ),
    ],
    ids=["cls", "json"],
)
def test_a_plan_gives_the_same_bytes_with_every_version(tmp_path: Path, labels: Any, sha256: str):
    order = np.array([3, 0, 5, 1, 4, 2])
    shard = ShardPlan(
        "x-train-000000.tar", ImageSet(write_files(tmp_path / "in"), order, labels), 7 + order, ("cat", "dog", "owl")
    )
    assert written(shard, tmp_path).shard == Shard(shard.file, 6, 20480, sha256)


def mark_of(shard: ShardPlan, resize: Resize | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        job = PackJob(
            out=f"{folder}/out",
            content={"request": {"source": "x", "resize": resize and vars(resize)}},
            name="x",
            classes=shard.classes,
            kind="single",
            containers=(),
            plan=NO_TABLE,
            whole=NO_TABLE,
            excluded={},
        )
        (mark,) = write_table([shard], "plan", job, first={id(shard.images.files): 0}).marks
    return mark


def test_the_mark_changes_with_all_that_makes_a_shard():
    base = plan(6)
    marks = [mark_of(base)]
    assert mark_of(plan(6)) == marks[0]
    other_label = base.labels.copy()
    other_label[2] = (other_label[2] + 1) % 3
    pixels = np.array(base.images.files.containers[0].pixels)
    pixels[3, 0, 0] ^= 1
    changed = array_images("here", pixels, base.images.labels)
    for shard, resize in (
        (base, Resize(3)),
        (base, Resize(3, quality=91)),
        (plan(6, file="y.tar"), None),
        (plan(5), None),
        (replace(base, images=base.images.take(np.arange(6)[::-1], base.labels), numbers=base.numbers[::-1]), None),
        (replace(base, images=replace(base.images, labels=other_label)), None),
        (replace(base, classes=("cat", "dog", "elk")), None),
        (replace(base, numbers=base.numbers + 1), None),
        (replace(base, images=changed.take(base.images.rows, base.labels)), None),
    ):
        marks.append(mark_of(shard, resize))
    assert len(set(marks)) == len(marks)
