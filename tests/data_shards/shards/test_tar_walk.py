"""The walk finds what tarfile finds in tars of every dialect, and notices damage that tarfile passes over."""

import io
import os
import re
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardvit.data_shards.shards.tar_walk import Member, TarDamage, walk_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KINDS = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
KINDS += [tarfile.FIFOTYPE, b"V", b"D"]  # of GNU: a label of the volume, a listing of a folder


def walk(path: Path) -> list[Member]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(walk_tar(descriptor))
    finally:
        os.close(descriptor)


def byte_of(damage: TarDamage) -> int:
    found = re.search(r"byte (\d+)", str(damage))
    assert found is not None
    return int(found[1])


def walk_until_damage(path: Path) -> tuple[list[Member], TarDamage | None]:
    members: list[Member] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for member in walk_tar(descriptor):
            members.append(member)
    except TarDamage as error:
        return members, error
    finally:
        os.close(descriptor)
    return members, None


class WithoutOwner(tarfile.TarInfo):
    """Read by tarfile a header whose mode, owner, time and device, which a walk ignores, are empty.

    It ends at a header in which one of them is no number. Garbage there can keep the checksum: a sum of signed bytes
    counts too.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
        with suppress(tarfile.HeaderError):
            if len(buf) == 512 and tarfile.nti(buf[148:156]) in tarfile.calc_chksums(buf):
                empty = bytearray(buf)
                for field in (slice(100, 124), slice(136, 148), slice(329, 345)):
                    empty[field] = bytes(field.stop - field.start)
                empty[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(empty))[0]
                buf = bytes(empty)
        return super().frombuf(buf, encoding, errors)


def by_tarfile(path: Path) -> list[Member]:
    """List members up to where tarfile stops."""
    found: list[Member] = []
    with suppress(tarfile.ReadError), tarfile.open(path, "r:", tarinfo=WithoutOwner) as tar:
        for each in tar:
            if each.isreg():
                found.append(Member(each.name, each.offset_data, each.size))
    return found


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=40)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)
members = st.tuples(paths, st.sampled_from(KINDS), st.binary(max_size=1300), st.sampled_from([0, 1.5, 1.7e9 + 0.123]))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(members, max_size=6), st.booleans())
def test_the_members_are_tarfiles(
    tmp_path_factory: pytest.TempPathFactory, format: int, content: list[tuple[str, bytes, bytes, float]], header: bool
):
    path = tmp_path_factory.mktemp("t") / "a.tar"
    pax = {"comment": "made by a test"} if header and format == tarfile.PAX_FORMAT else None
    with tarfile.open(path, "w", format=format, pax_headers=pax) as tar:
        for name, kind, data, mtime in content:
            info = tarfile.TarInfo(name)
            info.type, info.mtime, info.linkname = kind, mtime, "x" * 150  # type: ignore[assignment]
            info.linkname = "x" * (150 if format != tarfile.USTAR_FORMAT else 50)
            has_data = kind in (*tarfile.REGULAR_TYPES, b"V", b"D")
            info.size = len(data) if has_data else 0
            try:
                tar.addfile(info, io.BytesIO(data) if has_data else None)
            except ValueError:  # a name that ustar has no room for
                continue
    assert walk(path) == by_tarfile(path)


def test_tars_of_the_tar_command(tmp_path: Path):
    (tmp_path / "in" / ("d" * 120)).mkdir(parents=True)
    for name in ("a.jpg", "a.cls", f"{'d' * 120}/{'n' * 130}.jpg", "ü.jpg"):
        (tmp_path / "in" / name).write_bytes(name.encode() * 100)
    os.link(tmp_path / "in" / "a.jpg", tmp_path / "in" / "hard.jpg")
    os.symlink("a.jpg", tmp_path / "in" / "soft.jpg")
    for form in ("gnu", "oldgnu", "pax", "posix"):
        path = tmp_path / f"{form}.tar"
        subprocess.run(["tar", f"--format={form}", "-cf", path, "-C", tmp_path, "in"], check=True)
        assert walk(path) == by_tarfile(path) and len(walk(path)) == 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=5), st.integers(0, 5), st.integers(0, 40))
def test_a_tar_within_a_file_is_walked_as_one_alone(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], before: int, lost: int
):
    """A part ends where it should, though more headers follow."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i, size in enumerate(sizes):
            entry = tarfile.TarInfo(f"{i}.jpg")
            entry.size = size
            tar.addfile(entry, io.BytesIO(bytes([i + 1]) * size))
    whole = buffer.getvalue()
    inner = whole[: len(whole) - 512 * lost]
    alone, around = (tmp_path_factory.mktemp("tars") / name for name in ("alone.tar", "around.tar"))
    alone.write_bytes(inner)
    start = 512 * before
    around.write_bytes(b"x" * start + inner + whole)
    expected, damage = walk_until_damage(alone)
    found: list[Member] = []
    told: TarDamage | None = None
    descriptor = os.open(around, os.O_RDONLY)
    try:
        found += walk_tar(descriptor, start=start, end=start + len(inner))
    except TarDamage as error:
        told = error
    finally:
        os.close(descriptor)
    assert (told is None) == (damage is None)
    if told is None or damage is None:
        assert [(name, offset - start, size) for name, offset, size in found] == expected
    else:
        assert byte_of(told) == byte_of(damage) + start


def test_numbers_beyond_octal_digits(tmp_path: Path):
    """GNU's binary sizes: of 9 GB in a sparse file, which costs no disk."""
    path = tmp_path / "big.tar"
    info = tarfile.TarInfo("big.jpg")
    info.size = 9 * 10**9
    last = tarfile.TarInfo("last.jpg")
    with open(path, "wb") as stream:
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        stream.seek(512 + -(-info.size // 512) * 512)
        stream.write(last.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert walk(path) == by_tarfile(path) == [Member("big.jpg", 512, info.size), Member("last.jpg", 9_000_001_024, 0)]


def test_signed_checksums_of_ancient_tars(tmp_path: Path):
    info = tarfile.TarInfo("ü.jpg")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[148:156] = b" " * 8
    signed = sum(byte - 256 if byte > 127 else byte for byte in header)
    header[148:156] = b"%06o\0 " % signed
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(header) + bytes(1024))
    assert walk(path) == by_tarfile(path) == [Member("ü.jpg", 512, 0)]


def plain(folder: Path, *, format: int = tarfile.PAX_FORMAT, mtime: float = 1.5) -> Path:
    path = folder / "a.tar"
    with tarfile.open(path, "w", format=format) as tar:
        for number in range(4):
            for part, size in (("cls", 1), ("jpg", 700 * number)):
                info = tarfile.TarInfo(f"k{number}.{part}")
                info.size, info.mtime = size, mtime  # type: ignore[assignment]
                tar.addfile(info, io.BytesIO(bytes([number + 1]) * size))
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_every_truncation_is_told_with_its_byte_and_what_was_before_it(tmp_path: Path, format: int):
    path = plain(tmp_path, format=format)
    whole, data = walk(path), path.read_bytes()
    end = whole[-1].offset + -(-whole[-1].size // 512) * 512
    for length in {*range(0, end + 512, 128), *(member.offset + member.size - 1 for member in whole), end + 511}:
        path.write_bytes(data[:length])
        found, damage = walk_until_damage(path)
        assert damage is not None
        assert byte_of(damage) == (0 if length < 512 else length), (length, str(damage))
        assert found == [member for member in whole if member.offset + member.size <= length]
    path.write_bytes(data[: end + 512])  # one block of zeros is an end
    assert walk(path) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), st.data())
def test_a_garbled_header_is_never_a_wrong_member(
    tmp_path_factory: pytest.TempPathFactory, format: int, data: st.DataObject
):
    """A byte of a header changed: noticed there, with all before it, unless it is one that says nothing here."""
    path = plain(tmp_path_factory.mktemp("t"), format=format, mtime=1)
    whole, content = walk(path), bytearray(path.read_bytes())
    victim = data.draw(st.sampled_from(whole))
    header = victim.offset - 512
    at = header + data.draw(st.integers(0, 511))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found, damage = walk_until_damage(path)
    if damage is None:
        assert found == whole and at in range(header + 148, header + 156)  # 0o1234 as " 1234" is the same number
    else:
        assert byte_of(damage) == header and str(header) in str(damage)
        assert found == [member for member in whole if member.offset <= header]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 15), st.binary(min_size=1, max_size=600))
@example(108, b"'t\xf5")  # an owner that is no number, and yet the checksum fits
def test_any_garbage_ends_in_damage_or_in_what_tarfile_finds(
    tmp_path_factory: pytest.TempPathFactory, start: int, garbage: bytes
):
    path = plain(tmp_path_factory.mktemp("t"))
    content = bytearray(path.read_bytes())
    start %= len(content)
    content[start : start + len(garbage)] = garbage
    path.write_bytes(content)
    found, damage = walk_until_damage(path)
    expected = by_tarfile(path)
    assert found == expected[: len(found)]
    assert damage is not None or found == expected


def test_zeros_in_the_middle_and_joined_tars_are_damage(tmp_path: Path):
    path = plain(tmp_path)
    whole, data = walk(path), path.read_bytes()
    path.write_bytes(data + data)
    found, damage = walk_until_damage(path)
    assert found == whole and damage is not None and f"data at byte {len(data)}" in str(damage)
    hole = bytearray(data)
    start = whole[2].offset - 3 * 512  # the pax header of it, and its own
    hole[start : start + 4096] = bytes(4096)
    path.write_bytes(hole)
    found, damage = walk_until_damage(path)
    assert found == whole[:2] and damage is not None and byte_of(damage) == start


def test_what_cannot_be_read_in_place_is_refused(tmp_path: Path):
    (tmp_path / "sparse").write_bytes(b"")
    with open(tmp_path / "sparse", "wb") as stream:
        stream.truncate(10**6)
        stream.seek(500_000)
        stream.write(b"x" * 5000)
    for form in ("gnu", "pax"):
        path = tmp_path / f"{form}.tar"
        subprocess.run(["tar", "-S", f"--format={form}", "-cf", path, "-C", tmp_path, "sparse"], check=True)
        assert "sparse" in str(walk_until_damage(path)[1])


@pytest.mark.parametrize("data", [b"", b"x", b"\x1f\x8b" + bytes(600), b"<html>" * 200, b"\x1f\x8b\x08"])
def test_what_is_no_tar(tmp_path: Path, data: bytes):
    (tmp_path / "a").write_bytes(data)
    found, damage = walk_until_damage(tmp_path / "a")
    assert not found and damage is not None and byte_of(damage) == 0
    assert not data or "uncompressed tar" in str(damage)


@pytest.mark.parametrize("record", [b"x", b"5 a=\n", b"99 path=x\n", b"7 path=", b"13 size=-512\n", b"12 size=1x2\n"])
def test_broken_pax_records(tmp_path: Path, record: bytes):
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(record)
    path = tmp_path / "a.tar"
    member = tarfile.TarInfo("k.jpg").tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0") + member + bytes(1024))
    found, damage = walk_until_damage(path)
    assert damage is None if record == b"5 a=\n" else not found and damage is not None and byte_of(damage) == 0
