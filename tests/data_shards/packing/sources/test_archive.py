"""Archives read in place: the files that tarfile finds, in tars and tars within tars, and one sentence for damage."""

import gzip
import io
import pickle
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import archive, decompress
from shardvit.data_shards.packing.sources.archive import Archive, Unpacking, inner_name, list_archives
from shardvit.data_shards.packing.sources.located import LocatedFiles
from tests.data_shards.packing.sources.layouts import tar_bytes

INNER = {"n1/a.JPEG": b"one", "n1/b.JPEG": b"x" * 700, "n2/c.JPEG": b""}


def nested() -> bytes:
    inner = {
        "n1.tar": tar_bytes({"a.JPEG": b"one", "b.JPEG": b"x" * 700}),
        "loose.txt": b"text",
        "n2.tar": tar_bytes({"n2/c.JPEG": b""}, folders=True),  # with the class once more
    }
    return tar_bytes(inner)


def files(listing: LocatedFiles) -> dict[str, bytes]:
    return {name: listing.read(row) for row, name in enumerate(listing.names)}


def listed(path: Path) -> LocatedFiles:
    return list_archives([Archive(path, Unpacking(path.parent / "unpacked", report=lambda line: None))])


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_has_the_files_that_tarfile_finds(tmp_path: Path, format: int):
    path = tmp_path / "a.tar"
    long = "d" * 90 + "/" + "ü" * 40 + ".JPEG"
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in {"./a/1.JPEG": b"1", long: b"2" * 513, "a//2.JPEG": b"3"}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), 1.5 if format == tarfile.PAX_FORMAT else 1
            tar.addfile(entry, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            entry = tarfile.TarInfo("a/other" + kind.decode())
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    assert files(listed(path)) == {"a/1.JPEG": b"1", long: b"2" * 513, "a/2.JPEG": b"3"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_an_image_that_is_a_link_is_told_not_lost(tmp_path: Path, kind: bytes):
    """As tar writes the second name of a file that has two."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes({"a/1.jpg": b"1"}))
    with tarfile.open(path, "a") as tar:
        entry = tarfile.TarInfo("b/2.JPG")
        entry.type, entry.linkname = kind, "a/1.jpg"
        tar.addfile(entry)
    with pytest.raises(UserError, match=r"b/2\.JPG.* link"):
        listed(path)


def test_tars_within_a_tar(tmp_path: Path):
    (tmp_path / "all.tar").write_bytes(nested())
    found = files(listed(tmp_path / "all.tar"))
    assert found == {**INNER, "loose.txt": b"text"}


@pytest.mark.parametrize(
    "beside",
    [
        {"a/1.png": b"outside"},
        {"a.TAR": tar_bytes({"1.png": b"another tar"})},
        {"x": b"", "a/b.tar": tar_bytes({"1.png": b"deeper"}), "a.tar": tar_bytes({"b/1.png": b"inside"})},
        {"./a//1.png": b"spelt otherwise"},
    ],
)
def test_two_images_of_one_name_are_refused(tmp_path: Path, beside: dict[str, bytes]):
    (tmp_path / "all.tar").write_bytes(tar_bytes({"a.tar": tar_bytes({"1.png": b"inside", "2.png": b""}), **beside}))
    for _ in range(2):  # it is not remembered as good
        with pytest.raises(UserError, match=r"all\.tar: it holds a/(b/)?1\.png twice"):
            listed(tmp_path / "all.tar")


def test_files_of_different_names_from_a_tar_and_beside_it_are_all_there(tmp_path: Path):
    inner = tar_bytes({"1.png": b"inside", "notes.txt": b"inside"})
    (tmp_path / "all.tar").write_bytes(tar_bytes({"a.tar": inner, "a/2.png": b"outside", "a/notes.txt": b"outside"}))
    found = list(listed(tmp_path / "all.tar").names)
    assert sorted(found) == ["a/1.png", "a/2.png", "a/notes.txt", "a/notes.txt"]


def test_tars_in_a_folder_are_named_by_themselves(tmp_path: Path):
    (tmp_path / "n1.tar").write_bytes(tar_bytes({"a.JPEG": b"one", "b.JPEG": b"x" * 700}))
    (tmp_path / "n2.tar").write_bytes(tar_bytes({"n2/c.JPEG": b""}))
    found = list_archives([Archive(tmp_path / f"n{i}.tar") for i in (1, 2)], folder=tmp_path)
    assert files(found) == INNER and found.container.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["all.tar.gz", "ALL.TGZ"])
def test_a_gzipped_tar_is_decompressed_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / name
    path.write_bytes(gzip.compress(nested()))
    found = listed(path)
    monkeypatch.setattr(decompress, "_decompress", lambda *_: pytest.fail("again"))
    assert files(found) == {**INNER, "loose.txt": b"text"}
    assert len(list((tmp_path / "unpacked").iterdir())) == 1


def test_what_a_killed_process_left_half_written_is_written_over(tmp_path: Path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(nested()))
    listed(path)
    (made,) = (tmp_path / "unpacked").iterdir()
    made.rename(made.with_name(f".{made.name}.writing"))
    made.with_name(f".{made.name}.writing").write_bytes(b"half")
    assert files(listed(path))["n1/a.JPEG"] == b"one"
    assert [each.name for each in (tmp_path / "unpacked").iterdir()] == [made.name]


def test_what_was_listed_is_remembered_until_the_archive_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.tar"
    path.write_bytes(nested())
    before = files(listed(path))
    with monkeypatch.context() as patch:
        patch.setattr(archive, "walk_tar", lambda *_, **__: pytest.fail("walked again"))
        assert files(listed(path)) == before
    path.write_bytes(tar_bytes({"other.JPEG": b"new"}))
    assert files(listed(path)) == {"other.JPEG": b"new"}


def test_a_gzipped_tar_that_is_remembered_is_decompressed_when_it_is_read(tmp_path: Path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(nested()))
    listed(path)
    shutil.rmtree(tmp_path / "unpacked")
    again = listed(path)
    assert not (tmp_path / "unpacked").exists()
    assert files(again)["n1/a.JPEG"] == b"one"


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("code of a file was run",)


@pytest.mark.parametrize("change", ["garbage", "objects", "offsets", "archives", "names"])
def test_a_remembered_listing_that_lies_is_not_used(tmp_path: Path, listings: Path, change: str):
    path = tmp_path / "a.tar"
    path.write_bytes(nested())
    before = files(listed(path))
    (kept,) = listings.rglob("*.npz")
    with np.load(kept) as content:
        arrays = dict(content)
    match change:
        case "garbage":
            kept.write_bytes(pickle.dumps(Evil()))
        case "objects":
            np.savez(kept, **{**arrays, "offset": np.array([Evil()], dtype=object)})
        case "offsets":
            np.savez(kept, **{**arrays, "offset": -arrays["offset"] - 1})
        case "archives":
            np.savez(kept, **{**arrays, "archive": arrays["archive"] + 7})
        case "names":
            np.savez(kept, **{**arrays, "ends": arrays["ends"] + 1000})
    assert files(listed(path)) == before


def test_an_archive_that_is_replaced_after_it_was_listed_is_noticed(tmp_path: Path):
    path = tmp_path / "a.tar"
    path.write_bytes(nested())
    found = listed(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(OSError, match="changed"):
        found.read(0)
    path.write_bytes(b"")
    with pytest.raises(OSError, match="changed"):
        found.read(0)


@pytest.mark.parametrize("name", ["../x.JPEG", "/etc/x.JPEG", "a/../../x.JPEG"])
@pytest.mark.parametrize("within", [False, True])
def test_a_name_that_leads_outside_is_refused(tmp_path: Path, name: str, within: bool):
    data = tar_bytes({"a/1.JPEG": b"1", name: b"2"})
    (tmp_path / "a.tar").write_bytes(tar_bytes({"n1.tar": data}) if within else data)
    with pytest.raises(UserError, match=r"a\.tar: .*outside"):
        listed(tmp_path / "a.tar")


@given(st.lists(st.sampled_from(["a", "b.JPEG", ".", "..", "", "ü"]), max_size=6))
def test_inner_names_stay_inside(parts: list[str]):
    name = "/".join(parts)
    try:
        found = inner_name(name, archive=Path("a.tar"))
    except UserError:
        assert name.startswith("/") or ".." in parts or not {*parts} - {"", "."}
    else:
        assert Path("/top", found).resolve().is_relative_to("/top") and found == str(Path(name))


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("cut", [100, 1500, 5000])
def test_an_archive_that_is_cut_short_is_one_sentence(tmp_path: Path, gzipped: bool, cut: int):
    data = nested()
    path = tmp_path / ("a.tar.gz" if gzipped else "a.tar")
    noise = np.random.default_rng(0).bytes(9000)  # or it would compress to less than the cut
    data = tar_bytes({"n1.tar": tar_bytes({"a.JPEG": noise}), "n2.tar": data})
    path.write_bytes(gzip.compress(data)[:cut] if gzipped else data[:cut])
    with pytest.raises(UserError, match=r"a\.tar.*fetch it again") as caught:
        listed(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "unpacked").exists() or not list((tmp_path / "unpacked").iterdir())


def test_a_tar_that_is_damaged_inside_names_the_inner_one(tmp_path: Path):
    inner = bytearray(tar_bytes({"a.JPEG": b"1", "b.JPEG": b"2"}))
    inner[1024 + 150] ^= 0xFF
    (tmp_path / "all.tar").write_bytes(tar_bytes({"n1.tar": tar_bytes({"x.JPEG": b"1"}), "n7.tar": bytes(inner)}))
    with pytest.raises(UserError, match=r"all\.tar \(n7\.tar in it\)"):
        listed(tmp_path / "all.tar")


def test_a_full_disk_is_told_before_and_a_missing_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(nested()))
    with pytest.raises(UserError, match="gunzip"):
        list_archives([Archive(path)])
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(decompress.shutil, "disk_usage", lambda _: usage(free=10))
    with pytest.raises(UserError, match=r"10 B are free; make room"):
        listed(path)


def test_the_use_of_the_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(nested()))
    monkeypatch.setattr(decompress, "_SAID_BYTES", 1)
    lines: list[str] = []
    list_archives([Archive(path, Unpacking(tmp_path / "there", lines.append))])
    assert len(lines) == 1 and str(tmp_path / "there") in lines[0] and "removed" in lines[0]
