"""Sources: what is found where, and one clear sentence for every folder that cannot be used."""

import gzip
import io
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import arrays
from shardvit.data_shards.packing.sources.arrays import DEBIAN_FOLDER, FASHION_CLASSES
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.sources.recognise import open_source
from tests.data_shards.packing.sources.opening import touch


def files_of(source: Source, split: str) -> list[tuple[str, str]]:
    images = source.splits[split]  # type: ignore[index]
    return [(images.trace(i), source.classes[images.labels[i]]) for i in range(len(images))]


def decode(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


# ---- folders


def test_the_folder_above_a_data_set_is_not_taken_for_one_class(tmp_path: Path):
    touch(tmp_path, "cifar10/train/cat/1.jpg", "cifar10/test/cat/2.jpg")
    with pytest.raises(UserError, match=rf"did you mean {tmp_path / 'cifar10'}\?"):
        open_source(str(tmp_path))


def test_class_folders(tmp_path: Path):
    touch(tmp_path, "b/2.JPG", "b/1.png", "a/x/deep/3.jpeg", "a/y.webp", "a/.hidden.jpg", ".git/z.jpg", "a/notes.txt")
    source = open_source(str(tmp_path))
    assert source.classes == ("a", "b")
    assert files_of(source, "train") == [
        ("a/y.webp", "a"),
        ("a/x/deep/3.jpeg", "a"),
        ("b/1.png", "b"),
        ("b/2.JPG", "b"),
    ]
    assert "val" not in source.splits
    assert source.splits["train"].read(1) == b"a/x/deep/3.jpeg"
    assert len(source.notes) == 1 and "1 file left out" in source.notes[0] and "a/notes.txt" in source.notes[0]


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        ("train val", "train val"),
        ("train validation", "train val"),
        ("train test", "train val"),
        ("train val test", "train val test"),
        ("train validation test", "train val test"),
        ("train val validation", "train val -"),  # left out, and that is said
    ],
)
def test_splits_by_the_names_of_folders(tmp_path: Path, folders: str, splits: str):
    touch(tmp_path, *(f"{folder}/{name}/{name}.jpg" for folder in folders.split() for name in "ab"))
    source = open_source(str(tmp_path))
    used = {split: folder for folder, split in zip(folders.split(), splits.split(), strict=True) if split != "-"}
    assert source.classes == ("a", "b") and list(source.splits) == list(used)
    for split, folder in used.items():
        assert files_of(source, split) == [(f"{folder}/a/a.jpg", "a"), (f"{folder}/b/b.jpg", "b")]
    assert len(source.notes) == splits.count("-") and all("validation was left out" in note for note in source.notes)


def test_all_mistakes_are_told_at_once_and_what_can_be_left_out_is(tmp_path: Path):
    touch(tmp_path, "train/a/1.jpg", "train/b/2.jpg", "train/c/x.txt", "train/loose1.jpg", "train/loose2.jpg")
    touch(tmp_path, "val/a/3.jpg", "val/b/y.txt", "val/c/z.txt", "loose3.png")
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path))
    message = str(caught.value)
    for place in ("loose1.jpg, loose2.jpg", "loose3.png", "train/c: ", "val/b: ", "val/c: ", "--skip-unreadable"):
        assert place in message
    assert message.startswith("5 problems: (1) ") and "\n" not in message
    source = open_source(str(tmp_path), unfit="skip")
    assert source.classes == ("a", "b")
    assert files_of(source, "train") == [("train/a/1.jpg", "a"), ("train/b/2.jpg", "b")]
    assert files_of(source, "val") == [("val/a/3.jpg", "a")]
    assert sorted(each.path for each in source.left_out) == ["loose3.png", "train/loose1.jpg", "train/loose2.jpg"]
    assert {each.split for each in source.left_out} == {"train"}
    for place in ("loose1.jpg", "loose3.png", "train/c: ", "val/b: ", "val/c: "):
        assert any(place in note for note in source.notes)


def test_a_class_that_train_lacks_is_a_mistake_all_the_same(tmp_path: Path):
    touch(tmp_path, "train/a/1.jpg", "train/b/x.txt", "val/a/2.jpg", "val/b/3.jpg")
    with pytest.raises(UserError, match=r"1 class folders of val are missing in train \(the first: b\)"):
        open_source(str(tmp_path), unfit="skip")


def test_a_class_that_is_called_train(tmp_path: Path):
    touch(tmp_path, "train/1.jpg", "car/2.jpg")
    assert open_source(str(tmp_path)).classes == ("car", "train")


def test_symbolic_links_are_followed_and_end(tmp_path: Path):
    touch(tmp_path, "store/1.jpg", "root/a/2.jpg")
    (tmp_path / "root/b").symlink_to(tmp_path / "store")
    (tmp_path / "root/a/back").symlink_to(tmp_path / "root/a")
    assert [file for file, _ in files_of(open_source(str(tmp_path / "root")), "train")] == ["a/2.jpg", "b/1.jpg"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["1.jpg"], r"1\.jpg lies beside"),
        (["a/1.jpg", "2.jpg"], r"2\.jpg lies beside"),
        (["notes.txt"], "no class folders"),
        (["a/1.jpg", "b/notes.txt"], r"/b: there is no image in this class folder"),
        (["train/a/1.jpg", "cat/1.jpg"], "mixed layouts.*cat"),
        (["train/a/1.jpg", "train/2.jpg"], r"/train: 2\.jpg lies beside"),
        (["train/a/1.jpg", "val/1.jpg"], "/val: there are no class folders"),
        (["train/1.jpg", "val/1.jpg"], "images lie in it without class folders"),
        (["val/a/1.jpg"], "val is there without train"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], r"1 class folders of train are missing in val.*b"),
        (["train/a/1.jpg", "val/a/1.jpg", "val/c/1.jpg"], r"1 class folders of val are missing in train.*c"),
        (["train/a/1.jpg", "val/a/x.txt"], "/val/a: there is no image"),
    ],
)
def test_layouts_that_are_refused(tmp_path: Path, files: Sequence[str], message: str):
    touch(tmp_path, *files)
    with pytest.raises(UserError, match=message) as caught:
        open_source(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_empty_and_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere.*names: digits, fashion-mnist"):
        open_source(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="the folder is empty"):
        open_source(str(tmp_path))
    touch(tmp_path, "a.zip")
    with pytest.raises(UserError, match=r"a\.zip: this is a file"):
        open_source(str(tmp_path / "a.zip"))


def test_fingerprint_sees_a_new_file_a_new_size_and_a_new_name(tmp_path: Path):
    touch(tmp_path, "a/1.jpg", "b/2.jpg")
    prints = [open_source(str(tmp_path)).fingerprint()]
    assert open_source(str(tmp_path)).fingerprint() == prints[0]
    (tmp_path / "a/1.jpg").write_bytes(b"longer than before")
    prints.append(open_source(str(tmp_path)).fingerprint())
    touch(tmp_path, "b/3.jpg")
    prints.append(open_source(str(tmp_path)).fingerprint())
    (tmp_path / "b").rename(tmp_path / "c")
    prints.append(open_source(str(tmp_path)).fingerprint())
    assert len(set(prints)) == 4


# ---- digits


def test_digits_are_lossless():
    source, data = open_source("digits"), load_digits()
    images = source.splits["train"]
    assert len(images) == 1797 and source.classes == tuple("0123456789")
    assert images.labels.tolist() == data.target.tolist()
    for i in (0, 17, 1796):
        pixels = decode(images.read(i))
        assert pixels.dtype == np.uint8 and pixels.shape == (8, 8)
        assert np.array_equal(np.rint(pixels / 255 * 16), data.images[i])


def test_without_scikit_learn_the_digits_say_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        open_source("digits")


# ---- IDX files


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, *, num_train: int = 12, num_val: int = 5, mark: str = "-", zipped: bool = False) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", num_train), ("t10k", num_val)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 6, 7))
        for file, array in (
            (f"{stem}-images{mark}idx3-ubyte", pixels),
            (f"{stem}-labels{mark}idx1-ubyte", np.arange(count) % 10),
        ):
            data = idx_bytes(array)
            (root / (file + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    return root


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_files(tmp_path: Path, mark: str, zipped: bool):
    source = open_source(str(write_mnist(tmp_path / "mnist", mark=mark, zipped=zipped)))
    assert source.classes == tuple("0123456789")
    assert source.splits["train"].labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(source.splits["val"]) == 5
    expected = np.random.default_rng(12).integers(0, 256, (12, 6, 7))
    assert all(np.array_equal(decode(source.splits["train"].read(i)), expected[i]) for i in range(12))


@pytest.mark.parametrize("folder", ["Fashion_MNIST", "FashionMNIST/raw"])
def test_fashion_class_names_by_folder(tmp_path: Path, folder: str):
    assert open_source(str(write_mnist(tmp_path / folder))).classes == FASHION_CLASSES


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"\0\0\x0d" + data[3:], "starts with 00 00 0d"),
        (lambda data: data[:-1], "where its header says"),
        (lambda data: data + b"x", "where its header says"),
        (lambda data: data[:9], "within its header"),
        (lambda data: b"", "starts with"),
        (lambda data: idx_bytes(np.zeros((11, 6, 7))), "12 labels for the 11 images"),
        (lambda data: idx_bytes(np.zeros((0, 6, 7))), "no image in it"),
    ],
)
def test_broken_image_files(tmp_path: Path, damage, message: str):
    path = write_mnist(tmp_path / "mnist") / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        open_source(str(tmp_path / "mnist"))
    assert str(tmp_path) in str(caught.value)


def test_a_label_above_nine(tmp_path: Path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([0, 1, 2, 3, 10])))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte: the label 10"):
        open_source(str(tmp_path))


def test_one_of_the_four_missing(tmp_path: Path):
    (write_mnist(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte.*is missing"):
        open_source(str(tmp_path))


def test_broken_gzip(tmp_path: Path):
    path = write_mnist(tmp_path, zipped=True) / "train-images-idx3-ubyte.gz"
    for data in (path.read_bytes()[:-20], b"no gzip at all", path.read_bytes()[:40] + b"\xff" * 50):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz: the file cannot be read"):
            open_source(str(tmp_path))


def test_fashion_mnist_absent_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "DEBIAN_FOLDER", tmp_path / "none")
    with pytest.raises(UserError, match="apt-get install dataset-fashion-mnist"):
        open_source("fashion-mnist")


@pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist():
    source = open_source("fashion-mnist")
    assert source.classes == FASHION_CLASSES
    for split, count in (("train", 60_000), ("val", 10_000)):
        assert np.bincount(source.splits[split].labels).tolist() == [count // 10] * 10  # type: ignore[index]
    assert decode(source.splits["val"].read(9999)).shape == (28, 28)
