"""A model's classes and the shards' are matched by name, in any order; ReaL and ImageNet-v2 by ImageNet's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.data.real_labels import RealLabelsImagenet

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.shards.shard_set import ShardSet, ShardTable
from shardvit.pipeline.evaluation.truth import Truth, find_truth, real_labels, usual_classes, wordnet_numbers

NUMBERS = tuple(map(str, range(1000)))


def shards(*classes: str) -> ShardSet:
    return ShardSet("name", "SOURCE", "val", classes, shards=ShardTable.of_entries(()), digest="")


def truth(model: tuple[str, ...], *classes: str, **options: Any) -> Truth:
    return find_truth(
        model, shards(*classes), **{"label_set": "shards", "matching": "names", "among": "model", **options}
    )


def batch(*keys: str) -> Batch:
    count = len(keys)
    zeros = torch.zeros(count, dtype=torch.int64)
    return Batch(
        images=torch.zeros(count, 1, 1, 3, dtype=torch.uint8),
        mirrored=zeros.bool(),
        labels=zeros,
        counted=torch.ones(count, dtype=torch.bool),
        substituted=zeros.bool(),
        samples=torch.arange(count),
        epochs=zeros,
        keys=keys,
    )


def test_classes_in_another_order_and_a_part_of_them_are_matched_by_name():
    assert truth(("a", "b", "c"), "c", "a").labels == (2, 0)
    assert truth(("a", "b", "c"), "c", "a").classes == ("a", "b", "c")
    among = truth(("a", "b", "c"), "c", "a", among="shards")
    assert (among.classes, among.columns, among.labels) == (("c", "a"), (2, 0), (0, 1))
    several = replace(batch("x"), labels=torch.tensor([[1, -1, 0]]))
    relabelled = truth(("a", "b", "c"), "c", "a").relabelled(several)
    assert relabelled.labels.tolist() == [[0, -1, 2]]


@pytest.mark.parametrize(
    ("model", "classes", "options", "names"),
    [
        (("a", "b"), ("a", "x"), {}, "x.*--classes index"),
        (("a", "a", "b"), ("a", "b"), {}, "--classes index"),
        (("a",), ("x", "y"), {"matching": "index"}, "--classes index"),
        (("a", "b"), ("a", "b"), {"label_set": "real"}, "--labels real"),
        (NUMBERS, ("a", "b"), {"label_set": "imagenet_v2"}, "--labels imagenet_v2"),
        (NUMBERS, NUMBERS, {"label_set": "real", "matching": "index"}, "--classes index"),
        (NUMBERS, NUMBERS, {"label_set": "real", "among": "shards"}, "--among shards"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(model: Any, classes: Any, options: Any, names: str):
    with pytest.raises(UserError, match=names):
        truth(model, *classes, **options)


def test_the_order_is_trusted_when_asked():
    assert truth(("a", "b", "c"), "x", "y", matching="index").labels == (0, 1)


def test_imagenets_classes_are_told_by_wordnets_numbers_or_their_usual_order():
    numbers = wordnet_numbers()
    assert len(numbers) == 1000 and list(numbers) == sorted(numbers)
    assert usual_classes(NUMBERS) == list(range(1000)) and usual_classes(numbers[5:2:-1]) == [5, 4, 3]
    assert usual_classes(NUMBERS[:999]) is None and usual_classes(("cat", "dog")) is None
    assert truth(NUMBERS, numbers[7], numbers[3]).labels == (7, 3)
    backwards = tuple(reversed(numbers))
    assert truth(backwards, *NUMBERS).labels == tuple(range(999, -1, -1))


def test_the_folders_of_imagenet_v2_are_numbers_however_they_are_sorted():
    found = truth(NUMBERS, *sorted(NUMBERS), label_set="imagenet_v2")
    assert [NUMBERS[each] for each in found.labels] == sorted(NUMBERS)
    backwards = tuple(reversed(wordnet_numbers()))
    assert truth(backwards, "10", "2", label_set="imagenet_v2").labels == (989, 997)


def test_real_labels_are_timms_and_an_image_without_any_does_not_count():
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    theirs = RealLabelsImagenet(names).real_labels
    assert all(list(real_labels(f"n01440764/{name}") or ()) == theirs[name] for name in names[::97])
    assert real_labels("ILSVRC2012_val_00050001") is None is real_labels("photo")
    without = next(name for name in names if not theirs[name])
    several = next(name for name in names if len(theirs[name]) > 1)
    found = truth(NUMBERS, "x", label_set="real")
    relabelled = found.relabelled(batch(without, several))
    assert found.label_kind == "multi" and relabelled.counted.tolist() == [False, True]
    assert sorted(relabelled.labels[1].tolist()) == sorted(theirs[several])
    with pytest.raises(UserError, match=r"--labels real: .*'photo'"):
        found.relabelled(batch("photo"))
