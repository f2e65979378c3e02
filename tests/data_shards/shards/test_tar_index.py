"""The index points at exactly the bytes that tarfile and webdataset find, and damage is never skipped."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_index import ShardIndex, save_index
from shardvit.data_shards.shards.tar_index import (
    build_index,
    index_path,
    open_index,
    read_index,
    readable_index,
    write_index,
)
from shardvit.data_shards.vocabulary import LabelPart
from tests.data_shards.external_tars import write_tar

Members = list[tuple[str, bytes]]


def samples(count: int = 3) -> Members:
    members: Members = []
    for i in range(count):
        members += [(f"k{i}.cls", str(i).encode()), (f"k{i}.jpg", bytes([i]) * (100 + 500 * i))]
    return members


def read_back(path: Path, index: ShardIndex) -> Members:
    """Read samples by the index alone."""
    found: Members = []
    handle = os.open(path, os.O_RDONLY)
    try:
        for i, key in enumerate(index.keys):
            for name, offset, size in (
                (f"{key}.cls", index.label_offset[i], index.label_size[i]),
                (f"{key}.{index.image_extension[i]}", index.image_offset[i], index.image_size[i]),
            ):
                found.append((name, os.pread(handle, int(size), int(offset))))
    finally:
        os.close(handle)
    return found


def equal(a: ShardIndex, b: ShardIndex) -> bool:
    return all(np.array_equal(value, getattr(b, name)) for name, value in vars(a).items())


@given(st.lists(st.tuples(st.binary(max_size=1200), st.sampled_from(["jpg", "png", "webp"])), max_size=8))
def test_pread_at_the_offsets_gives_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, images: list[tuple[bytes, str]]
):
    path = tmp_path_factory.mktemp("t") / "a.tar"
    members = [m for i, (data, ext) in enumerate(images) for m in ((f"k{i}.cls", b"%d" % i), (f"k{i}.{ext}", data))]
    write_tar(path, members)
    index = build_index(path)
    assert read_back(path, index) == members
    write_index(index, index_path(path))
    assert equal(read_index(index_path(path)), index)
    assert equal(open_index(path), index)
    assert all(getattr(index, name).dtype == np.int64 for name in ("image_offset", "label_size"))


def test_text_form_is_that_of_wds2idx(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", samples(2))
    write_index(build_index(path), tmp_path / "a.idx")
    assert (tmp_path / "a.idx").read_text() == (
        "v1.2 2\ncls 512 1 k0.cls jpg 1536 100 k0.jpg\ncls 2560 1 k1.cls jpg 3584 600 k1.jpg\n"
    )


def test_parts_that_are_neither_image_nor_label_are_left_out(tmp_path: Path):
    members = [("d/k.JPG", b"image"), ("d/k.json", b"{}"), ("d/k.cls", b"7"), ("README", b"x"), (".hidden.cls", b"x")]
    path = write_tar(tmp_path / "a.tar", members)
    index = build_index(path)
    assert list(index.keys) == ["d/k"] and list(index.image_extension) == ["jpg"]
    assert read_back(path, index) == [("d/k.cls", b"7"), ("d/k.jpg", b"image")]


def test_an_index_with_more_parts_reads_as_dali_writes_it(tmp_path: Path):
    text = "v1.2 1\njpg 512 5 d/k.jpg json 1536 2 d/k.json cls 2560 1 d/k.cls\n"
    (tmp_path / "a.idx").write_text(text)
    index = read_index(tmp_path / "a.idx")
    assert (list(index.keys), index.image_offset.tolist(), index.label_offset.tolist()) == (["d/k"], [512], [2560])


@pytest.mark.parametrize(
    "members",
    [
        [("k.jpg", b"x")],
        [("k.cls", b"1")],
        [("k.jpg", b"x"), ("k.png", b"y"), ("k.cls", b"1")],
        [("k.jpg", b"x"), ("other.txt", b"y"), ("k.cls", b"1")],
        [("k.jpg", b"x"), ("k.cls", b"1"), ("k.cls", b"1")],
    ],
)
def test_a_sample_needs_one_image_and_one_label(tmp_path: Path, members: Members):
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=r"a\.tar: the sample"):
        build_index(path)


def test_missing_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"a\.tar"):
        build_index(tmp_path / "a.tar")
    with pytest.raises(UserError, match=r"a\.idx"):
        read_index(tmp_path / "a.idx")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v1.1 1\njpg 0 1 k.jpg cls 0 1 k.cls\n",
        "v1.2 2\njpg 0 1 k.jpg cls 0 1 k.cls\n",
        "v1.2 1\njpg 0 1 k.jpg cls 0 1\n",
        *(
            f"v1.2 1\njpg {place[0]} {place[1]} k.jpg cls {place[2]} {place[3]} k.cls\n"
            for value in ["a", "-5", "1e3", str(2**62), "9" * 5000, "\N{SUPERSCRIPT TWO}"]
            for place in ([value, "1", "0", "1"], ["0", "1", "0", value])
        ),
        "v1.2 1\njpg 0 1 k.jpg cls 0 1 l.cls\n",
        "v1.2 1\njpg 0 1 k.jpg\n",
        "v1.2 1\n\n",
    ],
)
def test_broken_index_files(tmp_path: Path, text: str):
    (tmp_path / "a.idx").write_text(text)
    with pytest.raises(UserError, match=r"a\.idx: .*delete (it|the file)") as caught:
        read_index(tmp_path / "a.idx")
    assert len(str(caught.value)) < 400


def test_an_index_that_points_behind_the_tar_is_refused(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", samples())
    write_index(build_index(path), index_path(path))
    path.write_bytes(path.read_bytes()[:2048])
    with pytest.raises(UserError, match=r"a\.idx: this index is not that of"):
        open_index(path)


def test_without_an_index_file_the_tar_is_read_and_nothing_written(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", samples())
    assert list(open_index(path).keys) == ["k0", "k1", "k2"]
    assert list(tmp_path.iterdir()) == [path]


def test_white_space_in_a_key_can_be_indexed_but_not_written(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", [("a b.jpg", b"x"), ("a b.cls", b"1")])
    index = build_index(path)
    assert list(index.keys) == ["a b"]
    with pytest.raises(UserError, match="white space"):
        write_index(index, tmp_path / "a.idx")


@pytest.mark.parametrize("label", ["cls", "json", "txt"])
def test_the_label_is_the_part_that_is_asked_for(tmp_path: Path, label: LabelPart):
    members = [("k.json", b'{"l": 1}'), ("k.jpg", b"image"), ("k.txt", b"cat"), ("k.cls", b"1")]
    path = write_tar(tmp_path / "a.tar", members)
    index = build_index(path, label=label)
    content = path.read_bytes()
    start = int(index.label_offset[0])
    assert content[start : start + int(index.label_size[0])] == dict(members)[f"k.{label}"]
    write_index(index, index_path(path), label=label)
    assert equal(open_index(path, label=label), index)
    if label != "cls":
        with pytest.raises(UserError, match=r"a\.idx: the sample k has 1 images and 0 \.cls"):
            open_index(path)
    save_index(index, tmp_path / "elsewhere.npz")
    assert equal(open_index(path, label=label, index=tmp_path / "elsewhere.npz"), index)
    with pytest.raises(UserError, match=r"gone\.npz: there is no such index"):
        open_index(path, label=label, index=tmp_path / "gone.npz")


def test_an_index_of_webdatasets_tool_has_all_parts_in_any_order(tmp_path: Path):
    """Files of webdataset's `widsindex` and DALI's `wds2idx` are read; each label is found in the same file."""
    members = [
        ("k0.txt", b"a"),
        ("k0.jpg", b"0"),
        ("k0.cls", b"1"),
        ("k1.cls", b"2"),
        ("k1.txt", b"b"),
        ("k1.png", b"1"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path) as tar:
        lines: dict[str, list[str]] = {}
        for each in tar:
            key, _, extension = each.name.partition(".")
            lines.setdefault(key, []).append(f"{extension} {each.offset_data} {each.size} {each.name}")
    index_path(path).write_text("v1.2 2\n" + "".join(" ".join(reversed(line)) + "\n" for line in lines.values()))
    labels: list[LabelPart] = ["cls", "txt"]
    for label in labels:
        assert equal(open_index(path, label=label), build_index(path, label=label))


def test_a_readable_index_has_what_is_before_the_damage(tmp_path: Path):
    path = write_tar(tmp_path / "a.tar", [("x.cls", b"0"), *samples(4)])
    whole = readable_index(path)
    assert (whole.damage, whole.left_out) == ("", (("x", "has 0 images and 1 .cls members"),))
    assert list(whole.index.keys) == ["k0", "k1", "k2", "k3"]
    with pytest.raises(UserError, match="the sample x has 0 images"):
        build_index(path)
    data = path.read_bytes()
    for length in range(512, int(whole.index.end), 256):
        path.write_bytes(data[:length])
        part = readable_index(path)
        ends = np.maximum(whole.index.image_offset + whole.index.image_size, whole.index.label_offset + 1)
        assert list(part.index.keys) == list(whole.index.keys)[: int((ends <= length).sum())]
        assert f"cut short at byte {length}," in part.damage
        assert set(part.left_out) <= set(whole.left_out)  # the sample that the cut goes through is the damage's
        with pytest.raises(UserError, match="cut short"):
            build_index(path, name="shown")
    with pytest.raises(UserError, match=r"^shown: there is no such tar"):
        readable_index(tmp_path / "gone.tar", name="shown")
