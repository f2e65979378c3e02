"""Labels read alone are those that come with the images, for any part of a set, and damage is told by -1."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import UNKNOWN, ShardReader, label_column
from shardvit.data_shards.shards.shard_set import Portion, ShardSet, ShardsSpec
from shardvit.data_shards.shards.tar_index import index_path, read_index
from tests.data_shards.small_set import pack_small


def in_order(shards: ShardSet) -> list[int]:
    reader = ShardReader(shards)
    sizes = shards.shard_sizes
    return [reader.read(shard, row=row).labels[0] for shard in range(len(sizes)) for row in range(sizes[shard])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pack_small(tmp_path)
    return tmp_path / "out" / "train"


def test_labels_are_those_of_the_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for portion in (None, Portion("held_out", 0.3), Portion("rest", 0.3)):
        shards = open_shards(ShardsSpec(str(folder), portion=portion))
        expected = in_order(shards)
        assert label_column(shards).tolist() == expected
        assert label_column(shards, first=3, stop=8).tolist() == expected[3:8]
        assert label_column(shards, first=7, stop=99).tolist() == expected[7:]
    monkeypatch.setattr(ShardReader, "read", None)  # no image is read for them
    assert label_column(open_shards(str(folder))).tolist()


def test_a_damaged_label_is_unknown_and_the_others_are_read(folder: Path) -> None:
    shards = open_shards(str(folder))
    expected = label_column(shards)
    tar = Path(shards.shards[1].url)
    index = read_index(index_path(tar))
    content = bytearray(tar.read_bytes())
    content[int(index.label_offset[2])] = ord("x")  # no number
    content[int(index.label_offset[3]) - 512] ^= 1  # its header's name
    tar.write_bytes(content)
    found = label_column(replace(open_shards(str(folder), damaged="report")))
    damaged = np.flatnonzero(found != expected)
    assert damaged.tolist() == [7, 8] and (found[damaged] == UNKNOWN).all()
