"""A look at a set: what is counted is what is there, few bytes are read for it, and damage is named."""

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.overview import Overview, inspect_shards
from shardvit.data_shards.reading.shard_reader import RawSample
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.shards.tar_index import index_path, read_index
from shardvit.data_shards.store.store import Store
from tests.data_shards.external_tars import by_shard_writer, opened, png
from tests.data_shards.http_server import FaultServer
from tests.data_shards.small_set import by_webdataset, pack_small


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return pack_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def samples(manifest: Manifest) -> list[RawSample]:
    """All samples, as webdataset reads them."""
    return by_webdataset(manifest)


def look(manifest: Manifest, **options: Any) -> Overview:
    return inspect_shards(open_shards(str(manifest.root)), **{"images": 12, **options})


def keys(seen: Overview) -> list[str]:
    return [image.key for image in seen.images]


def noise(height: int, width: int, *, seed: int = 0) -> bytes:
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_channels_to_show_are_ones_that_the_images_have(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--channels: the images are colours"):
        look(manifest, shown=(3, 2, 1))
    for number in range(4):
        path = tmp_path / "images" / f"c{number % 2}" / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.zeros((8, 8, 5), np.float32))
    pack(str(tmp_path / "images"), str(tmp_path / "out"), channels=5, report=lambda line: None)
    five = open_shards(str(tmp_path / "out" / "train"))
    assert inspect_shards(five, images=2, shown=(5, 1, 1)).shown == (5, 1, 1)
    with pytest.raises(UserError, match=r"no channel 6: .* has 5"):
        inspect_shards(five, images=2, shown=(1, 6, 2))


def test_labels_and_sizes_are_those_of_the_samples(manifest: Manifest, samples: list[RawSample]) -> None:
    seen = look(manifest)
    labels = Counter(label for sample in samples for label in sample.labels)
    assert seen.images_of_class.tolist() == [labels[label] for label in range(3)]
    assert (seen.labelled, seen.without_label, seen.opened, seen.is_whole) == (30, 0, 6, True)
    sizes = [(*Image.open(io.BytesIO(sample.image)).size[::-1], len(sample.image)) for sample in samples]
    assert seen.sizes.tolist() == [list(size) for size in sizes]
    assert seen.damaged == ()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 11, 29, 30, 99])
def test_images_are_spread_over_the_classes_and_none_comes_twice(
    manifest: Manifest, samples: list[RawSample], count: int
) -> None:
    seen = look(manifest, images=count)
    of_class = Counter(image.labels for image in seen.images)
    assert len(set(keys(seen))) == len(seen.images) == min(count, 30)
    assert max(of_class.values()) <= -(-min(count, 30) // 3)
    assert [image.labels for image in seen.images] == sorted(image.labels for image in seen.images)
    by_key = {sample.key: sample for sample in samples}
    for image in seen.images:
        whole = read_image(by_key[image.key].image)
        assert image.labels == by_key[image.key].labels
        assert np.array_equal(image.pixels, whole.pixels())
        assert (image.height, image.width) == (whole.height, whole.width)


def test_a_seed_draws_the_same_images_and_another_one_others(manifest: Manifest) -> None:
    assert keys(look(manifest)) == keys(look(manifest)) != keys(look(manifest, seed=1))
    assert len({image.shard for image in look(manifest).images}) > 3


def test_of_a_large_set_some_shards_are_looked_into(manifest: Manifest, samples: list[RawSample]) -> None:
    seen = look(manifest, most_labels=11)
    assert (seen.opened, seen.labelled, seen.is_whole) == (2, 10, False)
    shards = {image.shard for image in seen.images}
    there = [sample for number, sample in enumerate(samples) if number // 5 in shards]
    labels = Counter(label for sample in there for label in sample.labels)
    assert seen.images_of_class.tolist() == [labels[label] for label in range(3)]
    assert look(manifest, most_labels=1).opened == 1  # never none


def test_few_bytes_are_read_of_large_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        path = tmp_path / "in" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(150, 160, seed=number))  # 72 kB of noise
    manifest = pack(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=20, report=lambda line: None).train
    read, pread = [0], os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        read[0] += size
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    seen = inspect_shards(open_shards(str(manifest.root)), images=4)
    assert len(seen.images) == 4 and len(seen.sizes) == seen.labelled == 40
    assert read[0] < 4 * 75_000 + 40 * 6_000 < manifest.num_bytes / 4
    assert seen.bytes_read < 1.2 * read[0]


def test_damage_is_named_and_passed_over(tmp_path: Path) -> None:
    manifest = pack_small(tmp_path)
    tars = sorted(manifest.root.glob("*.tar"))
    index, content = read_index(index_path(tars[0])), bytearray(tars[0].read_bytes())
    image, label = int(index.image_offset[1]), int(index.label_offset[3])
    content[image : image + 50] = bytes(50)
    content[label : label + 1] = b"9"
    tars[0].write_bytes(content)
    tars[2].unlink()
    seen = inspect_shards(open_shards(str(manifest.root), damaged="report"), images=99)
    assert {(each.shard, each.key) for each in seen.damaged} == {
        (str(tars[0]), index.keys[1]),
        (str(tars[0]), index.keys[3]),
    }
    assert len(seen.shards.damage) == 1 and str(tars[2]) in seen.shards.damage[0]
    assert len(seen.images) == 30 - 5 - 2
    assert seen.labelled == 30 - 5 - 1 == seen.images_of_class.sum()


def test_of_shards_that_are_not_local_few_are_fetched(
    manifest: Manifest, server: FaultServer, store: Store, samples: list[RawSample]
) -> None:
    server.files = {f"/{path.name}": path.read_bytes() for path in manifest.root.iterdir() if path.suffix != ".idx"}
    seen = inspect_shards(open_shards(server.url, store=store), store=store, images=6)
    fetched = [path for path, count in server.totals().items() if path.endswith(".tar") and count]
    assert len(fetched) == seen.opened == 4
    assert seen.labelled == 20 and len(seen.images) == 6
    assert {image.key for image in seen.images} <= {sample.key for sample in samples}


def test_several_labels_count_each_and_an_image_stands_for_its_rarest(tmp_path: Path) -> None:
    labels = [["a", "b"], ["a"], ["a", "c"], [], ["a", "b"]]
    folder = by_shard_writer(
        tmp_path / "tars",
        [
            {"__key__": f"{number}", "png": noise(5, 6, seed=number), "json": json.dumps({"label": each}).encode()}
            for number, each in enumerate(labels)
        ],
        per_shard=2,
    )
    shards = opened(ShardsSpec(str(folder), label="json:label", kind="multi"), index_folder=tmp_path / "indexes")
    seen = inspect_shards(shards, images=3)
    assert dict(zip(shards.classes, seen.images_of_class.tolist(), strict=True)) == {"a": 4, "b": 2, "c": 1}
    assert seen.without_label == 1
    assert len({image.labels for image in seen.images}) == 3
