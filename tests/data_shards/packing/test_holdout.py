"""Held-out images: those of a list, all of them and no others; a fraction where images have several labels."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.request import HoldoutList, PackRequest, read_holdout_list
from shardvit.data_shards.packing.shard_plan import hold_out
from shardvit.data_shards.packing.sources.base import Source, array_images


def source(count: int, *, multi: bool = False, lists: bool = False) -> Source:
    labels = np.arange(count) % 2
    images = array_images(
        "x", np.zeros((count, 1, 1), np.uint8), np.stack([labels, labels - 1], 1) if multi else labels
    )
    return Source(
        "x",
        ("a", "b"),
        {"train": images},
        kind="multi" if multi else "single",
        empty_classes="report" if lists else "refuse",
    )


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 19), min_size=1), st.sets(st.integers(0, 19)))
def test_a_list_holds_out_what_it_names_among_the_chosen(named: set[int], chosen: set[int]):
    holdout = HoldoutList(Path("val.txt"), {f"x/{i}": line for line, i in enumerate(named, start=1)})
    parts = hold_out(source(20), np.array(sorted(chosen), dtype=np.int64), PackRequest(holdout_list=holdout))
    assert set(parts["val"].tolist()) == named & chosen
    assert set(parts["train"].tolist()) == chosen - named


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_of_images_with_several_labels_it_is_a_fraction_of_all(count: int, fraction: float, seed: int):
    parts = hold_out(source(count, multi=True, lists=True), np.arange(count), PackRequest(holdout=fraction, seed=seed))
    assert len(parts["val"]) == min(max(round(count * fraction), 1), count - 1)
    assert sorted([*parts["train"], *parts["val"]]) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(1, 70), st.integers(0, 9), st.booleans())
def test_a_number_of_images_whatever_their_classes(count: int, number: int, seed: int, multi: bool):
    held = partial(hold_out, source(count, multi=multi), np.arange(count))
    if number >= count:
        with pytest.raises(UserError, match="give fewer than that"):
            held(PackRequest(holdout_images=number, seed=seed))
        return
    parts = held(PackRequest(holdout_images=number, seed=seed))
    assert len(parts["val"]) == number and sorted([*parts["train"], *parts["val"]]) == list(range(count))
    if number + 1 < count:  # more are the same ones and others
        more = held(PackRequest(holdout_images=number + 1, seed=seed))
        assert {*parts["val"].tolist()} < {*more["val"].tolist()}


def test_a_class_of_one_image_stays_in_train_where_lists_have_such():
    images = source(20, lists=True)
    parts = hold_out(images, np.array([0, 2, 4, 6, 7]), PackRequest(holdout=0.5))
    assert 7 in parts["train"] and len(parts["val"]) == 2
    with pytest.raises(UserError, match="one image only"):
        hold_out(source(20), np.array([0, 2, 4, 6, 7]), PackRequest(holdout=0.5))


def test_the_list_file(tmp_path: Path):
    file = tmp_path / "val.txt"
    file.write_bytes("\ufeffa/1.jpg\r\n\r\n./b//ü 2.jpg\na/1.jpg".encode())
    found = read_holdout_list(file, root=tmp_path)
    assert found.lines == {"a/1.jpg": 1, "b/ü 2.jpg": 3}
    (tmp_path / "same.txt").write_text("b/ü 2.jpg\na/1.jpg\n")
    assert str(read_holdout_list(tmp_path / "same.txt", root=tmp_path)).split()[-1] == str(found).split()[-1]
    (tmp_path / "other.txt").write_text("b/ü 2.jpg\n")
    assert str(read_holdout_list(tmp_path / "other.txt", root=tmp_path)).split()[-1] != str(found).split()[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "names no image"),
        (b"\n\n", "names no image"),
        (b"a/1.jpg\n/etc/passwd\n", "line 2: the path /etc/passwd does not lead"),
        (b"../1.jpg", r"line 1: the path \.\./1\.jpg does not lead"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_such_list(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "val.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_holdout_list(tmp_path / "val.txt", root=tmp_path)
    assert str(tmp_path / "val.txt") in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_holdout_list(tmp_path / "none.txt", root=tmp_path)


def test_a_line_that_names_nothing_is_refused():
    holdout = HoldoutList(Path("val.txt"), {"x/3": 1, "cat/9.jpg": 2, "cat/8.jpg": 5})
    with pytest.raises(
        UserError, match=r"val\.txt, line 2: x has no image cat/9\.jpg \(1 more of the list are missing.*as in x/0"
    ):
        hold_out(source(20), np.arange(20), PackRequest(holdout_list=holdout))
