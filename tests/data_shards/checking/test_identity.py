"""What a set of shards is known by: the same for any copy, another for any other content, wherever it is."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.checking import identity
from shardvit.data_shards.checking.identity import (
    MOST_SAMPLES,
    MOST_SHARDS,
    SetIdentity,
    compare_suspects,
    differences,
    identify,
    suspects,
)
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.tar_summary import spread
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from tests.data_shards.external_tars import opened, write_tar
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK
from tests.data_shards.small_set import touch_up


def columns(count: int) -> SetIdentity:
    """A set in which no two shards are alike."""
    texts = [f"{number:04d}\udcff" for number in range(count)]  # names of files may be no UTF-8
    return SetIdentity(
        digest="d",
        names=tuple(f"a/{text}.tar" for text in texts),
        num_bytes=tuple(range(1000, 1000 + count)),
        num_samples=(7,) * count,
        sha256=tuple(texts),
        indexes=("",) * count,
        pixels=("",) * count,
        stamps=("1 1",) * count,
        spots={number: ("a", "b", "") for number in range(0, count, 2)},
    )


def test_a_set_is_no_other_than_itself_also_through_json():
    one = columns(5)
    assert differences(one, one) == [] and suspects(one, one) == []
    again = SetIdentity.from_json(json.loads(json.dumps(vars(one))))
    assert again == one and again.content_digest == one.content_digest


@given(st.integers(1, 9), st.data())
def test_any_column_of_any_shard_is_named_and_changes_the_digest_but_for_those_of_copies(
    count: int, data: st.DataObject
):
    one = columns(count)
    shard = data.draw(st.integers(0, count - 1))
    column = data.draw(st.sampled_from(["num_bytes", "num_samples", "sha256", "spots", "names", "stamps"]))
    if column == "spots":
        shard -= shard % 2
        other = replace(one, spots={**one.spots, shard: ("a", "x", "")})
    else:
        values = list(getattr(one, column))
        values[shard] = values[shard] + 1 if isinstance(values[shard], int) else "other"
        other = replace(one, **{column: tuple(values)})
    if column in ("names", "stamps"):  # as in a copy
        assert differences(one, other) == [] and one.content_digest == other.content_digest
        assert suspects(one, other) == ([shard] if column == "stamps" else [])
        assert one.seen_as(other) == other
        assert one.seen_as(other, unseen=[shard]) == replace(one, names=other.names)
    else:
        (phrase,) = differences(one, other)
        assert one.names[shard] in phrase and one.content_digest != other.content_digest


@given(st.permutations(range(6)))
def test_another_order_is_called_that(order: list[int]):
    one = columns(6)
    moved = {
        name: tuple(getattr(one, name)[number] for number in order)
        for name in ("names", "num_bytes", "num_samples", "sha256", "indexes", "pixels", "stamps")
    }
    found = differences(one, replace(one, **moved, spots={}))
    assert found == [] if order == sorted(order) else "another order" in found[0]


def test_what_is_unknown_on_one_side_is_no_difference():
    one = columns(3)
    other = replace(one, num_bytes=(None,) * 3, stamps=("",) * 3, spots={0: ("", "b", "c")})
    assert differences(one, other) == differences(other, one) == [] and suspects(one, other) == []
    assert len(differences(one, replace(one, sha256=("x",) * 3, names=("b",) * 3))) == 3


@given(st.integers(0, 300), st.integers(1, 70))
def test_samples_are_spread_from_the_first_to_the_last(count: int, most: int):
    found = spread(count, most=most)
    assert found == sorted(set(found)) and len(found) == min(count, most) and set(found) <= set(range(count))
    assert count == 0 or most == 1 or (found[0], found[-1]) == (0, count - 1)


@pytest.mark.parametrize("change", ["[]", '{"digest": 1}', "names", "spots", "num_samples", "digest"])
def test_anything_else_in_json_is_refused(change: str):
    content = json.loads(json.dumps(vars(columns(2))))
    match change:
        case "names":
            content["names"].append("more")
        case "spots":
            content["spots"] = {"x": [1]}
        case "num_samples":
            content["num_samples"] = ["7", 7]
        case "digest":
            content["digest"] = None
        case _:
            content = json.loads(change)
    with pytest.raises(ValueError, match="column"):
        SetIdentity.from_json(content)


def test_a_large_set_is_looked_at_in_bounds(shards: Path, monkeypatch: pytest.MonkeyPatch):
    assert MOST_SHARDS * (MOST_SAMPLES // MOST_SHARDS) == MOST_SAMPLES
    whole = identify(open_shards(str(shards / "train")))
    assert {number: len(row) for number, row in whole.spots.items()} == dict.fromkeys(range(4), 9)
    monkeypatch.setattr(identity, "MOST_SHARDS", 2)
    monkeypatch.setattr(identity, "MOST_SAMPLES", 6)
    some = identify(open_shards(str(shards / "train")))
    assert {number: len(row) for number, row in some.spots.items()} == {0: 3, 3: 3}
    assert some.spots[3] == tuple(whole.spots[3][row] for row in (0, 4, 8))
    monkeypatch.setattr(identity, "_MOST_BYTES", 2)
    assert all(len(row) == 1 for row in identify(open_shards(str(shards / "train"))).spots.values())


def test_a_suspect_is_read_wholly_where_its_digest_is_known(shards: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "MOST_SAMPLES", 0)
    before = identify(open_shards(str(shards / "train")))
    tars = sorted((shards / "train").glob("*.tar"))
    touch_up(tars[1])
    os.utime(tars[3], (1, 1))
    now = open_shards(str(shards / "train"))
    assert suspects(before, identify(now)) == [1, 3] and differences(before, identify(now)) == []
    assert compare_suspects(now, before, [1, 3]) == {1: False, 3: True}


def test_a_packed_set_elsewhere_costs_no_request_for_a_shard(shards: Path, server: FaultServer):
    for path in (shards / "train").iterdir():
        server.files[f"/set/{path.name}"] = path.read_bytes()
    found = identify(open_shards(f"{server.url}/set", store=Store(retry=QUICK)))
    assert {path for _, path, _ in server.requests} == {"/set/manifest.json"}
    here = identify(open_shards(str(shards / "train")))
    assert differences(here, found) == [] and suspects(here, found) == []  # moved into a store, it is the same


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_tar_of_another_tool_with_other_pixels_is_noticed(tmp_path: Path, server: FaultServer, place: str):
    def look(image: bytes, *, time: int) -> tuple[SetIdentity, int]:
        path = write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("0.png", b"one"), ("1.cls", b"0"), ("1.png", image)])
        os.utime(path, (time, time))
        server.files["/a.tar"] = path.read_bytes()
        store = Store(CacheConfig(tmp_path / "cache", limit_bytes=100_000_000), retry=QUICK)
        location = f"{server.url}/a.tar" if place == "remote" else str(path)
        shards = opened(ShardsSpec(location), store=store, index_folder=tmp_path / "index")
        return identify(shards), len(server.requests)

    before, requests = look(b"two", time=1)
    same, more = look(b"two", time=2)
    assert differences(before, same) == [] and more - requests <= 1  # whether its ETag is the same
    other, _ = look(b"owt", time=3)
    (phrase,) = differences(before, other)
    assert phrase.endswith("a.tar has other images")


def test_a_copy_elsewhere_is_the_same(shards: Path, tmp_path: Path):
    before = identify(open_shards(str(shards / "train")))
    shutil.copytree(shards / "train", tmp_path / "copy")
    after = identify(open_shards(str(tmp_path / "copy")))
    assert differences(before, after) == [] and before.content_digest == after.content_digest
    assert before.names != after.names and suspects(before, after)
