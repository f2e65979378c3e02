"""Shards as columns: whatever is asked of them is what a tuple of entries would say."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from data_shards.shards.holdout import take_portion
from data_shards.shards.labels import LabelSpec
from data_shards.shards.packed_shards import PackedShards, Shard
from data_shards.shards.shard_set import Portion, ShardEntry, ShardSet, merge_shard_sets
from data_shards.shards.shard_table import ShardTable, TableSource
from data_shards.shards.texts import Texts

NAMES = ["a.tar", "", "sub/ü.tar", "c" * 300, "日本.tar"]


def rows(count: int, *, suffix: str = "") -> tuple[Shard, ...]:
    return tuple(Shard(f"x{suffix}-{at:04}.tar", 10 + at % 7, 1000 + at, f"{at:064x}"[:64]) for at in range(count))


def table(shards: tuple[Shard, ...], **changes) -> ShardTable:
    source = TableSource("/abs/set", "set", LabelSpec(), num_shards=len(shards))
    return ShardTable.of(replace(source, **changes), PackedShards.of_shards(shards), damaged=[1])


def entries(shards: tuple[Shard, ...], *, folder: str = "/abs/set", shown: str = "set") -> tuple[ShardEntry, ...]:
    return tuple(
        ShardEntry(
            f"{folder}/{shard.file}",
            f"{shown}/{shard.file}",
            shard.num_samples,
            shard.num_bytes,
            shard.sha256,
            index=None,
            labels=LabelSpec(),
            state="damaged" if at == 1 else "whole",
        )
        for at, shard in enumerate(shards)
    )


def as_set(shards, **changes) -> ShardSet:
    return replace(ShardSet("n", source="s", split="train", classes=("a",), shards=shards, digest="d"), **changes)


def test_texts_come_back_one_by_one_in_slices_and_joined():
    texts = Texts.of(NAMES)
    assert list(texts) == NAMES and [texts[at] for at in range(-5, 5)] == NAMES * 2
    for part in (slice(1, 3), slice(3, 1), slice(None, None, 2), slice(4, None), slice(9, None), slice(-2, None)):
        assert texts[part] == NAMES[part]
    assert list(Texts.join([texts, Texts.of([]), texts])) == NAMES * 2
    with pytest.raises(IndexError):
        texts[5]


@pytest.mark.parametrize("count", [1, 5, 2500])
def test_a_table_is_a_sequence_of_its_entries(count: int):
    shards = rows(max(count, 2))
    one, expected = table(shards), entries(shards)
    assert one == expected and expected == one and list(one) == list(expected)
    for at in (0, 1, -1, len(shards) // 2):
        assert one[at] == expected[at]
    assert one[1:7] == expected[1:7] and one[::-3] == expected[::-3]
    with pytest.raises(IndexError):
        one[len(shards)]
    columns, plain = as_set(one), as_set(expected)
    for name in ("num_samples", "num_bytes", "shard_sizes", "is_multi_label", "damaged_numbers"):
        assert getattr(columns, name) == getattr(plain, name), name
    assert all(type(size) is int for size in columns.shard_sizes)
    assert pickle.loads(pickle.dumps(one)) == expected


def test_parts_mixtures_and_other_damage_are_those_of_entries():
    shards, others = rows(40), rows(7, suffix="o")
    far = table(others, folder="s3://b/o", shown_folder=None)
    for portion in (Portion("held_out", hold_out=0.1), Portion("rest", hold_out=0.1)):
        ours = take_portion(as_set(table(shards)), portion)
        assert ours == take_portion(as_set(entries(shards)), portion)
        mixed = merge_shard_sets([ours, as_set(far), ours])
        assert isinstance(mixed.shards, ShardTable)
        assert tuple(mixed.shards) == (
            *ours.shards,
            *entries(others, folder="s3://b/o", shown="s3://b/o"),
            *ours.shards,
        )
        assert mixed.damaged_numbers == [1, 41, 48] and not mixed.is_local
        mended = mixed.with_damaged([0, 46], damage=("x",), lost_samples=3)
        assert mended.damaged_numbers == [0, 46] and (mended.damage, mended.lost_samples) == (("x",), 3)
        with_tuple = merge_shard_sets([ours, as_set(entries(others))])
        assert with_tuple.shards == (*ours.shards, *entries(others))
        assert with_tuple.with_damaged([2], damage=(), lost_samples=0).damaged_numbers == [2]


def test_an_urls_query_stays_behind_the_file_and_out_of_messages():
    one = table(rows(2), folder="https://u:secret@h/set?token=1", shown_folder=None)
    assert one[0].url == "https://u:secret@h/set/x-0000.tar?token=1" and one[0].name == "https://h/set/x-0000.tar"


def test_a_hundred_bytes_a_shard_and_no_object_for_each():
    """10^5 shards are 13 MB to send to a rank or a worker."""
    small, large = (len(pickle.dumps(table(rows(count)), protocol=5)) for count in (1000, 3000))
    assert (large - small) / 2000 < 150


def test_stamps_are_as_the_file_has_them():
    stamps = np.array([[5, 6], [-1, -1]])
    source = TableSource("/a", "a", LabelSpec(), num_shards=2)
    one = ShardTable.of(source, PackedShards.of_shards(rows(2)), stamps=stamps)
    assert [entry.stamp for entry in one] == ["5 6", ""]
