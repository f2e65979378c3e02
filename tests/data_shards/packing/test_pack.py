"""Packing: every image once, unchanged, in tars that other readers read; and nothing at all on bad input."""

import hashlib
import re
import tarfile
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.packing import pack as pack_module
from shardvit.data_shards.packing.image import prepare_image
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import read_manifest
from tests.data_shards.packing.folders import by_index, by_webdataset, encoded, quiet, tree, write_folder


def test_round_trip_through_index_and_webdataset(tmp_path: Path):
    owner = write_folder(tmp_path / "in", {"cat": 7, "hot dog": 5})
    lines: list[str] = []
    result = pack(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5, report=lines.append)
    assert result.val is None and not result.compared and not (tmp_path / "out/val").exists()
    manifest = read_manifest(tmp_path / "out/train")
    assert manifest == result.train and manifest.classes == ("cat", "hot dog")
    samples = by_index(manifest)
    assert samples == by_webdataset(manifest)
    assert {image: manifest.classes[label] for _, image, label in samples} == owner
    assert len(samples) == result.num_images == 12
    assert [shard.num_samples for shard in manifest.shards] == [4, 4, 4]
    for shard, path in zip(manifest.shards, manifest.shard_paths, strict=True):
        assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        with tarfile.open(path) as tar:  # fixed, else equal requests give equal bytes only within one second
            assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o444)}
    keys = [key for key, _, _ in samples]
    assert len(set(keys)) == 12 and all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", key) for key in keys)
    # number 8 of the listing: seven cats, then the second hot dog ("im. 1.jpeg" sorts behind "im. 0.png")
    assert "cat_im-0_0000000" in keys and "hot-dog_im-1_0000008" in keys
    text = "\n".join(lines)
    assert "12 images of 2 classes" in text and re.search(r"train +12 images +3 shards", text)
    assert "duplicates: none" in text and "unreadable: none" in text
    assert lines[-1] == f"Next: shardvit check {tmp_path / 'out'}"


def test_timm_reads_the_same_samples(tmp_path: Path):
    reader = pytest.importorskip("timm.data.readers.reader_wds")
    write_folder(tmp_path / "in", {"cat": 7, "dog": 9})
    result = quiet(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=4, holdout=0.25)
    for manifest in result.manifests:
        timm_reader = reader.ReaderWds(root=str(tmp_path / "out"), split=manifest.split)
        assert len(timm_reader) == manifest.num_samples
        timm_reader.set_loader_cfg(num_workers=1)
        labels = [label for _, label, *_ in timm_reader]
        assert labels == [label for _, _, label in by_index(manifest)]


def test_equal_requests_give_equal_bytes_and_another_seed_another_order(tmp_path: Path):
    write_folder(tmp_path / "in", {"cat": 9, "dog": 9})
    spec = str(tmp_path / "in")
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        quiet(spec, tmp_path / out, samples_per_shard=4, holdout=0.3, seed=seed)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    first, other = (read_manifest(tmp_path / out / "train") for out in ("a", "c"))
    assert first.digest != other.digest
    assert [key for key, _, _ in by_index(first)] != [key for key, _, _ in by_index(other)]


def test_number_of_threads_does_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path / "in", {"cat": 20, "dog": 20})
    trees = []
    for cores in (1, 7):
        monkeypatch.setattr(pack_module, "num_cores", lambda cores=cores: cores)
        quiet(str(tmp_path / "in"), tmp_path / f"out{cores}", samples_per_shard=6)
        trees.append(tree(tmp_path / f"out{cores}"))
    assert trees[0] == trees[1]


def test_classes_choose_and_number_and_keep_keys_and_holdout(tmp_path: Path):
    owner = write_folder(tmp_path / "in", {"a": 8, "b": 8, "c": 8})
    spec = str(tmp_path / "in")
    whole = quiet(spec, tmp_path / "all", holdout=0.25)
    part = quiet(spec, tmp_path / "part", holdout=0.25, classes=["c", "a"])
    assert part.train.classes == ("c", "a")
    for some, all_ in zip(part.manifests, whole.manifests, strict=True):
        samples = by_index(some)
        assert {owner[image] for _, image, _ in samples} == {"a", "c"}
        assert all(some.classes[label] == owner[image] for _, image, label in samples)
        expected = {(key, image) for key, image, label in by_index(all_) if all_.classes[label] != "b"}
        assert {(key, image) for key, image, _ in samples} == expected


# ---- images


@pytest.mark.parametrize(
    ("format", "mode", "extension"),
    [
        ("JPEG", "RGB", "jpg"),
        ("JPEG", "CMYK", "jpg"),
        ("JPEG", "L", "jpg"),
        ("PNG", "RGBA", "png"),
        ("WEBP", "RGB", "webp"),
        ("BMP", "RGB", "bmp"),
        ("GIF", "P", "gif"),
        ("TIFF", "RGB", "tif"),
        ("PPM", "RGB", "ppm"),
    ],
)
def test_the_bytes_decide_the_extension(format: str, mode: str, extension: str):
    assert prepare_image(encoded(1, format, mode)).extension == extension


@pytest.mark.parametrize("data", [b"", b"text", encoded(1)[:-30], encoded(1, "JPEG")[:200]])
def test_broken_images_are_noticed(data: bytes):
    with pytest.raises(UnreadableImage):
        prepare_image(data)
