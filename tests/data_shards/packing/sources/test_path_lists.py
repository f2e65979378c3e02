"""VTAB's lists: the images and numbers that they name, relative to the task's folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data_shards.errors import UserError
from data_shards.packing.sources.base import Source
from tests.data_shards.packing.sources.layouts import jpeg, write_files
from tests.data_shards.packing.sources.opening import opened, refused


def task(root: Path) -> Path:
    """As the 1000-image splits are published, with fewer images."""
    labels = {"train800": [3, 0, 1, 1], "val200": [2, 0], "test": [1, 3, 3]}
    files: dict[str, bytes] = {}
    rows = {
        part: [f"images/{part}/{i:06d}.jpg {label}" for i, label in enumerate(numbers)]
        for part, numbers in labels.items()
    }
    for part, numbers in labels.items():
        files |= {f"images/{part}/{i:06d}.jpg": jpeg(100 * len(part) + i) for i in range(len(numbers))}
    rows["train800val200"] = rows["train800"] + rows["val200"]
    return write_files(
        root, {**files, **{f"{part}.txt": "\n".join([*each, ""]).encode() for part, each in rows.items()}}
    )


def found(source: Source, split: str) -> list[tuple[str, int]]:
    images = source.splits[split]  # type: ignore[index]
    return [(images.trace(i), int(images.labels[i])) for i in range(len(images))]


def stated(path: Path) -> list[tuple[str, int]]:
    return [(line.split()[0], int(line.split()[1])) for line in path.read_text().splitlines()]


def test_a_task(tmp_path: Path):
    root = task(tmp_path / "caltech101")
    source = opened(root)
    assert source.classes == ("0", "1", "2", "3")
    assert list(source.splits) == ["train", "val"]
    assert found(source, "train") == stated(root / "train800val200.txt")
    assert found(source, "val") == stated(root / "test.txt")
    assert source.splits["val"].read(1) == (root / "images/test/000001.jpg").read_bytes()


def test_its_parts_for_choosing(tmp_path: Path):
    root = task(tmp_path)
    source = opened(root / "train800.txt", val=root / "val200.txt")
    assert found(source, "train") == stated(root / "train800.txt")
    assert found(source, "val") == stated(root / "val200.txt")
    assert list(opened(root / "train800.txt").splits) == ["train"]


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))

    return change


LAST = "images/test/000002.jpg 3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "test.txt").unlink(), r"test\.txt is missing"),
        (lambda root: (root / "test.txt").write_text(""), r"test\.txt: it names no image"),
        (replaced("test.txt", LAST, "images/test/000002.jpg"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg cat"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg -1"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg 999999999"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "../x.jpg 3"), r"test\.txt, line 3: .*inside"),
        (replaced("test.txt", LAST, "/etc/passwd 3"), r"test\.txt, line 3: .*inside"),
        (
            replaced("test.txt", LAST, "images/test/9.jpg 3"),
            r"test\.txt, line 3: images/test/9\.jpg is not a file below",
        ),
        (replaced("test.txt", LAST, "images/train800/000000.jpg 3"), r"line 1 of train800val200\.txt already"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, change: Callable[[Path], object], message: str):
    change(task(tmp_path))
    refused(tmp_path, message)


def test_lists_of_two_folders_and_options_that_mean_nothing(tmp_path: Path):
    one, two = task(tmp_path / "one"), task(tmp_path / "two")
    with pytest.raises(UserError, match="one folder"):
        opened(one / "train800.txt", val=two / "val200.txt")
    for options in ({"val": one}, {"val_labels": one}, {"cifar_labels": "coarse"}):
        with pytest.raises(UserError, match=r"^--[a-z-]+:"):
            opened(one, **options)
    with pytest.raises(UserError, match=r"^--val-labels:"):
        opened(one / "train800.txt", val_labels=one)
