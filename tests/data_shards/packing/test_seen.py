"""A finished packing and images that were replaced since: noticed by time or by bytes, and what was looked at."""

import os
from pathlib import Path

import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.found import PackReport
from shardvit.data_shards.packing.seen import SEEN_FILE
from tests.data_shards.packing.folders import quiet, tree
from tests.data_shards.packing.sources.layouts import tar_bytes


@pytest.fixture(autouse=True)
def _listings_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four images of two classes, whose size in bytes does not depend on their pixels."""
    for number, name in enumerate(("cat/1.bmp", "cat/2.tif", "dog/3.bmp", "dog/4.tif")):
        draw(tmp_path / "in" / name, grey=number)
    return tmp_path / "in"


def draw(path: Path, *, grey: int, seconds: int = 0) -> None:
    """`seconds`: later than in 2020."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), (grey, 90, 200)).save(path)
    os.utime(path, (1.6e9 + seconds, 1.6e9 + seconds))


def again(root: Path, **options: object) -> PackReport:
    return quiet(str(root), root.parent / "out", **options)


@pytest.mark.parametrize("name", ["cat/1.bmp", "dog/4.tif"])
def test_an_image_replaced_by_one_of_the_same_size_is_noticed(root: Path, name: str):
    again(root)
    before, size = tree(root.parent / "out"), (root / name).stat().st_size
    draw(root / name, grey=77, seconds=5)
    assert (root / name).stat().st_size == size
    with pytest.raises(UserError, match=rf"1 image of the same size changed since \(the first: {name}\)"):
        again(root)
    assert tree(root.parent / "out") == before


def test_one_whose_time_was_set_back_is_found_by_reading(root: Path):
    again(root)
    draw(root / "cat/2.tif", grey=77)
    assert again(root).compared.endswith("4 images; bytes of none (--verify reads all)")
    with pytest.raises(UserError, match=r"1 image .*changed since.*cat/2\.tif"):
        again(root, reread="all")


def test_images_that_were_only_touched_are_read_and_found_the_same(root: Path):
    again(root)
    assert again(root, reread="all").compared.endswith("of 4 images; bytes of 4")
    for name in ("cat/1.bmp", "dog/3.bmp"):
        os.utime(root / name)
    assert again(root).compared.endswith("of 4 images (2 with other times); bytes of 2")
    assert again(root, reread="all").compared.endswith("of 4 images (2 with other times); bytes of 4")


@pytest.mark.parametrize("options", [{"classes": ["dog"]}, {"duplicates": "drop"}, {"holdout": 0.5}])
def test_what_was_packed_is_compared_whatever_the_request(root: Path, options: dict):
    again(root, **options)
    draw(root / "dog/3.bmp", grey=77)
    draw(root / "cat/1.bmp", grey=2 if "classes" in options else 0)
    with pytest.raises(UserError, match=r"1 image .*dog/3\.bmp"):
        again(root, reread="all", **options)


def test_a_tar_that_was_replaced(root: Path):
    path = root.parent / "set.tar"

    def write(grey: int, seconds: int) -> None:
        draw(root / "cat/1.bmp", grey=grey)
        path.write_bytes(tar_bytes({str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*.*")}))
        os.utime(path, (1.6e9 + seconds, 1.6e9 + seconds))

    write(0, 0)
    again(path)
    write(0, 5)
    assert again(path).compared.endswith("of 4 images (4 with other times); bytes of 4")
    write(1, 9)
    with pytest.raises(UserError, match=r"1 image .*cat/1\.bmp"):
        again(path)


@pytest.mark.parametrize("content", [None, b"", b"another"])
def test_a_set_that_does_not_say_what_was_seen_still_opens(root: Path, content: bytes | None):
    again(root)
    seen = root.parent / "out" / SEEN_FILE
    seen.unlink()
    if content is not None:
        seen.write_bytes(content)
    assert again(root).compared.startswith("names and sizes of 4 images, not times")
    with pytest.raises(UserError, match=f"{SEEN_FILE} is missing"):
        again(root, reread="all")
