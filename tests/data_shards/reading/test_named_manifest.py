"""A manifest as a location, and manifests that count some samples of their tars: everything reads those, once each."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardvit.data_shards.checking.check import check
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import open_shards, splits_below
from shardvit.data_shards.reading.shard_reader import RawSample, ShardReader
from shardvit.data_shards.reading.streaming import as_webdataset
from shardvit.data_shards.shards.holdout import shared_images
from shardvit.data_shards.shards.manifest import Manifest, read_manifest, split_manifest
from shardvit.data_shards.shards.row_bitmap import pack_rows
from shardvit.data_shards.shards.shard_set import Portion, ShardSet, ShardsSpec
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK
from tests.data_shards.small_set import by_webdataset, pack_small
from tests.data_shards.written import write_manifest


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """30 images in 6 shards, and `manifest-odd.json`: those of odd places, but none of the second shard."""
    manifest = pack_small(tmp_path_factory.mktemp("small"))
    shards = [
        replace(shard, num_samples=2, rows=pack_rows(np.array([False, True, False, True, False])))
        for at, shard in enumerate(manifest.shards)
        if at != 1
    ]
    write_manifest(replace(manifest, shards=tuple(shards), where="odd", parent="0" * 32), file="manifest-odd.json")
    return manifest


def chosen(manifest: Manifest) -> list[RawSample]:
    """By an independent reader."""
    every = by_webdataset(manifest)
    return [sample for at, sample in enumerate(every) if at // 5 != 1 and at % 5 in (1, 3)]


def samples(shards: ShardSet, store: Store | None = None) -> list[RawSample]:
    reader = ShardReader(shards, store=store)
    places = [(shard, row) for shard, size in enumerate(shards.shard_sizes) for row in range(size)]
    found = [reader.read(shard, row=row) for shard, row in places]
    reader.close()
    return found


def test_its_samples_are_those_that_count_in_order(packed: Manifest):
    opened = open_shards(str(packed.root / "manifest-odd.json"))
    assert opened.num_samples == 10 and opened.shard_sizes == (2,) * 5
    assert samples(opened) == chosen(packed)
    assert opened.source.endswith("train/manifest-odd.json") and opened.digest != packed.digest
    assert opened.shards[0].name == str(packed.root / packed.shards[0].file)
    again = read_manifest(packed.root / "manifest-odd.json")
    assert (again.where, again.parent, again.digest) == ("odd", "0" * 32, opened.digest)


def test_the_folder_and_its_own_manifest_are_the_same_set(packed: Manifest):
    by_folder, by_file = (open_shards(str(packed.root / file)) for file in ("", "manifest.json"))
    assert by_folder == replace(by_file, source=by_folder.source) and by_folder.digest == packed.digest


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_part_of_it_and_the_rest_have_each_sample_once(packed: Manifest, share: float):
    place = str(packed.root / "manifest-odd.json")
    held_out, rest = (
        open_shards(ShardsSpec(place, portion=Portion(part, hold_out=share))) for part in ("held_out", "rest")
    )
    assert held_out.num_samples == round(10 * share) and shared_images(held_out, rest) == 0
    assert sorted(samples(held_out) + samples(rest)) == sorted(chosen(packed))
    whole = open_shards(str(packed.root))
    assert shared_images(held_out, whole) == shared_images(whole, held_out) == held_out.num_samples


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_images_are_shared_whatever_the_shards_number_in_each_set(packed: Manifest, tmp_path: Path, share: float):
    """Of the same tars as the first, second, ... of other sets, other images are held out."""
    shutil.copytree(packed.root, folder := tmp_path / "train")
    fewer = replace(read_manifest(folder), shards=packed.shards[1:])
    write_manifest(fewer, file="manifest-fewer.json")
    rest = open_shards(ShardsSpec(str(folder), portion=Portion("rest", hold_out=share)))
    held_out = open_shards(ShardsSpec(str(folder / "manifest-fewer.json"), portion=Portion("held_out", hold_out=share)))
    both = {each.image for each in samples(rest)} & {each.image for each in samples(held_out)}
    assert shared_images(rest, held_out) == shared_images(held_out, rest) == len(both) > 0


def test_webdataset_gets_the_same_samples(packed: Manifest):
    def read(location: object) -> list[str]:
        return [sample["__key__"] for sample in as_webdataset(location)]  # pyright: ignore[reportArgumentType]

    place = str(packed.root / "manifest-odd.json")
    assert read(place) == [sample.key for sample in chosen(packed)]
    part = open_shards(ShardsSpec(place, portion=Portion("rest", hold_out=0.5)))
    assert read(part) == [sample.key for sample in samples(part)]
    twice = as_webdataset(place, shard_numbers=[0, 0, 2])
    keys = [sample["__key__"] for sample in twice]
    assert keys[:2] == keys[2:4] == read(place)[:2] and keys[4:] == read(place)[4:6]


def test_from_a_server(packed: Manifest, server: FaultServer, tmp_path: Path):
    server.files = {f"/set/train/{path.name}": path.read_bytes() for path in packed.root.iterdir()}
    store = Store(CacheConfig(tmp_path / "cache", 10**9), retry=QUICK)
    place = f"{server.url}/set/train/manifest-odd.json"
    assert splits_below(place, store=store) == {}
    opened = open_shards(f"{place}?token=secret", store=store)
    assert samples(opened, store) == chosen(packed)
    assert opened.source == place and opened.shards[0].url.endswith(".tar?token=secret")
    assert [each["__key__"] for each in as_webdataset(place, store=store)] == [each.key for each in chosen(packed)]
    with pytest.raises(UserError, match=r"manifest-none\.json"):
        open_shards(f"{server.url}/set/train/manifest-none.json", store=store)


def test_check_counts_only_its_samples_and_reads_their_tars_whole(packed: Manifest, tmp_path: Path):
    shutil.copytree(packed.root, folder := tmp_path / "train")
    place = ShardsSpec(str(folder / "manifest-odd.json"))
    clean = check(place, report=lambda line: None)
    (split,) = clean.splits
    assert (split.samples, split.samples_stated, split.split) == (10, 10, "train")
    assert sum(split.classes.values()) == 10 and clean.exit_code == 0, clean.findings
    tar = folder / packed.shards[2].file
    tar.write_bytes(tar.read_bytes()[:-12_000])
    damaged = check(place, report=lambda line: None)
    assert damaged.exit_code == 1 and damaged.splits[0].samples < 10


def test_an_earlier_manifest_is_opened_by_its_digest(packed: Manifest, tmp_path: Path):
    shutil.copytree(packed.root, folder := tmp_path / "train")
    before = open_shards(str(folder))
    manifest = read_manifest(folder)
    write_manifest(manifest, file=f"manifest-{manifest.digest}.json")
    write_manifest(replace(manifest, shards=manifest.shards[:4]))
    lines: list[str] = []
    assert open_shards(str(folder)).num_samples == 20
    again = open_shards(ShardsSpec(str(folder), digest=before.digest), report=lines.append)
    assert (again.digest, again.shard_sizes) == (before.digest, before.shard_sizes) and len(lines) == 1
    assert before.digest in lines[0]
    other = open_shards(ShardsSpec(str(folder), digest="f" * 32), report=lines.append)  # not kept: what there is
    assert other.num_samples == 20 and len(lines) == 2 and "f" * 32 in lines[1]


@pytest.mark.parametrize(
    ("rows", "number"), [("5:UA==", 3), ("5:UQ==", 2), ("5:////", 2), ("rm -rf", 2), ("5:UA==", -2)]
)
def test_rows_that_contradict_themselves_are_refused(packed: Manifest, tmp_path: Path, rows: str, number: int):
    shutil.copytree(packed.root, folder := tmp_path / "train")
    file = folder / "manifest-odd.json"
    content = json.loads(file.read_text())
    content["shards"][0] |= {"rows": rows, "num_samples": number}
    content["num_samples"] += number - 2
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest-odd.json: '(rows|num_samples)'"):
        open_shards(str(file))


def test_a_tar_with_another_number_of_samples_is_refused(packed: Manifest, tmp_path: Path):
    shutil.copytree(packed.root, folder := tmp_path / "train")
    file = folder / "manifest-odd.json"
    content = json.loads(file.read_text())
    content["shards"][0]["rows"] = pack_rows(np.array([False, True, False, True, False, False]))
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lists 5 samples, manifest.*6"):
        samples(open_shards(str(file)))


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("a/train", ("a/train", "manifest.json")),
        ("a/manifest-x.json", ("a", "manifest-x.json")),
        ("manifest-x.y_z.json", (".", "manifest-x.y_z.json")),
        ("s3://b/manifest-x.json", ("s3://b", "manifest-x.json")),
        ("http://h/a/manifest.json?v=1", ("http://h/a?v=1", "manifest.json")),
        ("http://h/a/manifests.json", ("http://h/a/manifests.json", "manifest.json")),
        ("http://h/a?f=/manifest.json", ("http://h/a?f=/manifest.json", "manifest.json")),
        ("a/manifest-ä.json", ("a/manifest-ä.json", "manifest.json")),
    ],
)
def test_a_location_is_a_folder_and_a_manifest(location: str, expected: tuple[str, str]):
    assert split_manifest(location) == expected
