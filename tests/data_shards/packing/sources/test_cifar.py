"""CIFAR: the images, labels and order of torchvision, from both versions; only the published pickles are opened."""

import hashlib
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, cifar

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import arrays as ours
from tests.data_shards.packing.sources.layouts import binary, cifar10, cifar100, write_files, write_tar
from tests.data_shards.packing.sources.opening import opened

SETS = {"cifar-10": (cifar10, CIFAR10), "cifar-100": (cifar100, CIFAR100)}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the small sets of these tests for the published ones."""

    class Everything:
        def __contains__(self, md5: str) -> bool:
            return len(md5) == 32

    monkeypatch.setattr(ours, "_published_md5", Everything)


def test_the_published_digests_are_known():
    assert len(ours._published_md5()) == 10
    assert {"c99cafc152244af753f735de768cd75f", "16019d7e3df5f24257cddd939b257f8d"} <= ours._published_md5()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("version", SETS)
def test_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str):
    make, theirs = SETS[version]
    files = make()
    write_files(tmp_path, files)
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    source = opened(write_tar(tmp_path / f"{version}-python.tar.gz", files))
    assert list(source.splits) == ["train", "val"]
    for split, is_train in (("train", True), ("val", False)):
        expected = theirs(str(tmp_path), train=is_train)
        images = source.splits[split]  # type: ignore[index]
        assert list(source.classes) == expected.classes and len(images) == len(expected) > 0
        for i in range(len(images)):
            pixels, label = expected[i]
            assert label == images.labels[i]
            np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(images.read(i)))), np.asarray(pixels))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("version", SETS)
def test_every_form_of_it_is_the_same_set(tmp_path: Path, version: str):
    make, _ = SETS[version]
    files = make()
    expected = opened(write_tar(tmp_path / "x" / f"{version}-python.tar.gz", files)).fingerprint()
    paths = [
        write_tar(tmp_path / f"{version}-binary.tar.gz", binary(files)),
        write_tar(tmp_path / "renamed.tar", files),
        tmp_path / "x",  # the folder that holds the archive
        write_files(tmp_path / "unpacked-here", files),
        write_files(tmp_path / "binary", binary(files)) / next(iter(binary(files))).partition("/")[0],
    ]
    assert [opened(path).fingerprint() for path in paths] == [expected] * len(paths)


@pytest.mark.usefixtures("known")
def test_superclasses(tmp_path: Path):
    files = cifar100()
    for made in (files, binary(files)):
        source = opened(
            write_tar(tmp_path / f"{len(made)}{'b' if made is not files else ''}.tar", made), cifar_labels="coarse"
        )
        assert source.classes == tuple(f"coarse{i}" for i in range(20))
        expected = pickle.loads(files["cifar-100-python/train"], encoding="bytes")[b"coarse_labels"]
        assert source.splits["train"].labels.tolist() == expected
    with pytest.raises(UserError, match="--superclasses"):
        opened(write_tar(tmp_path / "ten.tar", cifar10()), cifar_labels="coarse")


@pytest.mark.parametrize("part", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_missing_part_is_named(tmp_path: Path, part: str):
    files = cifar10()
    del files[f"cifar-10-batches-py/{part}"]
    with pytest.raises(UserError, match=f"{part} is missing"):
        opened(write_tar(tmp_path / "cifar-10-python.tar.gz", files))
    with pytest.raises(UserError, match=f"{part} is missing"):
        opened(write_files(tmp_path / "folder", files))


def test_two_sets_in_one_folder_are_not_guessed(tmp_path: Path):
    write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10())
    write_tar(tmp_path / "cifar-100-python.tar.gz", cifar100())
    with pytest.raises(UserError, match="give one of them"):
        opened(tmp_path)


class Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("part", ["data_batch_2", "batches.meta"])
def test_a_pickle_that_is_not_published_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    marker, files = tmp_path / "ran", cifar10()
    genuine = {hashlib.md5(data).hexdigest() for data in files.values()}
    monkeypatch.setattr(ours, "_published_md5", lambda: genuine)
    assert opened(write_tar(tmp_path / "whole/cifar-10-python.tar.gz", files)).classes[0] == "airplane"
    files[f"cifar-10-batches-py/{part}"] = pickle.dumps({b"data": [Evil(str(marker))]}, protocol=2)
    with pytest.raises(UserError, match=rf"{part} is not the published file, .* not opened") as caught:
        opened(write_tar(tmp_path / "cifar-10-python.tar.gz", files))
    assert not marker.exists() and "\n" not in str(caught.value)
    pickle.loads(files[f"cifar-10-batches-py/{part}"])  # the control
    assert marker.exists()


def test_a_binary_file_that_is_cut_short(tmp_path: Path):
    files = binary(cifar10())
    files["cifar-10-batches-bin/data_batch_1.bin"] = files["cifar-10-batches-bin/data_batch_1.bin"][:-1]
    with pytest.raises(UserError, match=r"data_batch_1\.bin.*not a whole number of images"):
        opened(write_tar(tmp_path / "cifar-10-binary.tar.gz", files))


def test_folders_with_the_names_of_its_files_are_not_it(tmp_path: Path):
    for folder in ("train", "test", "meta"):
        (tmp_path / "set" / folder / "cat").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "set" / folder / "cat" / "0.png")
    with pytest.raises(UserError, match="meta lies beside"):  # a folder of class folders: data_batch_1 is no help
        opened(tmp_path / "set")
