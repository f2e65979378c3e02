"""Sources in stores and in tars of samples: the same images and labels wherever they lie, and however listing ends."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.packing.sources.tars import samples
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.sources.opening import touch
from tests.data_shards.packing.sources.places import (
    CLASSES,
    EXPECTED,
    IMAGES,
    Put,
    images_of,
    open_at,
    put_all,
    refused_at,
    sample_tars,
    tar_of,
    write,
)

# ---- one set at many places


def test_class_folders_here_and_in_a_bucket_are_one_source(tmp_path: Path, s3: FaultServer, put: Put):
    files = {**{f"train/{name}": data for name, data in IMAGES.items()}, "train/cat/deep/er/8.png": b"8"}
    files |= {f"val/{name}/9.jpg": b"9" for name in CLASSES} | {
        "train/cat/notes.txt": b"",
        "train/dog/.hidden.jpg": b"",
    }
    put_all(put, "photos", files)
    here = open_at(write(tmp_path / "photos", files), tmp_path / "work")
    there = open_at("s3://shards/photos/", tmp_path / "work")
    assert images_of(here) == images_of(there) and len(images_of(here)) == 25
    assert here.classes == there.classes and here.fingerprint() == there.fingerprint()
    assert [note.partition("train")[2] for note in here.notes] == [note.partition("train")[2] for note in there.notes]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({"train/cat/1.jpg": b"1", "other/1.jpg": b"1"}, "mixed layouts"),
        ({"1.jpg": b"1", "2.jpg": b"2"}, "beside the class folders"),
        ({"train/cat/1.jpg": b"1", "val/dog/1.jpg": b"1"}, "missing in val"),
    ],
)
def test_a_bucket_s_mistakes_are_told_as_a_folder_s_are(
    tmp_path: Path, s3: FaultServer, put: Put, folders: dict[str, bytes], message: str
):
    put_all(put, "photos", folders)
    with pytest.raises(UserError, match=message) as here:
        open_at(write(tmp_path / "photos", folders), tmp_path)
    with pytest.raises(UserError, match=message) as there:
        open_at("s3://shards/photos", tmp_path)
    assert str(there.value).replace("s3://shards/photos", str(tmp_path / "photos")) == str(here.value)


def test_a_list_of_labels_for_a_bucket(tmp_path: Path, s3: FaultServer, put: Put):
    put_all(put, "photos", IMAGES)
    lines = [f"s3://shards/photos/{name},{name.partition('/')[0]}" for name in IMAGES]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines[:5], *(line[19:] for line in lines[5:])]))
    labels = LabelList(tmp_path / "list.csv")
    assert images_of(open_at("s3://shards/photos", tmp_path, labels=labels)) == EXPECTED
    (tmp_path / "list.csv").write_text("path,label\ncat/999.jpg,cat")
    with pytest.raises(UserError, match=r"line 2.*not a file below s3://shards/photos"):
        open_at("s3://shards/photos", tmp_path, labels=labels)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("label", ["cls", "txt", "json"])
def test_tars_of_samples_are_one_source_wherever_they_lie(
    tmp_path: Path, s3: FaultServer, put: Put, label: str, gz: bool
):
    tars = sample_tars(label=label, gz=gz)
    put_all(put, "raw", tars)
    folder = write(tmp_path / "raw", tars)
    end = "tar.gz" if gz else "tar"
    given = {"label": {"cls": None, "txt": "txt", "json": "json:about.class"}[label]}
    places = [folder, f"{folder}/{{000..002}}.{end}", "s3://shards/raw", f"s3://shards/raw/{{000..002}}.{end}"]
    places.append(f"{s3.url}/shards/raw/{{000..002}}.{end}")
    sources = [open_at(place, tmp_path / f"work{number}", **given) for number, place in enumerate(places)]
    assert [images_of(each) for each in sources] == [EXPECTED] * len(places)
    assert {tuple(each.splits["train"].files.names) for each in sources} == {
        tuple(f"{number % 3:03d}/{number:05d}.jpg" for number in sorted(range(21), key=lambda each: (each % 3, each)))
    }


def test_class_tars_in_a_bucket_are_imagenet(tmp_path: Path, s3: FaultServer, put: Put):
    tars = {f"n0000000{n}.tar": tar_of({f"n0000000{n}_{i}.JPEG": f"{n}{i}".encode() for i in range(3)}) for n in (1, 2)}
    put_all(put, "in1k/train", tars)
    there = open_at("s3://shards/in1k/train", tmp_path / "work")
    assert images_of(there) == images_of(open_at(write(tmp_path / "in1k", tars), tmp_path / "work"))
    assert there.classes == ("n00000001", "n00000002")


def test_splits_of_tars(tmp_path: Path):
    tars = sample_tars()
    write(tmp_path / "raw/train", {name: tars[name] for name in ("000.tar", "001.tar")})
    write(tmp_path / "raw/val", {"000.tar": tars["002.tar"]})
    for spec in (tmp_path / "raw", f"{tmp_path}/raw/train/{{000..001}}.tar::{tmp_path}/raw/val/000.tar"):
        source = open_at(spec, tmp_path / "work")
        assert {split: len(images) for split, images in source.splits.items()} == {"train": 14, "val": 7}


# ---- listing


@pytest.fixture
def counted_listing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Locations whose members are walked."""
    from shardvit.data_shards.packing.sources.tars import sample_listing

    walked: list[str] = []
    real = sample_listing._of_tar

    def samples(read: Any, num_bytes: int, request: Any, number: int) -> Any:
        walked.append(request.locations[number])
        if os.environ.get("FAIL_AT") == str(number):
            raise KeyboardInterrupt
        return real(read, num_bytes, request, number)

    monkeypatch.setattr(sample_listing, "_of_tar", samples)
    return walked


def test_a_killed_listing_goes_on_without_listing_a_tar_again(
    tmp_path: Path, counted_listing: list[str], monkeypatch: pytest.MonkeyPatch
):
    folder = write(tmp_path / "raw", sample_tars(gz=True))
    monkeypatch.setenv("FAIL_AT", "2")
    with pytest.raises(KeyboardInterrupt):
        open_at(folder, tmp_path / "work")
    monkeypatch.delenv("FAIL_AT")
    (tmp_path / "work/00002.part").write_bytes(b"half")
    before, counted_listing[:] = list(counted_listing), []
    assert images_of(open_at(folder, tmp_path / "work")) == EXPECTED
    assert len(before) == 3 and [Path(each).name for each in counted_listing] == ["002.tar.gz"]
    counted_listing.clear()
    tars = sample_tars(gz=True)
    (folder / "001.tar.gz").write_bytes(tars["000.tar.gz"])  # another content: listed again
    changed = open_at(folder, tmp_path / "work")
    assert [Path(each).name for each in counted_listing] == ["001.tar.gz"] and len(images_of(changed)) == 14


def test_a_listing_is_the_same_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "_WORTH_PROCESSES_SECONDS", 0.0)  # two processes, however quick it is
    folder = write(tmp_path / "raw", sample_tars())
    sources = [open_at(folder, tmp_path / f"work{workers}", workers=workers) for workers in (1, 2)]
    assert sources[0].fingerprint() == sources[1].fingerprint()
    listings = [sorted((tmp_path / f"work{workers}/listing").iterdir()) for workers in (1, 2)]
    assert [file.name for file in listings[0]] == [file.name for file in listings[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*listings, strict=True))
    assert pq.read_table(listings[0][0]).num_rows == 7


def test_a_remote_tar_is_read_once_in_order_and_large_members_not_at_all(tmp_path: Path, s3: FaultServer, put: Put):
    rng = np.random.default_rng(0)
    big = {f"{n}.{end}": data for n in range(3) for end, data in (("jpg", rng.bytes(9_000_000)), ("cls", b"0"))}
    put_all(put, "raw", {"000.tar": tar_of(big)})
    s3.requests.clear()
    source = open_at("s3://shards/raw/000.tar", tmp_path / "work")
    spans = [span.removeprefix("bytes=").split("-") for _, path, span in s3.requests if path.endswith(".tar") and span]
    assert len(source.splits["train"]) == 3
    assert sum(1 + int(last) - int(first) for first, last in spans) < 14_000_000  # of 27


# ---- what cannot be used


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, s3: FaultServer, server: FaultServer, put: Put):
    folder = write(tmp_path / "raw", sample_tars(label="json"))
    assert "json:about.class" in refused_at(folder, tmp_path, "no .cls member")
    refused_at(folder, tmp_path, "caption", label="json:caption.more")
    refused_at("pipe:cat x.tar", tmp_path, "command")
    refused_at(f"{folder}/{{000..003}}.tar", tmp_path, "003.tar: there is no such tar", label="json:about.class")
    refused_at(f"{folder}/{{000..000}}.tar::{folder}/000.tar", tmp_path, "twice", label="json:about.class")
    refused_at(server.url + "/photos/", tmp_path, "web server")
    refused_at("s3://shards/nothing/", tmp_path, "nothing in it")
    refused_at("s3://shards/raw/{a,b}/", tmp_path, "pattern stands for tars")
    refused_at(touch(tmp_path / "folders", "a/1.jpg", "b/1.jpg"), tmp_path, "0 .cls members", label="cls")
    refused_at(touch(tmp_path / "more", "a/1.jpg", "b/1.jpg"), tmp_path, "--label-kind", kind="multi")


@pytest.mark.parametrize(
    ("name", "message"), [("../../x.jpg", "leads outside"), ("/etc/x.jpg", "leads outside"), ("link", "is a link")]
)
def test_unsafe_members_are_refused_at(tmp_path: Path, name: str, message: str):
    with tarfile.open(tmp_path / "000.tar", "w") as tar:
        info = tarfile.TarInfo("a.jpg" if name == "link" else name)
        if name == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info, io.BytesIO())
    refused_at(f"{tmp_path}/{{000..000}}.tar", tmp_path / "work", message, label="cls")


def test_damaged_and_odd_samples_are_refused_or_passed_over(tmp_path: Path):
    whole = tar_of({"1.jpg": b"1", "1.cls": b"0", "2.jpg": b"2", "3.jpg": b"3", "3.cls": b"no\xff", "4.cls": b"1"})
    again = tar_of({"1.jpg": b"5", "1.cls": b"1", "2.jpg": b"6", "2.cls": b"1", "1.png": b"7", "1.txt": b""})
    folder = write(
        tmp_path / "raw", {"0.tar": whole, "1.tar": again, "2.tar": tar_of({"a.jpg": b"8" * 999, "a.cls": b"0"})[:900]}
    )
    refused_at(folder, tmp_path / "work", "skip-unreadable", label="cls")
    source = open_at(folder, tmp_path / "work", label="cls", unfit="skip")
    assert {data for _, _, data in images_of(source)} == {b"1", b"5", b"6"}
    assert {"0/2", "0/3", "0/4"} <= {each.path for each in source.left_out} and any(
        "cut short" in each for each in source.notes
    )


def test_a_gzipped_tar_that_is_cut(tmp_path: Path):
    tars = sample_tars(gz=True)
    folder = write(tmp_path / "raw", {name: data[: len(data) // 2] for name, data in tars.items()})
    refused_at(folder, tmp_path / "work", "cannot be decompressed", label="cls")


def test_class_names_and_several_labels(tmp_path: Path):
    tar = tar_of({"1.jpg": b"1", "1.json": b'{"tags": ["b", "a"]}', "2.jpg": b"2", "2.json": b'{"tags": []}'})
    folder = write(tmp_path / "raw", {"0.tar": tar})
    (tmp_path / "names.txt").write_text("z\nb\na\n")
    given = {"label": "json:tags", "kind": "multi", "class_names": tmp_path / "names.txt"}
    source = open_at(folder, tmp_path / "work", **given)
    assert source.kind == "multi" and source.classes == ("z", "b", "a")
    assert source.splits["train"].labels.tolist() == [[1, 2], [-1, -1]]
    (tmp_path / "names.txt").write_text("z\nb\n")
    assert "--class-names" in refused_at(folder, tmp_path / "work", "'a'", **given)
