"""A set of shards as a pipeline of webdataset: each sample once, whoever made the tars and wherever they are."""

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import RawSample
from shardvit.data_shards.reading.streaming import as_webdataset
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from tests.conftest import ROOT
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK
from tests.data_shards.small_set import by_webdataset, needs_proc, open_files, pack_small


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return pack_small(tmp_path_factory.mktemp("small"))


def read(dataset) -> list[RawSample]:
    return [
        RawSample(sample["__key__"], sample["jpg" if "jpg" in sample else "png"], (int(sample["cls"]),))
        for sample in dataset
    ]


def test_each_sample_of_a_packed_set_comes_once_in_order(manifest: Manifest):
    expected = by_webdataset(manifest)
    for shards in (manifest.root, str(manifest.root), open_shards(str(manifest.root))):
        dataset = as_webdataset(shards)
        assert read(dataset) == expected == read(dataset)
        assert read(pickle.loads(pickle.dumps(dataset))) == expected
    assert sorted(read(as_webdataset(manifest.root, shardshuffle=10, seed=1).shuffle(8))) == sorted(expected)


@needs_proc
def test_no_tar_stays_open(manifest: Manifest):
    before = open_files(manifest.root)
    assert len(read(as_webdataset(manifest.root))) == 30
    assert open_files(manifest.root) == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_share_the_shards(manifest: Manifest, num_workers: int):
    import webdataset

    data = as_webdataset(manifest.root, shardshuffle=6).shuffle(8).decode("pil").to_tuple("jpg;png", "cls", "__key__")
    loader = webdataset.WebLoader(data.batched(4, collation_fn=None), batch_size=None, num_workers=num_workers)
    samples = [sample for batch in loader for sample in batch]
    assert sorted((key, label) for _, label, key in samples) == [
        (sample.key, *sample.labels) for sample in sorted(by_webdataset(manifest))
    ]
    assert {image.mode for image, _, _ in samples} == {"RGB"}


def test_tars_without_a_manifest_and_names_that_look_like_urls(manifest: Manifest, tmp_path: Path):
    folder = tmp_path / "a#1?b"
    shutil.copytree(manifest.root, folder, ignore=shutil.ignore_patterns("*.json", "*.idx"))
    expected = by_webdataset(manifest)
    assert read(as_webdataset(folder)) == expected
    pattern = f"{folder}/{manifest.shards[0].file.removesuffix('000000.tar')}{{000001..000002}}.tar"
    assert read(as_webdataset(pattern)) == expected[5:15]
    assert read(as_webdataset(folder, shard_numbers=[3, 0])) == expected[15:20] + expected[:5]
    with pytest.raises(UserError, match="shard_numbers: there are 6"):
        as_webdataset(folder, shard_numbers=range(7))


def test_shards_from_elsewhere_come_through_the_cache(manifest: Manifest, server: FaultServer, tmp_path: Path):
    server.files = {f"/set/{path.name}": path.read_bytes() for path in manifest.root.iterdir()}
    store = Store(CacheConfig(tmp_path / "cache", 10**9), retry=QUICK)
    dataset = as_webdataset(f"{server.url}/set", store=store)
    assert read(dataset) == by_webdataset(manifest) == read(dataset)
    tars = {path: count for path, count in server.totals().items() if path.endswith(".tar")}
    assert len(tars) == 6 and set(tars.values()) == {1}


def test_the_pages_example_runs(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "your-data.md").read_text()
    (example,) = re.findall(r"```python\n([^`]*as_webdataset[^`]*)```", page, re.S)
    shutil.copytree(manifest.root, tmp_path / "shards/photos/train")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["seen"] == 30


def test_shards_from_elsewhere_are_streamed_without_a_store(manifest: Manifest):
    name = manifest.shard_paths[0]
    assert read(as_webdataset(f"pipe:cat {name}")) == by_webdataset(manifest)[:5]


def test_a_shard_that_is_not_there_is_for_the_handler(manifest: Manifest, tmp_path: Path):
    import webdataset

    folder = tmp_path / "copy"
    shutil.copytree(manifest.root, folder)
    dataset = as_webdataset(folder, handler=webdataset.ignore_and_continue)
    with pytest.raises(UserError, match="no such folder"):
        as_webdataset(tmp_path / "absent")
    (folder / manifest.shards[1].file).unlink()
    expected = by_webdataset(manifest)
    assert read(dataset) == expected[:5] + expected[10:]
    with pytest.raises(FileNotFoundError):
        read(as_webdataset(str(folder / "*.tar").replace("*", manifest.shards[1].file.removesuffix(".tar"))))
    with pytest.raises(UserError, match=manifest.shards[1].file):
        as_webdataset(folder)


def test_a_store_is_not_read_past_by_webdatasets_own_cache(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cache_dir"):
        as_webdataset("pipe:cat x.tar", store=Store(), cache_dir=str(tmp_path))
