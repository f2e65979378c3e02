"""The shard doctor: every damage that is done to a sound set is found, named and counted, and nothing else is."""

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.checking.page import as_json, as_text
from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.shards.tar_index import index_path
from shardvit.data_shards.store.store import Store
from tests.data_shards.checking.doctored import (
    CLASSES,
    by_kind,
    encoded,
    exchange,
    flip,
    image_place,
    looked_at,
    members,
    only,
    overwrite,
    tars,
)


def test_a_sound_set_has_nothing_to_report(sound: Path):
    result = looked_at(sound, decode=True)
    assert result.findings == () and result.exit_code == 0
    train, val = result.splits
    assert (train.split, train.samples, train.samples_stated, train.shards) == ("train", 36, 36, 4)
    assert (val.split, val.samples, val.shards) == ("val", 12, 2)
    assert train.classes == dict.fromkeys(CLASSES, 12)
    assert train.bytes == sum(tar.stat().st_size for tar in tars(sound / "train"))
    assert train.samples_per_shard is not None and (train.samples_per_shard.min, train.samples_per_shard.max) == (9, 9)
    assert train.formats == {"JPEG": 27, "PNG": 9}
    assert train.height is not None and train.width is not None
    assert (train.height.min, train.height.max, train.width.median) == (24, 24, 32)
    sizes = [len(encoded(number, image_format="PNG" if number % 4 == 0 else "JPEG")) for number in range(36)]
    assert train.bytes_per_image is not None
    assert (train.bytes_per_image.min, train.bytes_per_image.max) == (min(sizes), max(sizes))
    assert train.decode_ms is not None and train.decode_ms > 0


def test_without_decode_nothing_is_said_of_pixels(sound: Path):
    result = looked_at(sound / "train")
    assert result.findings == () and [split.split for split in result.splits] == ["train"]
    assert result.splits[0].height is result.splits[0].decode_ms is None


def test_processes_find_what_one_finds(shards: Path):
    """However the samples are divided among them."""
    (first, second, *_) = tars(shards / "train")
    os.truncate(first, first.stat().st_size // 2)
    _, offset, size = image_place(second, 4)
    overwrite(second, offset, bytes(size))
    alone = looked_at(shards, decode=True)
    together = looked_at(shards, decode=True, engine=local_engine(2))
    assert alone.findings and alone.findings == together.findings
    for one, other in zip(alone.splits, together.splits, strict=True):
        assert one.classes == other.classes and one.height == other.height


# Damaged shards.


def test_a_flipped_bit_is_found_by_the_digest_alone(shards: Path):
    tar = tars(shards / "train")[2]
    _, offset, size = image_place(tar, 1)
    flip(tar, offset + size - 40)
    found = only(looked_at(shards), "digest")
    assert found.severity == "problem" and [place.shard for place in found.places] == [tar.name]
    assert looked_at(shards, digests=False).findings == ()


def test_a_truncated_tar_loses_what_is_behind_and_is_told_once(shards: Path):
    tar = tars(shards / "train")[1]
    _, offset, _ = image_place(tar, 5)
    os.truncate(tar, offset + 3)
    result = looked_at(shards)
    found = only(result, "damaged-shard")
    assert found.places[0].shard == tar.name
    for words in ("bytes where the manifest says", f"at byte {offset + 3}", "4 samples are lost"):
        assert words in found.places[0].detail
    assert result.splits[0].samples == 32 and result.splits[0].samples_stated == 36
    assert "36 are stated" in as_text(result)


@pytest.mark.parametrize("has_index", [True, False])
def test_behind_a_damaged_header_the_index_knows_more(shards: Path, has_index: bool):
    tar = tars(shards / "train")[0]
    _, offset, _ = image_place(tar, 5)
    overwrite(tar, offset - 512, b"\xff" * 100)
    if not has_index:
        index_path(tar).unlink()
    result = looked_at(shards)
    found = only(result, "damaged-shard")
    assert ("4 samples are lost" in found.places[0].detail) != has_index
    assert result.splits[0].samples == (36 if has_index else 32)


def test_swapped_and_spoilt_indexes(shards: Path):
    first, second, third, _ = tars(shards / "train")
    content = index_path(first).read_bytes()
    index_path(first).write_bytes(index_path(second).read_bytes())
    index_path(second).write_bytes(content)
    index_path(third).write_text("nonsense\n")
    result = looked_at(shards)
    found = only(result, "index")
    assert [place.shard for place in found.places] == [first.name, second.name, third.name]
    assert ".idx" in found.remedy and "delete" in found.remedy
    for tar in (first, second, third):
        index_path(tar).unlink()
    assert looked_at(shards).findings == ()  # as the remedy promises
    assert result.splits[0].samples == 36  # and all were looked at meanwhile


def test_missing_and_extra_tars(shards: Path):
    first, second, *_ = tars(shards / "train")
    shutil.copy(second, second.with_name("backup.tar"))
    first.unlink()
    found = by_kind(looked_at(shards))
    assert set(found) == {"missing-shard", "extra-tar"}
    assert found["missing-shard"].places[0] == (first.name, "", "9 samples are lost")
    assert found["extra-tar"].severity == "warning" and found["extra-tar"].places[0].shard == "backup.tar"


def test_all_tars_missing(shards: Path):
    for tar in tars(shards / "train"):
        tar.unlink()
    result = looked_at(shards / "train", decode=True)
    assert only(result, "missing-shard").count == 4
    assert "4 shards of the manifest missing" in as_text(result) and as_json(result)["splits"][0]["samples"] == 0


def a_sample_less(tar: Path) -> None:
    lines = index_path(tar).read_text().splitlines()
    index_path(tar).write_text("\n".join(["v1.2 8", *lines[1:-1]]) + "\n")


def a_folder(tar: Path) -> None:
    tar.unlink()
    tar.mkdir()


@pytest.mark.parametrize(
    ("damage", "kind", "reason", "samples"),
    [
        (a_sample_less, "index", "lists 8 samples, the tar's headers 9", 36),
        (a_folder, "damaged-shard", "Is a directory", 27),
        (lambda tar: tar.write_bytes(b"<html>503</html>".ljust(tar.stat().st_size)), "damaged-shard", "byte 0", 27),
        (lambda tar: exchange(tar, members(tar)[:-2]), "sample-count", "8 where 9 are stated", 35),
    ],
)
def test_a_damaged_shard_is_told_once_and_the_others_are_checked(
    shards: Path, damage: Callable[[Path], object], kind: str, reason: str, samples: int
):
    tar = tars(shards / "train")[0]
    damage(tar)
    result = looked_at(shards)
    (place,) = only(result, kind).places
    assert place.shard == tar.name and reason in place.detail and result.splits[0].samples == samples


def test_a_broken_manifest_does_not_keep_the_other_split_from_being_checked(shards: Path):
    (shards / "train" / "manifest.json").write_text("{")
    result = looked_at(shards, world_size=4)
    found = only(result, "unusable-set")
    assert found.split == "train" and "manifest.json" in found.places[0].detail
    assert [split.split for split in result.splits] == ["val"] and result.exit_code == 1
    assert result.fitness is None  # held-out images have none


def test_a_lost_manifest_is_missed_where_the_other_split_has_one(shards: Path):
    (shards / "val" / "manifest.json").unlink()
    found = only(looked_at(shards), "unusable-set")
    assert found.split == "val" and "there is no manifest.json" in found.places[0].detail


class KillingStore(Store):
    """Opening the first shard ends the process, as a crash of a decoder does."""

    def open_file(self, entry: ShardEntry) -> int:
        if entry.name.endswith("000000.tar"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open_file(entry)


def test_a_crash_is_pinned_to_its_shard(shards: Path):
    result = looked_at(shards / "train", store=KillingStore(), engine=local_engine(2))
    found = only(result, "crashed-check")
    assert {place.shard for place in found.places} == {tars(shards / "train")[0].name}
    assert result.splits[0].samples == 27


def test_where_no_process_can_be_started_it_is_done_without(shards: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object) -> Any:
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken)
    result = looked_at(shards, decode=True, engine=local_engine(2))
    assert result.findings == () and result.splits[0].samples == 36
