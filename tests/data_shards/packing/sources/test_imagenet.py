"""ImageNet: torchvision's images, labels and order of classes, from every form in which the set is kept."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import imagenet as theirs

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import imagenet
from shardvit.data_shards.packing.sources.base import Source
from tests.data_shards.packing.sources.layouts import (
    SYNSETS,
    class_tars,
    devkit,
    imagenet_train,
    imagenet_val,
    jpeg,
    kaggle_csv,
    tar_bytes,
    write_files,
    write_tar,
)
from tests.data_shards.packing.sources.opening import opened, refused

TRAIN = imagenet_train()
VAL, VAL_SYNSETS = imagenet_val()
Content = dict[str, list[tuple[bytes, int]]]  # split -> image and label, sorted


def content(source: Source) -> Content:
    return {
        split: sorted((images.read(i), int(images.labels[i])) for i in range(len(images)))
        for split, images in source.splits.items()
    }


EXPECTED: Content = {
    "train": sorted((data, SYNSETS.index(name.partition("/")[0])) for name, data in TRAIN.items()),
    "val": sorted((data, SYNSETS.index(synset)) for data, synset in zip(VAL.values(), VAL_SYNSETS, strict=True)),
}


def official(root: Path) -> Path:
    write_tar(root / "ILSVRC2012_img_train.tar", class_tars(TRAIN))
    write_tar(root / "ILSVRC2012_img_val.tar", VAL)
    write_tar(root / "ILSVRC2012_devkit_t12.tar.gz", devkit(VAL_SYNSETS))
    return root


# torchvision 0.26 unpacks without a filter, of which Python 3.12 warns.
@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_as_torchvision_reads_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(theirs, "_verify_archive", lambda *_: None)  # the digests of the real files
    root = official(tmp_path / "imagenet")
    shutil.copytree(root, tmp_path / "theirs")
    source = opened(root)
    for split in ("train", "val"):
        expected = theirs.ImageNet(str(tmp_path / "theirs"), split=split)
        assert list(source.classes) == expected.wnids
        assert content(source)[split] == sorted((Path(path).read_bytes(), label) for path, label in expected.samples)
    assert content(source) == EXPECTED


def class_folders(root: Path) -> Path:
    write_files(root / "train", TRAIN)
    write_files(root / "val", VAL)
    write_tar(root / "ILSVRC2012_devkit_t12.tar.gz", devkit(VAL_SYNSETS))
    return root


def folder_of_class_tars(root: Path) -> Path:
    write_files(root / "train", class_tars(TRAIN))
    write_tar(root / "ILSVRC2012_img_val.tar", VAL)
    write_files(root, devkit(VAL_SYNSETS))
    return root


def kaggle(root: Path) -> Path:
    write_files(root / "ILSVRC/Data/CLS-LOC/train", TRAIN)
    write_files(root / "ILSVRC/Data/CLS-LOC/val", VAL)
    (root / "LOC_val_solution.csv").write_bytes(kaggle_csv([*VAL], VAL_SYNSETS))
    return root


def all_folders(root: Path) -> Path:
    write_files(root / "train", TRAIN)
    write_files(root / "val", {f"{s}/{name}": VAL[name] for name, s in zip(VAL, VAL_SYNSETS, strict=True)})
    return root


def folders_in_one_archive(root: Path) -> Path:
    files = {f"imagenet/train/{name}": data for name, data in TRAIN.items()}
    files |= {f"imagenet/val/{s}/{name}": VAL[name] for name, s in zip(VAL, VAL_SYNSETS, strict=True)}
    return write_tar(root / "all.tar.gz", files)


@pytest.mark.parametrize(
    "make", [official, class_folders, folder_of_class_tars, kaggle, all_folders, folders_in_one_archive]
)
def test_every_form_holds_the_same(tmp_path: Path, make: Callable[[Path], Path]):
    source = opened(make(tmp_path / "imagenet"))
    assert source.classes == SYNSETS and content(source) == EXPECTED
    images = source.splits["train"]
    traces = [images.trace(i) for i in range(len(images))]
    assert len({*traces}) == len(traces)
    assert images.num_bytes.tolist() == [len(images.read(i)) for i in range(len(images))]
    assert len(set(images.stamps.tolist())) == len(images)


LISTS: dict[str, Callable[[Path], object]] = {
    "LOC_val_solution.csv": lambda path: path.write_bytes(kaggle_csv([*VAL], VAL_SYNSETS)),
    "ILSVRC2012_devkit_t12.tar.gz": lambda path: write_tar(path, devkit(VAL_SYNSETS)),
    "ILSVRC2012_devkit_t12": lambda path: write_files(path.parent, devkit(VAL_SYNSETS)),
    "val.txt": lambda path: path.write_text(lines(zip(VAL, VAL_SYNSETS, strict=True))),
    "paths.csv": lambda path: (
        path.write_text("ImageId,label\n" + "".join(f"val/{n},{s}\n" for n, s in zip(VAL, VAL_SYNSETS, strict=True)))
        and None
    ),
    "synsets.txt": lambda path: path.write_text("".join(f"{synset}\n" for synset in VAL_SYNSETS)),
}


def lines(pairs: Any) -> str:
    return "".join(f"{name} {synset}\n" for name, synset in pairs)


@pytest.mark.parametrize("name", LISTS)
def test_every_list_of_the_validation_classes(tmp_path: Path, name: str):
    train = write_tar(tmp_path / "ILSVRC2012_img_train.tar", class_tars(TRAIN))
    val = write_tar(tmp_path / "ILSVRC2012_img_val.tar", dict(reversed(VAL.items())))  # not in the order of the names
    (tmp_path / "lists").mkdir()
    LISTS[name](tmp_path / "lists" / name)
    assert content(opened(train, val=val, val_labels=tmp_path / "lists" / name)) == EXPECTED


def test_a_winter_archive_without_a_held_out_part(tmp_path: Path):
    files = {f"winter21_whole/{name}": data for name, data in class_tars(TRAIN).items()}
    source = opened(write_tar(tmp_path / "winter21_whole.tar.gz", files))
    assert content(source) == {"train": EXPECTED["train"]} and source.empty_classes == "report"
    assert content(opened(tmp_path)) == {"train": EXPECTED["train"]}
    assert content(opened(write_files(tmp_path / "tars", class_tars(TRAIN)))) == {"train": EXPECTED["train"]}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_release_is_recognised_and_lost_images_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int):
    release = ("ImageNet-3", len(SYNSETS), len(TRAIN) + lost)
    monkeypatch.setattr(imagenet, "_RELEASES", (release,))
    source = opened(official(tmp_path / "x"))
    assert "ImageNet-3" in source.notes[-1] and ("missing" in source.notes[-1]) == bool(lost)


def test_a_file_that_a_tar_holds_twice_is_the_later_one(tmp_path: Path):
    import io
    import tarfile

    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, seed in (("a/1.jpg", 1), ("b/2.jpg", 2), ("a/1.jpg", 3)):
            entry = tarfile.TarInfo(name)
            entry.size = len(jpeg(seed))
            tar.addfile(entry, io.BytesIO(jpeg(seed)))
    source = opened(path)
    assert content(source) == {"train": sorted([(jpeg(3), 0), (jpeg(2), 1)])}
    assert any("1 file replaced by a later one" in note and "a/1.jpg" in note for note in source.notes)


def test_a_tar_at_the_third_level_is_named(tmp_path: Path):
    third = tar_bytes({"3.jpg": jpeg(3)})
    inner = {"a.tar": tar_bytes({"1.jpg": jpeg(1), "more.tar": third, "notes.txt": b"x"}), "b/2.jpg": jpeg(2)}
    path = write_tar(tmp_path / "set.tar", inner)
    (note,) = [note for note in opened(path).notes if "left out" in note]
    assert "2 files" in note and "1 tar among them not looked into (the first: a/more.tar)" in note
    only = write_tar(tmp_path / "only.tar", {"a.tar": tar_bytes({"more.tgz": third}), "b.tar": tar_bytes({"x": b""})})
    with pytest.raises(UserError, match=r"no image in it.*a/more\.tgz"):
        opened(only)


def test_images_beside_the_class_folders(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", {"set/a/1.jpg": jpeg(1), "set/b/2.jpg": jpeg(2), "set/3.jpg": jpeg(3)})
    with pytest.raises(UserError, match=r"set/3\.jpg lies beside .*--skip-unreadable"):
        opened(path)
    source = opened(path, unfit="skip")
    assert source.classes == ("a", "b") and [each.path for each in source.left_out] == ["set/3.jpg"]


def test_held_out_folders_of_any_set(tmp_path: Path):
    train = write_files(tmp_path / "one", {"a/1.jpg": jpeg(1), "b/2.jpg": jpeg(2)})
    val = write_files(tmp_path / "two", {"b/3.jpg": jpeg(3)})
    assert content(opened(train, val=val))["val"] == [(jpeg(3), 1)]
    write_files(val, {"c/4.jpg": jpeg(4)})
    with pytest.raises(UserError, match="--val-labels"):
        opened(train, val=val)


# ---- what is missing or does not fit


def without(name: str) -> Callable[[Path], dict[str, Any]]:
    def change(root: Path) -> dict[str, Any]:
        (root / name).unlink()
        return {}

    return change


def listed(text: str) -> Callable[[Path], dict[str, Any]]:
    def change(root: Path) -> dict[str, Any]:
        (root / "list.txt").write_text(text)
        return {"val_labels": root / "list.txt"}

    return change


def kit(**changes: bytes) -> Callable[[Path], dict[str, Any]]:
    def change(root: Path) -> dict[str, Any]:
        files = devkit(VAL_SYNSETS)
        names = {"meta": "data/meta.mat", "truth": "data/ILSVRC2012_validation_ground_truth.txt"}
        for key, data in changes.items():
            files[f"ILSVRC2012_devkit_t12/{names[key]}"] = data
        write_tar(root / "ILSVRC2012_devkit_t12.tar.gz", {name: data for name, data in files.items() if data})
        return {}

    return change


ALL = lines(zip(VAL, VAL_SYNSETS, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("ILSVRC2012_img_train.tar"), r"ILSVRC2012_img_train\.tar, which has to lie beside"),
        (without("ILSVRC2012_devkit_t12.tar.gz"), r"ILSVRC2012_devkit_t12\.tar\.gz has to lie beside"),
        (listed(""), "names no image"),
        (listed(ALL.partition("\n")[2]), r"no class for ILSVRC2012_val_00000001\.JPEG"),
        (listed(ALL + "ILSVRC2012_val_00000001.JPEG n01440764\n"), r"line 7: .*has the class"),
        (listed(ALL.replace("n01440764", "n99999999")), "n99999999 is no class"),
        (listed("a b c\n"), r"line 1: 3 words"),
        (listed(ALL + "n01440764\n"), "line 7: there is no class beside"),
        (listed("1\n2\n3\n1\n2\n3\n"), r"meta\.mat"),
        (listed("n01440764\n" * 5), "5 labels for 6 images"),
        (kit(truth=b"1\n2\n"), "2 labels for 6 images"),
        (kit(truth=b"1\n2\n3\n1\n2\n77\n"), "77"),
        (kit(truth=b"1\n2\nx\n"), "x"),
        (kit(truth=b""), "no ILSVRC2012_validation_ground_truth"),
        (kit(meta=b""), r"no meta\.mat"),
        (kit(meta=b"MATLAB 5.0 MAT-file" + bytes(200)), "cannot be read"),
        (kit(meta=b"nonsense"), "cannot be read"),
        (lambda root: {"val": root / "nowhere"}, "nowhere is not there"),
        (lambda root: {"val_labels": root / "nowhere"}, "no such file"),
        (lambda root: {"val": write_tar(root / "no.tar", {"readme": b""})}, "no image"),
    ],
)
def test_what_is_missing_or_does_not_fit(tmp_path: Path, change: Callable[[Path], dict[str, Any]], message: str):
    root = official(tmp_path / "imagenet")
    options = change(root)
    refused(root, message, **options)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (VAL, "side by side, without class folders"),
        ({f"val/{name}": data for name, data in VAL.items()}, "would be one class"),
        ({"a.jpg": jpeg(1), "a.cls": b"0"}, "as shards have it"),
        ({"readme.txt": b"x"}, "no image"),
        ({"val/a/1.jpg": jpeg(1), "val/b/1.jpg": jpeg(1), "test/a/2.jpg": jpeg(2)}, "without train"),
        ({"train/a/1.jpg": jpeg(1), "train/b/2.jpg": jpeg(2), "val/c/3.jpg": jpeg(3)}, "val has classes that train"),
        ({"a/1.jpg": jpeg(1), "b\nc/2.jpg": jpeg(2)}, "cannot be written"),
    ],
)
def test_archives_that_are_no_training_part(tmp_path: Path, files: Mapping[str, bytes], message: str):
    path = write_tar(tmp_path / "ILSVRC2012_img_val.tar", files)
    with pytest.raises(UserError, match=message) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_labels_without_held_out_images_and_two_held_out_parts(tmp_path: Path):
    train = write_tar(tmp_path / "ILSVRC2012_img_train.tar", class_tars(TRAIN))
    labels = tmp_path / "val.txt"
    labels.write_text(ALL)
    with pytest.raises(UserError, match="give --val too"):
        opened(train, val_labels=labels)
    val = write_tar(tmp_path / "ILSVRC2012_img_val.tar", VAL)
    both = folders_in_one_archive(tmp_path / "both")
    with pytest.raises(UserError, match="leave out --val"):
        opened(both, val=val, val_labels=labels)


def test_class_tars_beside_class_folders_are_not_guessed(tmp_path: Path):
    root = write_files(tmp_path / "train", {**class_tars(TRAIN), **TRAIN})
    with pytest.raises(UserError, match="side by side"):
        opened(root)


def test_a_class_tar_without_an_image_is_no_class(tmp_path: Path):
    tars = {**class_tars(TRAIN), "n09999999.tar": tar_bytes({})}
    source = opened(write_tar(tmp_path / "all.tar", tars))
    assert source.classes == SYNSETS
    assert np.bincount(source.splits["train"].labels).tolist() == [3, 3, 3]
