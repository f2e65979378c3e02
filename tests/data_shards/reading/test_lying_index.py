"""An index that says what its tar does not is never believed, whichever entry it is about; a damaged tar is no lie."""

import re
from collections.abc import Callable

import pytest

from shardvit.data_shards.checking.identity import identify
from shardvit.data_shards.errors import CorruptSample, UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.tar_index import index_path
from shardvit.data_shards.shards.tar_walk import BLOCK_BYTES
from tests.data_shards.external_tars import read_all
from tests.data_shards.small_set import by_webdataset, pack_small

SHARD = 2
Rows = list[list[str]]  # of each sample: extension, offset, size and member of both its parts


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return pack_small(tmp_path_factory.mktemp("packed"))


def exchange(rows: Rows, one: int, other: int, fields: slice) -> Rows:
    rows[one][fields], rows[other][fields] = rows[other][fields], rows[one][fields]
    return rows


def move(rows: Rows, field: int, by: int, *, only: int | None = None) -> Rows:
    for number, row in enumerate(rows):
        if only in (None, number):
            row[field] = str(int(row[field]) + by)
    return rows


def all_by(rows: Rows, by: int) -> Rows:
    return move(move(rows, 1, by), 5, by)


LIES: dict[str, Callable[[Rows], Rows]] = {
    "two samples exchanged": lambda rows: [rows[0], rows[2], rows[1], *rows[3:]],
    "places of two samples exchanged": lambda rows: exchange(exchange(rows, 1, 2, slice(1, 3)), 1, 2, slice(5, 7)),
    "images of two samples exchanged": lambda rows: exchange(rows, 1, 2, slice(5, 7)),
    "labels of two samples exchanged": lambda rows: exchange(rows, 1, 3, slice(1, 3)),
    "keys of two samples exchanged": lambda rows: exchange(exchange(rows, 1, 2, slice(3, 4)), 1, 2, slice(7, 8)),
    "the image of another sample": lambda rows: [[*rows[0][:4], rows[0][4], *rows[1][5:7], rows[0][7]], *rows[1:]],
    "a block too early": lambda rows: all_by(rows, -BLOCK_BYTES),
    "a block too late": lambda rows: all_by(rows[:-1], BLOCK_BYTES) + rows[-1:],
    "a byte too late": lambda rows: move(rows, 5, 1, only=2),
    "a byte too short": lambda rows: move(rows, 6, -1, only=4),
    "before the first header": lambda rows: move(rows, 1, -500, only=0),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_when_read_and_when_a_stage_begins(manifest: Manifest, lie: str):
    path = index_path(manifest.shard_paths[SHARD])
    whole = path.read_text()
    header, *lines = whole.splitlines()
    told = LIES[lie]([line.split(" ") for line in lines])
    assert told != [line.split(" ") for line in lines]
    try:
        path.write_text("\n".join([header, *map(" ".join, told)]) + "\n")
        shards = open_shards(str(manifest.root))
        with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: .*delete"):
            read_all(shards)
        with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: .*delete"):
            identify(shards)
        path.unlink()  # as it says
        assert read_all(shards) == by_webdataset(manifest)
    finally:
        path.write_text(whole)


def test_a_damaged_header_costs_its_own_sample(manifest: Manifest):
    tar = manifest.shard_paths[SHARD]
    whole = tar.read_bytes()
    shards = open_shards(str(manifest.root))
    expected = [sample for sample in read_all(shards)][10:15]
    start = int(index_path(tar).read_text().splitlines()[3].split(" ")[1]) - BLOCK_BYTES  # the third sample's
    try:
        tar.write_bytes(whole[:start] + b"\xff" * 200 + whole[start + 200 :])
        reader = ShardReader(shards)
        for row in (0, 1, 3, 4):
            assert reader.read(SHARD, row=row) == expected[row]
        with pytest.raises(CorruptSample, match="headers cannot be read"):
            reader.read(SHARD, row=2)
    finally:
        tar.write_bytes(whole)
