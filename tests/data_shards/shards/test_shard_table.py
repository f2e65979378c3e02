"""Shards as columns: a table of what a manifest lists gives the entries that one would write by hand."""

import pickle
from dataclasses import replace

import pytest

from shardvit.data_shards.shards.holdout import take_portion
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.manifest import Shard
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.shards.shard_set import (
    Portion,
    ShardEntry,
    ShardSet,
    ShardSource,
    ShardTable,
    merge_shard_sets,
)

NAMES = ["a.tar", "", "sub/ü.tar", "c" * 300, "日本.tar"]


def table(count: int, *, folder: str = "/abs/set", shown: str = "set", stamps: tuple[str, ...] = ()) -> ShardTable:
    return ShardTable.of(
        ShardSource(folder, shown, LabelSpec(), num_shards=count),
        [Shard(f"x-{at:04}.tar", 10 + at % 7, 1000 + at, f"{at:064x}") for at in range(count)],
        stamps=stamps,
        damaged=[1],
    )


def entries(count: int, *, folder: str = "/abs/set", shown: str = "set") -> tuple[ShardEntry, ...]:
    return tuple(
        ShardEntry(
            *(f"{folder}/x-{at:04}.tar", f"{shown}/x-{at:04}.tar", 10 + at % 7, 1000 + at, f"{at:064x}"),
            index=None,
            labels=LabelSpec(),
            state="damaged" if at == 1 else "whole",
        )
        for at in range(count)
    )


def as_set(shards: ShardTable) -> ShardSet:
    return ShardSet("n", source="s", split="train", classes=("a",), shards=shards, digest="d")


def test_texts_come_back_one_by_one_in_slices_and_joined():
    texts = Texts.of(NAMES)
    assert list(texts) == NAMES and [texts[at] for at in range(-5, 5)] == NAMES * 2
    for part in (slice(1, 3), slice(3, 1), slice(None, None, 2), slice(4, None), slice(9, None), slice(-2, None)):
        assert texts[part] == NAMES[part]
    assert list(Texts.join([texts, Texts.of([]), texts])) == NAMES * 2
    with pytest.raises(IndexError):
        texts[5]


@pytest.mark.parametrize("count", [2, 5, 2500])
def test_a_table_is_a_sequence_of_its_entries(count: int):
    one, expected = table(count), entries(count)
    assert one == expected and expected == one and list(one) == list(expected)
    for at in (0, 1, -1, count // 2):
        assert one[at] == expected[at]
    assert one[1:7] == expected[1:7] and one[::-3] == expected[::-3]
    with pytest.raises(IndexError):
        one[count]
    assert pickle.loads(pickle.dumps(one)) == expected
    assert ShardTable.of_entries([replace(each, name=each.url) for each in expected]) == tuple(
        replace(each, name=each.url) for each in expected
    )
    shards = as_set(one)
    assert shards.shard_sizes == tuple(each.num_samples for each in expected)
    assert shards.num_bytes == sum(each.num_bytes or 0 for each in expected)
    assert shards.damaged_numbers == [1] and shards.is_local and not shards.is_multi_label
    assert all(type(size) is int for size in shards.shard_sizes)


def test_a_mixture_of_parts_has_their_entries_one_after_another():
    far = as_set(table(7, folder="s3://b/o", shown=""))
    here = as_set(ShardTable.of_entries([replace(entries(1)[0], num_bytes=None, stamp="1 2")]))
    for portion in (Portion("held_out", hold_out=0.1), Portion("rest", hold_out=0.1)):
        ours = take_portion(as_set(table(40)), portion)
        mixed = merge_shard_sets([ours, far, ours, here])
        expected = (*ours.shards, *entries(7, folder="s3://b/o", shown="s3://b/o"), *ours.shards, *here.shards)
        assert tuple(mixed.shards) == expected and mixed.num_samples == sum(each.num_samples for each in expected)
        assert mixed.damaged_numbers == [1, 41, 48] and not mixed.is_local and mixed.num_bytes is None
        mended = mixed.with_damaged([0, 46], damage=("x",), lost_samples=3)
        assert mended.damaged_numbers == [0, 46] and (mended.damage, mended.lost_samples) == (("x",), 3)


def test_an_urls_query_stays_behind_the_file_and_out_of_messages():
    one = table(2, folder="https://u:secret@h/set?token=1", shown="")
    assert one[0].url == "https://u:secret@h/set/x-0000.tar?token=1" and one[0].name == "https://h/set/x-0000.tar"


def test_130_bytes_a_shard_and_no_object_for_each():
    """10^5 shards are 13 MB to send to a rank or a worker."""
    small, large = (len(pickle.dumps(table(count), protocol=5)) for count in (1000, 3000))
    assert (large - small) / 2000 < 150


def test_stamps_are_as_the_file_has_them():
    assert [entry.stamp for entry in table(2, stamps=("5 6", ""))] == ["5 6", ""]
