"""The classes of tars without a manifest: from the user's file, or found in the labels, or asked for."""

from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import CorruptSample, UserError
from shardvit.data_shards.reading.external_shards import _name
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import ShardsSpec
from tests.data_shards.external_tars import by_shard_writer, opened, read_all


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("shards/a/train", "a-train"),
        ("/data/laion/", "laion"),
        ("s3://b/x-{000..127}.tar", "x"),
        ("s3://b/train-{000..127}.tar::s3://c/y.tar", "b-train"),
        ("s3://b/x/val/{000..127}.tar", "x-val"),
        ("train", "train"),
        ("{0..9}.tar", "{0..9}.tar"),
    ],
)
def test_a_set_is_called_as_its_folder_or_as_its_tars(source: str, name: str):
    assert _name(source) == name


def test_classes_from_a_file(tmp_path: Path):
    samples = [{"__key__": f"k{i}", "jpg": b"x", "txt": name} for i, name in enumerate(["dog", "cat", "2"])]
    folder = by_shard_writer(tmp_path / "set", samples)

    def labels(content: str, **options: Any) -> list[tuple[int, ...]]:
        (tmp_path / "classes").write_text(content, encoding="utf-8")
        shards = opened(ShardsSpec(str(folder), label="txt", classes=tmp_path / "classes"), **options)
        return [sample.labels for sample in read_all(shards)]

    assert labels("bird\ncat\n dog\n\n") == [(2,), (1,), (2,)]
    assert labels('["dog", "cat", "bird"]') == [(0,), (1,), (2,)]
    assert labels('{"cat": 0, "bird": 2, "dog": 1}') == [(1,), (0,), (2,)]
    assert labels("dog\ncat\n2\nbird") == [(0,), (1,), (2,)]
    for content, message in [
        ("dog\ncat\n", "the label '2' is not one of the 2 classes"),
        ("dog\nbird\ncow", "the label 'cat'"),
        ("dog\ncat\ndog", "'dog' is there twice"),
        ("dog\nc\x07t", "cannot be written"),
        ("", "one name of a class a line"),
        ("[1, 2]", "one name of a class a line"),
        ("[", "not readable as JSON"),
        ('{"dog": 1, "cat": 2}', "numbers must be 0 to 1"),
        ('{"dog": true, "cat": 0}', "numbers must be 0 to 1"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            labels(content)
        assert str(tmp_path / "classes") in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        opened(ShardsSpec(str(folder), label="txt", classes=tmp_path / "nothing"))
    (tmp_path / "classes").write_text("dog\ncat\n")
    shards = opened(ShardsSpec(str(folder), label="txt", classes=tmp_path / "classes"), damaged="report")
    assert len(shards.damage) == 1 and shards.num_samples == 3
    with pytest.raises(CorruptSample, match="label 2 is no class number"):
        ShardReader(shards).read(0, row=2)


@pytest.mark.parametrize(
    ("values", "part", "message"),
    [
        ([0, "cat"], "json:l", "numbers, such as 0, and names, such as 'cat'"),
        ([2**40], "json:l", "no label but a caption or a number"),
        ([f"caption {i}" for i in range(150)], "txt", "no label but a caption"),
    ],
)
def test_labels_that_are_none(tmp_path: Path, values: list[Any], part: str, message: str):
    samples = [{"__key__": f"k{i}", "jpg": b"x", "json": {"l": v}, "txt": str(v)} for i, v in enumerate(values)]
    folder = by_shard_writer(tmp_path / "set", samples, per_shard=1000)
    with pytest.raises(UserError, match=message):
        opened(ShardsSpec(str(folder), label=part))


def test_numbers_in_text_are_class_numbers(tmp_path: Path):
    folder = by_shard_writer(
        tmp_path / "set", [{"__key__": f"k{i}", "jpg": b"x", "txt": str(v)} for i, v in enumerate([10, 2, 0])]
    )
    shards = opened(ShardsSpec(str(folder), label="txt"))
    assert shards.classes == tuple(map(str, range(11)))
    assert [sample.labels for sample in read_all(shards)] == [(10,), (2,), (0,)]
