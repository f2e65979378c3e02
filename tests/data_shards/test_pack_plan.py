"""The plan of a packing: every image once, stratified, in even shards that mix the classes, under safe keys."""

import re
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_shards.pack_plan import PackPlan, make_plan, sample_key
from data_shards.sources import Source
from data_shards.sources.base import ArrayImages


def array_source(labels: list[int]) -> Source:
    images = ArrayImages("train", np.zeros((len(labels), 1, 1), np.uint8), np.array(labels, np.int64))
    return Source("x", "x", tuple("abc"[: max(labels) + 1]), {"train": images})


def planned(plan: PackPlan, split: str) -> list[tuple[int, int]]:
    shards = plan.splits.get(split, [])  # type: ignore[call-overload]
    return [pair for shard in shards for pair in zip(shard.indices.tolist(), shard.labels.tolist(), strict=True)]


@settings(max_examples=60)
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
    plan = make_plan(source, classes=None, holdout=holdout, samples_per_shard=samples_per_shard, seed=seed)
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
    plan = make_plan(array_source(labels), classes=None, holdout=None, samples_per_shard=100, seed=0)
    for shard in plan.splits["train"]:
        # 100 drawn from 500 + 500: 50 expected, standard deviation 4.7; 5 of them
        assert abs(int(shard.labels.sum()) - 50) <= 24


@given(st.text(), st.text(), st.integers(0, 10**10))
def test_keys_are_safe_for_tar_webdataset_and_dali(name: str, stem: str, number: int):
    from webdataset.tariterators import base_plus_ext

    key = sample_key(name, f"folder/{stem}.jpg", number)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", key)
    assert base_plus_ext(f"{key}.webp") == (key, "webp")
    assert len(f"{key}.jpeg") <= 100  # the name field of ustar
    assert key.endswith(f"_{number:07d}")
