"""What is appended goes on where the set ends: its classes, the numbers of its shards, and those in its keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.appending import Start, go_on
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import PackPlan, make_plan
from shardvit.data_shards.packing.sources.base import Source, array_images
from shardvit.data_shards.sets.live import LiveSet, join_manifests
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.data_shards.store.folders import LocalFolder


def manifest(split: str, classes: str, *, shards: int = 3, **more: Any) -> Manifest:
    files = tuple(Shard(f"n-{split}-{at:06d}.tar", 5, 10, f"{split}{at}") for at in range(shards))
    return Manifest(Path(split), "n", split, tuple(classes), files, "s", **more)


def live(classes: str = "bd", **more: Any) -> LiveSet:
    manifests = {split: manifest(split, classes, **more) for split in ("train", "val")}
    return LiveSet(LocalFolder(Path("n")), ({},), manifests)


def plan(classes: str, *, holdout: float | None = None) -> PackPlan:
    labels = np.repeat(np.arange(len(classes)), 6)
    source = Source("x", tuple(classes), {"train": array_images("t", np.zeros((len(labels), 1, 1), np.uint8), labels)})
    return make_plan(source, PackRequest(name="n", holdout=holdout, samples_per_shard=4))


def test_old_classes_keep_their_numbers_and_new_ones_come_behind():
    before = plan("abc", holdout=0.5)
    after = go_on(before, live(), Start(1, 100, {"train": 3, "val": 3}))
    assert after.classes == ("b", "d", "a", "c") and "a, c" in after.notes[-1]
    for old, new in zip(before.shards, after.shards, strict=True):
        names = [[shard.classes[label] for label in shard.labels.tolist()] for shard in (old, new)]
        assert names[0] == names[1]
        assert int(new.file[-10:-4]) == int(old.file[-10:-4]) + 3 and new.file[:-10] == old.file[:-10]
    keys = [[shard.key(at) for shard in each.shards for at in range(len(shard))] for each in (before, after)]
    assert [f"{key[:-7]}{int(key[-7:]) + 100:07d}" for key in keys[0]] == keys[1]
    assert not go_on(plan("bd"), live(), Start(1)).notes


def test_a_split_that_the_set_lacks_begins_at_0():
    after = go_on(plan("bd", holdout=0.5), live(), Start(1, 0, {"train": 3}))
    assert after.splits["val"][0].file == "n-val-000000.tar"


def test_labels_of_another_kind_are_refused():
    with pytest.raises(UserError, match="multi labels, those of the source single"):
        go_on(plan("bd"), live(labels=LabelSpec("json", "label", "multi")), Start(1))


def test_manifests_have_the_shards_of_both_and_every_split_all_classes():
    added = {"train": manifest("train", "bdx", shards=1, without_matches_of=("2", "3"))}
    both = join_manifests(live(without_matches_of=("1", "2")).manifests, added)
    assert [len(both[split].shards) for split in ("train", "val")] == [4, 3]
    assert {each.classes for each in both.values()} == {("b", "d", "x")}
    assert both["train"].without_matches_of == ("2",)  # all of it is without these alone
    assert set(join_manifests({"train": manifest("train", "b")}, {"train": added["train"], "val": added["train"]})) == {
        "train",
        "val",
    }
