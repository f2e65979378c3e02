"""Random access to samples: webdataset's own reading is the oracle; descriptors are bounded; damage is named."""

import dataclasses
import os
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.errors import CorruptSample, SampleError, UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import RawSample, ShardReader
from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.data_shards.shards.shard_set import Damaged, ShardSet
from shardvit.data_shards.shards.tar_index import index_path, open_index
from tests.data_shards.external_tars import write_tar
from tests.data_shards.small_set import by_webdataset, needs_proc, open_files, pack_small, places
from tests.data_shards.written import write_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return pack_small(tmp_path)


def opened(manifest: Manifest, *, damaged: Damaged = "refuse") -> ShardSet:
    write_manifest(manifest)
    return open_shards(str(manifest.root), damaged=damaged)


def write_shard(folder: Path, parts: list[tuple[str, bytes]], *, num_samples: int) -> Manifest:
    """A tar of another make: GNU's format, and no index beside it."""
    path = write_tar(folder / "a.tar", parts, format=tarfile.GNU_FORMAT)
    shard = Shard(file="a.tar", num_samples=num_samples, num_bytes=path.stat().st_size, sha256="")
    return Manifest(root=folder, name="a", split="train", classes=("x", "y", "z"), shards=(shard,), source="")


def test_every_sample_is_webdatasets_in_any_order(manifest: Manifest):
    expected = by_webdataset(manifest)
    reader = ShardReader(opened(manifest))
    wanted = list(enumerate(places(manifest)))
    assert len(expected) == len(wanted) == 30
    random.Random(0).shuffle(wanted)
    for number, (shard, row) in wanted:
        assert reader.read(shard, row=row) == expected[number]
        description = reader.describe(shard, row=row)
        assert repr(expected[number].key) in description and str(manifest.shard_paths[shard]) in description


def test_tars_of_another_make_are_read_the_same(tmp_path: Path):
    """GNU tar's long names, folders, other parts of a sample, and no index beside it."""
    parts = []
    for number in range(4):
        key = f"some/folder/{'long' * 40}-{number}"
        parts += [
            (f"{key}.json", b"{}"),
            (f"{key}.cls", f"{number % 2}\n".encode()),
            (f"{key}.png", bytes([number]) * 700),
        ]
    manifest = write_shard(tmp_path, parts, num_samples=4)
    reader = ShardReader(opened(manifest))
    assert [reader.read(0, row=row) for row in range(4)] == by_webdataset(manifest)


def test_the_label_may_come_before_the_image_or_after(tmp_path: Path):
    parts = []
    for number in range(4):
        sample = [
            (f"{number}.png", random.Random(number).randbytes(1 + 30_000 * number)),
            (f"{number}.json", bytes(40_000 * (number % 2))),
            (f"{number}.cls", b"%d" % (number % 3)),
        ]
        parts += sample if number % 2 else sample[::-1]
    manifest = write_shard(tmp_path, parts, num_samples=4)
    reader = ShardReader(opened(manifest))
    assert [reader.read(0, row=row) for row in range(4)] == by_webdataset(manifest)


@pytest.mark.parametrize("size", [1, 512, 14_000, 17_000, 200_000])
@pytest.mark.parametrize("label_first", [False, True])
def test_small_neighbours_take_one_call_and_headers_are_checked_at_any_size(
    tmp_path: Path, size: int, label_first: bool, monkeypatch: pytest.MonkeyPatch
):
    parts = [(f"{key}.{part}", data) for key in "ab" for part, data in (("png", b"x" * size), ("cls", b"2"))]
    if label_first:
        parts = [parts[at] for at in (1, 0, 3, 2)]
    manifest = write_shard(tmp_path, parts, num_samples=2)
    reader = ShardReader(opened(manifest))
    assert reader.read(0, row=0) == RawSample("a", b"x" * size, (2,))
    calls: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *of: calls.append(of[1]) or pread(*of))
    assert reader.read(0, row=1) == RawSample("b", b"x" * size, (2,))
    assert len(calls) == (1 if size <= 14_000 else 3)
    index = open_index(manifest.shard_paths[0])
    for header in (int(index.image_offset[0]) - 512, int(index.label_offset[0]) - 512):
        with open(manifest.shard_paths[0], "r+b") as stream:
            stream.seek(header)
            kept = stream.read(512)
            stream.seek(header)
            stream.write(b"q" + kept[1:])  # another name
        with pytest.raises(CorruptSample, match=r"'a' of .*its tar headers cannot be read"):
            reader.read(0, row=0)
        with open(manifest.shard_paths[0], "r+b") as stream:
            stream.seek(header)
            stream.write(kept)
    assert reader.read(0, row=0) == RawSample("a", b"x" * size, (2,))


@needs_proc
def test_descriptors_are_bounded_and_the_least_recently_used_shard_is_closed(manifest: Manifest):
    reader = ShardReader(opened(manifest), max_open_shards=3)
    expected = by_webdataset(manifest)
    draw = random.Random(1)
    for _ in range(100):
        number = draw.randrange(30)
        shard, row = places(manifest)[number]
        assert reader.read(shard, row=row) == expected[number]
        assert open_files(manifest.root) <= 3
    for shard in (0, 1, 2, 0, 3):  # 1 has waited longest when 3 comes
        reader.read(shard, row=0)
    for shard in (0, 2, 3):
        manifest.shard_paths[shard].unlink()  # what is open can still be read
        reader.read(shard, row=1)
    for shard in (1, 2, 3):
        if shard == 1:
            reader.read(1, row=0)  # closed, and opened again: now 0 goes
            with pytest.raises((UserError, FileNotFoundError)):
                reader.read(0, row=0)


@needs_proc
def test_close_and_the_end_of_the_reader_leave_nothing_open(manifest: Manifest):
    reader = ShardReader(opened(manifest))
    for shard in range(6):
        reader.read(shard, row=0)
    assert open_files(manifest.root) == 6
    reader.close()
    assert open_files(manifest.root) == 0
    first = reader.read(0, row=0)  # can be used again
    assert first == by_webdataset(manifest)[0] and open_files(manifest.root) == 1
    del reader
    assert open_files(manifest.root) == 0


@needs_proc
def test_a_pickled_reader_has_no_descriptors_and_reads_the_same(manifest: Manifest):
    reader = ShardReader(opened(manifest), max_open_shards=2)
    samples = [reader.read(shard, row=row) for shard, row in places(manifest)]
    copy = pickle.loads(pickle.dumps(reader))
    assert open_files(manifest.root) == 2
    assert [copy.read(shard, row=row) for shard, row in places(manifest)] == samples
    assert open_files(manifest.root) == 4  # two each: the limit travels too
    del copy
    assert reader.read(5, row=4) == samples[-1]  # the copy closed only its own


def test_a_missing_index_is_built_from_the_tar(manifest: Manifest):
    expected = by_webdataset(manifest)
    for path in manifest.shard_paths:
        index_path(path).unlink()
    reader = ShardReader(opened(manifest))
    assert [reader.read(shard, row=row) for shard, row in places(manifest)] == expected


# ---- damage while training continues: a SampleError, as one process alone may come upon it, and launch/train lets only
# that kind speak


def cut_tar(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def cut_tar_without_index(path: Path) -> None:
    cut_tar(path)
    index_path(path).unlink()


def spoil_header(path: Path) -> None:
    index_path(path).unlink()
    with open(path, "r+b") as stream:
        stream.seek(1024)
        stream.write(b"\xff" * 1024)


def spoil_index(path: Path) -> None:
    index_path(path).write_text("what is this\n")


def other_index(path: Path) -> None:
    lines = index_path(path).read_text().splitlines()
    index_path(path).write_text("\n".join([f"v1.2 {len(lines) - 2}", *lines[1:-1]]) + "\n")


def compress(path: Path) -> None:
    import gzip

    path.write_bytes(gzip.compress(path.read_bytes()))
    index_path(path).unlink()


@pytest.mark.parametrize("damage", [cut_tar, cut_tar_without_index, spoil_header, spoil_index, other_index, compress])
def test_a_damaged_shard_is_named(manifest: Manifest, damage: Callable[[Path], None]):
    path = manifest.shard_paths[2]
    shards = opened(manifest)
    damage(path)
    reader = ShardReader(shards)
    reader.read(1, row=0)
    with pytest.raises(SampleError) as caught:
        reader.read(2, row=0)
    message = str(caught.value)
    assert str(path.with_suffix("")) in message and "\n" not in message
    reader.read(3, row=0)  # the others are as they were


@pytest.mark.parametrize("order", ["png then cls", "cls then png"])
def test_a_tar_cut_while_it_is_open_is_noticed(tmp_path: Path, order: str):
    """Also where the label, ahead of its image, is still there."""
    data = {"png": b"x" * 1000, "cls": b"0"}
    parts = [(f"{key}.{part}", data[part]) for key in ("a", "b") for part in order.split(" then ")]
    manifest = write_shard(tmp_path, parts, num_samples=2)
    reader = ShardReader(opened(manifest))
    reader.read(0, row=1)
    last = open_index(manifest.shard_paths[0]).image_offset[1]
    os.truncate(manifest.shard_paths[0], int(last) + 10)
    assert reader.read(0, row=0).key == "a"
    with pytest.raises(CorruptSample, match=r"'b' of .*a\.tar: it is cut short: (10|0) of (1000|1) bytes") as caught:
        reader.read(0, row=1)
    assert (Path(caught.value.shard).name, caught.value.key) == ("a.tar", "b")


@pytest.mark.parametrize(
    ("label", "message"),
    [(b"w", "no class number"), (b"", "no class number"), (b"-1", "no class number"), (b"3", "label 3.*3 classes")],
)
def test_a_label_that_is_no_class_makes_a_corrupt_sample(tmp_path: Path, label: bytes, message: str):
    """A label beyond the classes would be an assertion inside a CUDA kernel."""
    parts = [("good.png", b"x"), ("good.cls", b" 2\n"), ("bad.png", b"x"), ("bad.cls", label)]
    reader = ShardReader(opened(write_shard(tmp_path, parts, num_samples=2)))
    assert reader.read(0, row=0) == RawSample(key="good", image=b"x", labels=(2,))
    with pytest.raises(CorruptSample, match=f"'bad' of .*a.tar.*{message}"):
        reader.read(0, row=1)
    assert reader.read(0, row=0).key == "good"


def test_a_manifest_that_counts_otherwise_is_refused(manifest: Manifest):
    shards = list(manifest.shards)
    shards[2] = dataclasses.replace(shards[2], num_samples=shards[2].num_samples + 1)
    reader = ShardReader(opened(dataclasses.replace(manifest, shards=tuple(shards))))
    with pytest.raises(SampleError, match=r"000002\.tar: its index lists 5 samples, manifest.json 6"):
        reader.read(2, row=0)


# ---- damage that was there, and tolerated, when the set was opened: what is lost are corrupt samples, one by one


def readable(reader: ShardReader, shard: int) -> tuple[list[str], list[CorruptSample]]:
    keys: list[str] = []
    corrupt: list[CorruptSample] = []
    for row in range(5):
        try:
            keys.append(reader.read(shard, row=row).key)
        except CorruptSample as error:
            corrupt.append(error)
    return keys, corrupt


@pytest.mark.parametrize("has_index", [True, False])
def test_the_samples_before_the_cut_stay(manifest: Manifest, has_index: bool):
    path = manifest.shard_paths[2]
    index = open_index(path)
    os.truncate(path, int(index.image_offset[3]) + 7)
    if not has_index:
        index_path(path).unlink()
    reader = ShardReader(opened(manifest, damaged="report"))
    keys, corrupt = readable(reader, 2)
    assert keys == list(index.keys)[:3]
    assert [error.key for error in corrupt] == (list(index.keys)[3:] if has_index else ["row 3", "row 4"])
    assert {Path(error.shard).name for error in corrupt} == {path.name}
    assert corrupt[-1].key in reader.describe(2, row=4)
    assert readable(reader, 3) == (list(open_index(manifest.shard_paths[3]).keys), [])


@pytest.mark.parametrize("has_index", [True, False])
def test_all_of_a_shard_that_is_not_there_is_lost(manifest: Manifest, has_index: bool):
    path = manifest.shard_paths[2]
    expected = list(open_index(path).keys) if has_index else [f"row {row}" for row in range(5)]
    path.unlink()
    if not has_index:
        index_path(path).unlink()
    reader = ShardReader(opened(manifest, damaged="report"))
    keys, corrupt = readable(reader, 2)
    assert keys == [] and [error.key for error in corrupt] == expected
    assert reader.read(1, row=0).labels
