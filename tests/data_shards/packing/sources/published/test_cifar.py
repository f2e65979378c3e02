"""CIFAR: the images, labels and order of torchvision, from both versions; pickles that would run code are not run."""

import gzip
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, cifar

from data_shards.errors import UserError
from data_shards.packing.sources.published.plain_pickle import read_plain_pickle
from tests.data_shards.packing.sources.published.layouts import (
    binary,
    cifar10,
    cifar100,
    python2_pickle,
    python3_pickle,
    write_files,
    write_tar,
)
from tests.data_shards.packing.sources.published.opening import opened

Dump = Callable[[Any], bytes]
SETS = {"cifar-10": (cifar10, CIFAR10), "cifar-100": (cifar100, CIFAR100)}


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
@pytest.mark.parametrize("version", SETS)
def test_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, dump: Dump):
    make, theirs = SETS[version]
    files = make(dump=dump)
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


def test_options_that_mean_nothing_here(tmp_path: Path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10())
    for flag, options in {"--val": {"val": tmp_path}, "--val-labels": {"val_labels": tmp_path}}.items():
        with pytest.raises(UserError, match=f"^{flag}:"):
            opened(path, **options)


# ---- what is no such pickle


class Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.marker,)


def evil(marker: Path) -> dict[str, bytes]:
    ran = Evil(str(marker))
    array = np.zeros((1, 3072), np.uint8)
    return {
        "alone": pickle.dumps(ran, protocol=2),
        "as a value": pickle.dumps({b"data": array, b"labels": [ran]}, protocol=2),
        "as a key": b"\x80\x02}" + pickle.dumps((1,), protocol=2)[2:-1] + b"cbuiltins\nprint\ns.",
        "protocol 0": b"cos\nmkdir\n(S'" + str(marker).encode() + b"'\ntR.",
        "by attribute": pickle.dumps(ran, protocol=4),
        "an allowed name of another kind": b"\x80\x02cnumpy\nsave\n.",
        "by extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02U\x01aQ.",
    }


@pytest.mark.parametrize("how", list(evil(Path("x"))))
def test_code_in_a_pickle_is_not_run(tmp_path: Path, how: str):
    marker = tmp_path / "ran"
    files = {**cifar10(), "cifar-10-batches-py/data_batch_2": evil(marker)[how]}
    with pytest.raises(UserError, match=r"data_batch_2: .*nothing of it was run") as caught:
        opened(write_tar(tmp_path / "cifar-10-python.tar.gz", files))
    assert not marker.exists() and "\n" not in str(caught.value)


def test_the_marker_is_made_where_pickles_are_obeyed(tmp_path: Path):
    pickle.loads(evil(tmp_path / "ran")["alone"])  # the control
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.array([Path()], dtype=object), b"labels": [0]},
    ],
)
def test_other_pickles_are_refused(value: object):
    with pytest.raises(UserError, match="not a pickle of plain values"):
        read_plain_pickle(pickle.dumps(value, protocol=2), name="x")


@pytest.mark.parametrize(
    "change",
    [
        {b"labels": [0, 1, 2]},  # of four
        {b"labels": [0, 1, 2, 99]},
        {b"labels": [0, 1, 2, -1]},
        {b"labels": [0, 1, 2, 2**70]},
        {b"labels": [0, 1, 2, b"3"]},
        {b"data": np.zeros((4, 3071), np.uint8)},
        {b"data": b"nothing"},
    ],
)
def test_batches_that_are_not_as_published(tmp_path: Path, change: dict[bytes, object]):
    files = cifar10(4)
    content = pickle.loads(files["cifar-10-batches-py/test_batch"], encoding="bytes")
    files["cifar-10-batches-py/test_batch"] = pickle.dumps({**content, **change}, protocol=2)
    with pytest.raises(UserError, match="test_batch"):
        opened(write_tar(tmp_path / "cifar-10-python.tar.gz", files))


def test_a_binary_file_that_is_cut_short(tmp_path: Path):
    files = binary(cifar10())
    files["cifar-10-batches-bin/data_batch_1.bin"] = files["cifar-10-batches-bin/data_batch_1.bin"][:-1]
    with pytest.raises(UserError, match=r"data_batch_1\.bin.*no whole number of images"):
        opened(write_tar(tmp_path / "cifar-10-binary.tar.gz", files))


def test_a_damaged_archive(tmp_path: Path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10())
    data = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(data[: len(data) // 2]))
    with pytest.raises(UserError, match="fetch it again"):
        opened(path)


def test_folders_with_the_names_of_its_files_are_not_it(tmp_path: Path):
    for folder in ("train", "test", "meta"):
        (tmp_path / "set" / folder / "cat").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "set" / folder / "cat" / "0.png")
    with pytest.raises(UserError, match="meta lies beside"):  # a folder of class folders: data_batch_1 is no help
        opened(tmp_path / "set")


def test_a_key_that_would_take_forever_to_hash_is_refused():
    twice = [b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(80)]  # a tuple of itself
    by_stack = b"2\x86" * 80
    for tuples in (b"\x80\x02)q\x00" + b"".join(twice), b"\x80\x02)" + by_stack):
        with pytest.raises(UserError, match="nothing of it was run"):
            read_plain_pickle(b"\x80\x02}" + tuples[2:] + b"K\x01s.", name="data_batch_1")
