"""The plan of a packing: every image once, stratified, in even shards that mix the classes, under safe keys."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.image import PACKED_LIMIT
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import PackPlan, make_plan, needed_bytes, sample_key, tar_bytes
from shardvit.data_shards.packing.shard_writer import write_shard
from shardvit.data_shards.packing.sources.base import Source, array_images


def array_source(labels: list[int]) -> Source:
    images = array_images("train", np.zeros((len(labels), 1, 1), np.uint8), np.array(labels, np.int64))
    return Source("x", tuple("abc"[: max(labels) + 1]), {"train": images})


def planned(plan: PackPlan, split: str) -> list[tuple[int, int]]:
    shards = plan.splits.get(split, [])  # type: ignore[call-overload]
    return [pair for shard in shards for pair in zip(shard.numbers.tolist(), shard.labels.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 2), max_size=60).map(lambda extra: [0, 0, 1, 1, 2, 2, *extra]),
    holdout=st.none() | st.floats(0.01, 0.99),
    samples_per_shard=st.integers(1, 30),
    seed=st.integers(0, 2**64),
)
def test_each_image_exactly_once_stratified_in_even_shards(
    labels: list[int], holdout: float | None, samples_per_shard: int, seed: int
):
    source = array_source(labels)
    plan = make_plan(source, PackRequest(holdout=holdout, samples_per_shard=samples_per_shard, seed=seed))
    train, val = planned(plan, "train"), planned(plan, "val")
    assert sorted(index for index, _ in train + val) == list(range(len(labels)))
    assert all(label == labels[index] for index, label in train + val)
    assert bool(val) == (holdout is not None)
    if holdout is not None:
        total, held = Counter(labels), Counter(label for _, label in val)
        for label in range(3):
            assert 1 <= held[label] < total[label]
            assert held[label] in {1, total[label] - 1} or abs(held[label] - holdout * total[label]) <= 0.5
    for shards in plan.splits.values():
        sizes = [len(shard) for shard in shards]
        assert max(sizes) <= samples_per_shard and max(sizes) - min(sizes) <= 1
    keys = [shard.key(i) for shards in plan.splits.values() for shard in shards for i in range(len(shard))]
    assert len(set(keys)) == len(labels)


def test_shards_mix_the_classes():
    labels = [0] * 500 + [1] * 500  # sorted by class, as folders are
    plan = make_plan(array_source(labels), PackRequest(samples_per_shard=100))
    for shard in plan.splits["train"]:
        # 100 drawn from 500 + 500: 50 expected, standard deviation 4.7; 5 of them
        assert abs(int(shard.labels.sum()) - 50) <= 24


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text(), st.integers(0, 10**10))
def test_keys_are_safe_for_tar_webdataset_and_dali(name: str, stem: str, number: int):
    key = sample_key(name, f"folder/{stem}.jpg", number)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", key)
    assert base_plus_ext(f"{key}.webp") == (key, "webp")
    assert len(f"{key}.jpeg") <= 100  # the name field of ustar
    assert key.endswith(f"_{number:07d}")


@settings(max_examples=80, deadline=None)
@given(
    image_bytes=st.lists(st.integers(0, 5_000), min_size=2, max_size=50),
    size=st.integers(1, 60_000),
    seed=st.integers(0, 9),
)
def test_shards_by_bytes_hold_each_image_once_and_no_more_than_an_image_too_much(
    image_bytes: list[int], size: int, seed: int
):
    source = array_source([0] * len(image_bytes))
    sizes = np.array(image_bytes)
    vars(source.splits["train"].files)["sizes"] = sizes  # of a frozen dataclass
    plan = make_plan(source, PackRequest(shard_size_bytes=size, seed=seed))
    assert sorted(index for index, _ in planned(plan, "train")) == list(range(len(sizes)))
    largest = int(tar_bytes(sizes).max())
    end = 10_240 + 1024  # what a tar ends with, at most
    tars = [int(tar_bytes(sizes[shard.numbers]).sum()) for shard in plan.splits["train"]]
    assert max(tars) <= max(size - end, 1) + largest
    if size > end + largest:
        assert max(tars) - min(tars) <= 2 * largest


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.sets(st.integers(0, 3), max_size=4), min_size=1, max_size=40).filter(lambda rows: any(rows)),
    chosen=st.none() | st.lists(st.sampled_from("abcd"), unique=True, min_size=1),
)
def test_several_labels_are_numbered_anew_and_images_without_a_chosen_class_left_out(
    rows: list[set[int]], chosen: list[str] | None
):
    width = max(map(len, rows))
    labels = np.array([[*sorted(row), *[-1] * (width - len(row))] for row in rows], dtype=np.int64)
    images = array_images("train", np.zeros((len(rows), 1, 1), np.uint8), labels)
    source = Source("x", tuple("abcd"), {"train": images}, kind="multi", empty_classes="report")
    names = chosen or list("abcd")
    expected = {
        i: {names.index("abcd"[label]) for label in row if "abcd"[label] in names} for i, row in enumerate(rows)
    }
    if chosen is not None:
        expected = {i: row for i, row in expected.items() if row}
    if not expected:
        with pytest.raises(UserError, match="no image is left"):
            make_plan(source, PackRequest(classes=chosen, samples_per_shard=7))
        return
    plan = make_plan(source, PackRequest(classes=chosen, samples_per_shard=7))
    found = {}
    for shard in plan.splits["train"]:
        for position, index in enumerate(shard.numbers.tolist()):
            extension, content = shard.label_member(position)
            assert extension == "json"
            found[index] = json.loads(content)["label"]
            assert found[index] == sorted(found[index])
    assert {index: set(labels) for index, labels in found.items()} == expected
    missing = set(range(len(names))) - set().union(*expected.values())
    assert bool(plan.notes) == bool(missing)
    if missing:
        assert f"{len(missing)} of {len(names)} classes" in plan.notes[0]


def test_the_space_that_is_needed_is_what_is_taken(tmp_path: Path):
    for count in (1, 30, 700):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 40, 50), dtype=np.uint8)
        images = array_images("x", pixels, np.zeros(count, dtype=np.int64))
        plan = make_plan(Source("x", ("a",), {"train": images}), PackRequest())
        write_shard(plan.shards[0], tmp_path / f"{count}.tar", pixel_limit=PACKED_LIMIT)
        taken = sum((tmp_path / f"{count}.{kind}").stat().st_size for kind in ("tar", "idx"))
        assert 0.85 * taken - 20_000 <= needed_bytes(plan.shards, most_image_bytes=None) <= 1.1 * taken + 20_000
        assert needed_bytes(plan.shards, most_image_bytes=100) < needed_bytes(plan.shards, most_image_bytes=None)
