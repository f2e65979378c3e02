"""Pets and Flowers: torchvision's images, labels and splits, from the archives and from the folders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import Flowers102, OxfordIIITPet, flowers102

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import Source
from tests.data_shards.packing.sources.layouts import flowers, jpeg, mat, pets, write_files, write_tar
from tests.data_shards.packing.sources.opening import opened, refused


def samples(source: Source, split: str) -> list[tuple[bytes, int]]:
    images = source.splits[split]  # type: ignore[index]
    return [(images.read(i), int(images.labels[i])) for i in range(len(images))]


def pets_archives(root: Path) -> Path:
    images, lists = pets()
    write_tar(root / "images.tar.gz", images)
    write_tar(root / "annotations.tar.gz", lists)
    return root


def pets_folders(root: Path) -> Path:
    for files in pets():
        write_files(root, files)
    return root


@pytest.mark.parametrize("make", [pets_archives, pets_folders])
def test_pets_as_torchvision_reads_them(tmp_path: Path, make: Callable[[Path], Path]):
    pets_folders(tmp_path / "oxford-iiit-pet")
    source = opened(make(tmp_path / "set"))
    assert list(source.splits) == ["train", "val"]
    for split, name in (("train", "trainval"), ("val", "test")):
        theirs = OxfordIIITPet(str(tmp_path), split=name)
        expected = [(path.read_bytes(), label) for path, label in zip(theirs._images, theirs._labels, strict=True)]
        assert samples(source, split) == expected
        assert [name.replace("_", " ").title() for name in source.classes] == theirs.classes
    assert source.classes == ("Abyssinian", "american_bulldog", "Birman")


def test_the_pets_are_found_by_each_of_their_files(tmp_path: Path):
    root = pets_archives(tmp_path / "set")
    expected = opened(root).fingerprint()
    assert opened(root / "images.tar.gz").fingerprint() == expected
    pets_folders(tmp_path / "torch/oxford-iiit-pet")
    assert opened(tmp_path / "torch").fingerprint() == expected


def flowers_archives(root: Path) -> Path:
    images, tables = flowers()
    write_tar(root / "102flowers.tgz", images)
    return write_files(root, tables)


def flowers_folder(root: Path) -> Path:
    for files in flowers():
        write_files(root, files)
    return root


@pytest.mark.parametrize("make", [flowers_archives, flowers_folder])
def test_flowers_as_torchvision_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
):
    monkeypatch.setattr(flowers102, "check_integrity", lambda *_: True)
    flowers_folder(tmp_path / "flowers-102")
    source = opened(make(tmp_path / "set"))
    assert list(source.splits) == ["train", "val", "test"] and list(source.classes) == Flowers102.classes
    for split in ("train", "val", "test"):
        theirs = Flowers102(str(tmp_path), split=split)
        expected = [(path.read_bytes(), label) for path, label in zip(theirs._image_files, theirs._labels, strict=True)]
        assert samples(source, split) == expected
    if make is flowers_archives:
        assert opened(tmp_path / "set/102flowers.tgz").fingerprint() == source.fingerprint()


# ---- what is missing or does not fit


def change_lists(name: str, text: Callable[[str], str]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "annotations" / name
        path.write_text(text(path.read_text()))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "annotations/test.txt").unlink(), r"no test\.txt"),
        (lambda root: (root / "images/Birman_2.jpg").unlink(), r"trainval\.txt names .*\(Birman_2\.jpg\)"),
        (change_lists("test.txt", lambda text: text + "Abyssinian_9\n"), r"test\.txt, line 4"),
        (change_lists("test.txt", lambda text: text + "Abyssinian_9 x 1 1\n"), r"test\.txt, line 4"),
        (change_lists("test.txt", lambda text: text + "Birman_33 1 1 1\n"), r"test\.txt, line 4"),
        (change_lists("trainval.txt", lambda text: text + "Sphynx_1 9 1 1\n"), "numbered"),
    ],
)
def test_pets_that_are_not_as_published(tmp_path: Path, change: Callable[[Path], object], message: str):
    change(pets_folders(tmp_path))
    refused(tmp_path, message)


def test_one_half_of_the_pets(tmp_path: Path):
    for name in ("annotations", "images"):
        root = pets_archives(tmp_path / name)
        (root / f"{name}.tar.gz").unlink()
        for path in (root, root / "images.tar.gz"):
            if path.exists():
                with pytest.raises(UserError, match=rf"{name}\.tar\.gz .*has to lie there"):
                    opened(path)


def test_an_archive_of_class_folders_may_be_called_images(tmp_path: Path):
    path = write_tar(tmp_path / "images.tar.gz", {"images/cat/1.jpg": jpeg(1), "images/dog/1.jpg": jpeg(2)})
    assert opened(path).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "setid.mat").unlink(), r"setid\.mat is missing"),
        (lambda root: (root / "imagelabels.mat").unlink(), r"imagelabels\.mat is missing"),
        (lambda root: (root / "jpg/image_00103.jpg").unlink(), r"setid\.mat names .*\(image_00103\.jpg\)"),
        (lambda root: (root / "imagelabels.mat").write_bytes(b"nonsense" * 40), r"imagelabels\.mat: labels cannot"),
        (lambda root: (root / "imagelabels.mat").write_bytes(mat(labels=np.full((1, 306), 103))), "1 to 102"),
        (lambda root: (root / "imagelabels.mat").write_bytes(mat(labels=np.full((1, 306), 0.5))), "whole numbers"),
        (lambda root: (root / "imagelabels.mat").write_bytes(mat(labels="text")), "whole numbers"),
        (lambda root: (root / "imagelabels.mat").write_bytes(mat(labels=np.ones((1, 5)))), "does not label"),
        (lambda root: (root / "setid.mat").write_bytes(mat(trnid=np.array([[1]]))), r"setid\.mat: valid cannot"),
    ],
)
def test_flowers_that_are_not_as_published(tmp_path: Path, change: Callable[[Path], object], message: str):
    change(flowers_folder(tmp_path))
    refused(tmp_path, message)


def test_flowers_without_their_images(tmp_path: Path):
    write_files(tmp_path, flowers()[1])
    with pytest.raises(UserError, match=r"102flowers\.tgz .*has to lie there"):
        opened(tmp_path)
