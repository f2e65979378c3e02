"""Planted copies are found, and nothing else; in both size relations, in parts and blocks, and from kept files."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.checking.near_duplicates import disk_join
from shardvit.data_shards.checking.near_duplicates import matches as matches_module
from shardvit.data_shards.checking.near_duplicates.candidates import find_candidates
from shardvit.data_shards.checking.near_duplicates.fingerprint import ROW, KeptFingerprints, ShardImages
from shardvit.data_shards.checking.near_duplicates.matches import find_matches
from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.store.store import Store
from tests.data_shards.checking.near_duplicates.drawn_scenes import drawn_floors, scenes
from tests.data_shards.checking.near_duplicates.planted import (
    EDITS,
    MORE_EDITS,
    InMemory,
    edited,
    jpeg,
    matches,
    pairs,
    photographs,
    png,
)


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join on disk whatever the size, in several cuts and ranges of images."""
    monkeypatch.setattr(matches_module, "_JOINED_ON_DISK", 0)
    monkeypatch.setattr(disk_join, "_CUT_ENTRIES", 200)
    monkeypatch.setattr(disk_join, "_KEY_ENTRIES", 0.01)  # all bits
    monkeypatch.setattr(disk_join, "_BATCH_IMAGES", 40)


def planted(edit: str, *, side: int) -> tuple[list[bytes], list[bytes]]:
    """60 photographs; and 40 others followed by edited copies of the last 30 of them."""
    images = photographs(100, side=side, seed=side)
    copies = [edited(image, edit, seed=seed) for seed, image in enumerate(images[30:60])]
    quality = 50 if edit == "quality 50" else 90
    return [jpeg(image) for image in images[:60]], [
        *(jpeg(image) for image in images[60:]),
        *(jpeg(image, quality=quality) for image in copies),
    ]


@pytest.mark.parametrize(
    "direction", ["copies in the larger set", "copies in the smaller set", "the copies are others"]
)
@pytest.mark.parametrize("side", [32, 64])
def test_planted_copies_are_found_and_nothing_else(side: int, direction: str, tmp_path: Path):
    found = expected = right = 0
    for edit in EDITS:
        originals, with_copies = planted(edit, side=side)
        if direction == "copies in the smaller set":
            upside_down = (image.rotate(180) for image in photographs(60, side=side, seed=5))
            originals = originals + [jpeg(image) for image in upside_down]
        if direction == "the copies are others":
            result = pairs(matches(InMemory(originals), InMemory(with_copies), folder=tmp_path / edit))
            true = {30 + number: 40 + number for number in range(30)}
        else:
            result = pairs(matches(InMemory(with_copies), InMemory(originals), folder=tmp_path / edit))
            true = {40 + number: 30 + number for number in range(30)}
        expected += len(true)
        same = {image: other for image, (other, kind) in result.items() if kind == "near-duplicate"}
        found += len(same)
        right += sum(true.get(image) == other for image, other in same.items())
    assert right / expected >= 0.98
    assert right / found >= 0.99


@pytest.mark.parametrize("edit", MORE_EDITS)
def test_what_shows_a_part_or_has_no_colours_is_found_from_either_side(edit: str, tmp_path: Path):
    images = [image.resize((160, 120)) for image in photographs(80, side=160)]
    copies = InMemory((jpeg(edited(image, edit, seed=seed)) for seed, image in enumerate(images[:60])), name="copies")
    originals = InMemory(map(jpeg, images), name="originals")
    least = {"cropped 70 %": 0.7, "mirrored, cropped 75 %": 0.8}.get(edit, 0.95)
    for here, there in ((copies, originals), (originals, copies)):
        same = [match for match in matches(here, there, folder=tmp_path).matches if match.kind == "near-duplicate"]
        right = [match for match in same if match.image == match.other]
        assert len(right) >= 60 * least and len(same) - len(right) <= 0.02 * len(same)


@pytest.mark.parametrize("twins", [False, True])
def test_other_garments_on_the_same_floor_are_other_pictures(twins: bool, tmp_path: Path):
    """A twin is the same garment in another colour."""
    floors = drawn_floors(np.random.default_rng(0), 2, size=(180, 240))
    garments = scenes(floors, 24, seed=0)
    others = scenes(floors, 24, seed=0 if twins else 1, twins=twins)
    here, there = (InMemory(map(jpeg, each), name=name) for each, name in ((garments, "here"), (others, "there")))
    assert [match for match in matches(here, there, folder=tmp_path).matches if match.kind != "unsure"] == []
    again = InMemory((jpeg(image, quality=50) for image in garments), name="again")
    same = [match for match in matches(again, there, here, folder=tmp_path).matches if match.kind == "near-duplicate"]
    assert [match.image for match in same] == [match.other for match in same]
    assert len(same) >= 22 and {match.collection for match in same} == {1}


def test_what_was_changed_in_one_place_is_unsure_and_comes_after_what_is_the_same(tmp_path: Path):
    images = photographs(12)
    copies = [jpeg(edited(image, "changed")) for image in images[3:8]] + [jpeg(images[9], quality=50), jpeg(images[10])]
    found = matches(InMemory(copies), InMemory(map(jpeg, images), name="there"), folder=tmp_path).matches
    kinds = [match.kind for match in found]
    assert kinds[:2] == ["equal-bytes", "near-duplicate"] and set(kinds[2:]) == {"unsure"} and len(kinds) == 7
    assert [match.other for match in found[:2]] == [10, 9]
    likeness = [match.likeness for match in found[2:]]
    assert likeness == sorted(likeness, reverse=True)


def test_equal_bytes_and_equal_pixels_are_told_apart(tmp_path: Path):
    images = photographs(3)
    here = InMemory([png(images[0]), png(images[1]), jpeg(images[2])])
    lossless = edited(images[1], "none").convert("RGB")
    there = InMemory([jpeg(images[2]), png(images[0]), png(lossless) + b"more after the end"], name="there")
    assert pairs(matches(here, there, folder=tmp_path)) == {
        0: (1, "equal-bytes"),
        1: (2, "equal-pixels"),
        2: (0, "equal-bytes"),
    }


def test_plain_and_tiny_images_match_by_equal_pixels_alone(tmp_path: Path):
    plain = [Image.new("RGB", (40, 40), (shade, shade, shade)) for shade in (10, 10, 200)]
    tiny = [image.resize((12, 12)) for image in photographs(2)]
    here = InMemory(map(png, [*plain, *tiny]))
    other = tiny[0].copy()
    other.putpixel((3, 3), (255, 0, 0))
    there = InMemory([png(plain[0]) + b".", jpeg(plain[2]), png(other), png(tiny[1]) + b"."], name="there")
    found = pairs(matches(here, there, folder=tmp_path))
    grey_jpeg = {2: (1, "equal-pixels")}  # a plain grey survives JPEG as it is
    assert found == {0: (0, "equal-pixels"), 1: (0, "equal-pixels"), 4: (3, "equal-pixels"), **grey_jpeg}


def test_grey_images_of_any_mode_match(tmp_path: Path):
    grey = [image.convert("L") for image in photographs(6)]
    deep = [Image.fromarray(np.asarray(image).astype(np.uint16) * 257) for image in grey]
    here = InMemory([*map(jpeg, grey[:3]), *map(png, deep[3:])])
    found = pairs(matches(here, InMemory(map(png, grey), name="there"), folder=tmp_path))
    assert {image: other for image, (other, _) in found.items()} == {number: number for number in range(6)}
    assert [found[number][1] for number in (3, 4, 5)] == ["equal-pixels"] * 3


def test_damaged_images_are_counted_and_compared_by_bytes(tmp_path: Path):
    images = [jpeg(image) for image in photographs(4)]
    here = InMemory([images[0][:400], b"no image", None, images[3]], name="here")
    there = InMemory([images[0], b"no image", images[3]], name="there")
    found = matches(here, there, folder=tmp_path)
    assert pairs(found) == {1: (1, "equal-bytes"), 3: (2, "equal-bytes")}
    assert found.undecoded == {"here": 3, "there": 1}


def test_within_a_collection_the_later_copy_is_named(tmp_path: Path):
    images = photographs(20)
    all_images = [*map(jpeg, images), jpeg(images[4]), jpeg(edited(images[7], "x 0.7"))]
    found = pairs(matches(*[InMemory(all_images, part_size=6)] * 2, folder=tmp_path))
    assert found == {20: (4, "equal-bytes"), 21: (7, "near-duplicate")}


@pytest.mark.parametrize(("part_size", "block"), [(3, 1), (7, 10)])
def test_parts_and_blocks_change_nothing(part_size: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def in_blocks(*args, **options):
        return find_candidates(*args, **options, block_images=block)

    monkeypatch.setattr(matches_module, "find_candidates", in_blocks)
    originals, with_copies = (images[-14:] for images in planted("cropped", side=48))
    for here, there in ((with_copies, originals), (originals, with_copies), (originals[:5], with_copies)):
        parts = InMemory(here, part_size=part_size), InMemory(there, part_size=part_size, name="there")
        whole = InMemory(here), InMemory(there, name="there")
        found = pairs(matches(*parts, folder=tmp_path / "parts"))
        monkeypatch.setattr(matches_module, "find_candidates", find_candidates)
        assert found == pairs(matches(*whole, folder=tmp_path / "whole"))
        monkeypatch.setattr(matches_module, "find_candidates", in_blocks)


def test_a_second_time_nothing_is_hashed_again_but_a_damaged_file_is(tmp_path: Path):
    originals, with_copies = planted("x 0.7", side=32)
    first = matches(InMemory(with_copies, part_size=20), InMemory(originals, name="there"), folder=tmp_path)
    again = InMemory(with_copies, part_size=20)
    second = matches(again, InMemory(originals, name="there"), folder=tmp_path)
    assert pairs(first) == pairs(second) and again.reads < 40  # candidates alone
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-30])
    third = InMemory(with_copies, part_size=20)
    assert pairs(matches(third, InMemory(originals, name="there"), folder=tmp_path)) == pairs(first)
    assert third.reads >= 70


def test_processes_change_nothing(tmp_path: Path):
    originals, with_copies = planted("mirrored", side=32)
    alone = matches(InMemory(with_copies), InMemory(originals), folder=tmp_path / "1")
    several = [InMemory(images, part_size=20, read_by="processes") for images in (with_copies, originals)]
    assert pairs(matches(*several, folder=tmp_path / "2", processes=2)) == pairs(alone)


class Crashing(InMemory):
    """To read image 3 again ends a helper process, as a crash of a decoder does."""

    def __init__(self, images: list[bytes]) -> None:
        super().__init__(images, name="here", read_by="processes")
        self.owner = os.getpid()

    def read(self, part: int, row: int) -> bytes:
        if row == 3 and os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(part, row)


def test_a_crash_while_comparing_is_counted_and_costs_no_other_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matches_module, "_WORTH_PROCESSES", 1)
    monkeypatch.setattr(matches_module, "_IMAGES_AT_ONCE", 5)
    images = photographs(12)
    originals, copies = [*map(jpeg, images)], [jpeg(image, quality=50) for image in images]
    copies[1] = originals[1]
    there = InMemory(originals, name="there", read_by="processes")
    whole = pairs(matches(InMemory(copies), there, folder=tmp_path))  # and keeps the fingerprints
    assert len(whole) == 12 and whole[1] == (1, "equal-bytes")
    found = matches(Crashing(copies), there, folder=tmp_path, processes=2)
    assert pairs(found) == {image: whole[image] for image in (1, *range(6, 12))}
    assert found.undecoded == {"here": 5}


def test_a_picture_a_thousand_times_on_both_sides_is_no_square(tmp_path: Path):
    same = jpeg(photographs(1)[0])
    sizes = ((1500, 1500), (1500, 1000))
    for here, there in (*sizes, (1000, 1500)):
        collections = InMemory([same] * here, part_size=500), InMemory([same] * there, part_size=500, name="there")
        collections[0].digest += "other"
        found = matches(*collections, folder=tmp_path)
        assert [match.kind for match in found.matches] == ["equal-bytes"] * here


def test_a_shard_that_was_damaged_and_is_mended_is_hashed_again(tmp_path: Path):
    """What is kept of it is not taken for the good file's, which has the same digest in the manifest."""
    images = [jpeg(image) for image in photographs(6)]
    for name in ("here", "there"):
        for number, data in enumerate(images):
            file = tmp_path / name / "cat" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        pack(str(tmp_path / name), tmp_path / f"{name}-shards", report=lambda line: None)

    def found() -> int:
        here, there = (
            ShardImages(open_shards(str(tmp_path / f"{name}-shards" / "train")), Store(), damaged="report")
            for name in ("here", "there")
        )
        quiet = {"engine": local_engine(1), "report": lambda line: None}
        return len(find_matches(here, [there], folder=tmp_path / "kept", **quiet).matches)

    (tar,) = (tmp_path / "here-shards" / "train").glob("*.tar")
    good = tar.read_bytes()
    tar.write_bytes(good.replace(b"\xff\xd8\xff", b"\0\0\0"))
    assert found() == 0
    tar.write_bytes(good)
    assert found() == 6


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("edit", ["quality 50", "x 0.7", "x 1.4", "mirrored", "grey", "cropped", "border", "square"])
@pytest.mark.parametrize("sides", ["two sets", "one set"])
def test_the_join_on_disk_finds_what_memory_finds_and_nothing_else(
    edit: str, sides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    images = [image.resize((120, 90)) for image in photographs(100, side=160)]
    quality = 50 if edit == "quality 50" else 90
    copies = [jpeg(edited(image, edit, seed=seed), quality=quality) for seed, image in enumerate(images[20:80])]
    exact = [jpeg(images[3]), jpeg(images[3]), png(Image.new("RGB", (40, 40), (9, 9, 9)))]
    here, there = InMemory([*copies, *exact]), InMemory([*map(jpeg, images), exact[2] + b"."], name="there")
    if sides == "one set":
        here = there = InMemory([*there.images, *here.images], part_size=30)
    joined = matches(here, there, folder=tmp_path)
    monkeypatch.setattr(matches_module, "_JOINED_ON_DISK", 10**9)
    known = matches(here, there, folder=tmp_path)
    same, known_same = ({match[:4] for match in each.matches if match.kind != "unsure"} for each in (joined, known))
    first = 101 if sides == "one set" else 0  # the windows from which two are aligned may differ
    assert same <= known_same | {(first + number, 20 + number, 0, "near-duplicate") for number in range(60)}
    assert len(same) >= 0.93 * len(known_same) and len(known_same) >= 60
    equal = [[match for match in each.matches if match.kind.startswith("equal")] for each in (joined, known)]
    assert equal[0] == equal[1] and len(equal[0]) >= 3
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]


@pytest.mark.usefixtures("on_disk")
def test_the_join_is_the_same_in_one_cut_or_many_and_with_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    originals, with_copies = planted("cropped", side=48)
    found = []
    for number, (entries, batch, processes) in enumerate([(10**6, 10**6, 1), (50, 7, 1), (300, 40, 2)]):
        monkeypatch.setattr(disk_join, "_CUT_ENTRIES", entries)
        monkeypatch.setattr(disk_join, "_BATCH_IMAGES", batch)
        sets = [InMemory(images, part_size=20, read_by="processes") for images in (with_copies, originals)]
        found.append(matches(*sets, folder=tmp_path, processes=1 if number < 2 else processes).matches)
    assert len(found[0]) >= 28 and found[0] == found[1] == found[2]


@pytest.mark.usefixtures("on_disk")
def test_the_join_of_sets_without_a_hash_finds_equal_pixels(tmp_path: Path):
    tiny = [png(image.resize((12, 12))) for image in photographs(3)]
    here, there = InMemory([*tiny, None, b"no image"]), InMemory([tiny[2] + b".", tiny[0], b"no image"], name="there")
    found = matches(here, there, folder=tmp_path)
    assert pairs(found) == {0: (1, "equal-bytes"), 2: (0, "equal-pixels"), 4: (2, "equal-bytes")}
    assert pairs(matches(*[InMemory(tiny * 2)] * 2, folder=tmp_path)) == {n + 3: (n, "equal-bytes") for n in range(3)}


@pytest.mark.usefixtures("on_disk")
def test_a_crowd_under_one_key_is_thinned_and_copies_in_it_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With every hash in one crowd, bits of the other bands decide which are compared."""
    monkeypatch.setattr(disk_join, "_MOST_COMPARED", 12)
    originals, with_copies = planted("quality 50", side=64)
    found = matches(InMemory(with_copies), InMemory(originals, name="there"), folder=tmp_path)
    assert sum(found == number - 10 for number, (found, _) in pairs(found).items() if number >= 40) >= 28
    same = InMemory([originals[0]] * 300 + with_copies, part_size=100)
    kinds = [match.kind for match in matches(same, same, folder=tmp_path).matches]
    assert kinds.count("equal-bytes") == 299


@pytest.mark.usefixtures("on_disk")
def test_a_killed_worker_of_the_join_is_an_error_and_loses_nothing_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    originals, with_copies = planted("quality 50", side=32)

    class Losing:
        workers = 1

        def run(self, work, request, parts, *, done):
            kept = parts if work.__name__ != "_join_cut" else parts[1:]
            return local_engine(1).run(work, request, kept, done=done)

    sets = InMemory(with_copies), InMemory(originals, name="there")
    with pytest.raises(UserError, match="worker was killed"):
        find_matches(sets[0], [sets[1]], folder=tmp_path, engine=Losing(), report=lambda line: None)


def test_workers_that_write_into_another_machines_folder_are_noticed(tmp_path: Path):
    class Elsewhere:
        workers = 1

        def run(self, work, request, parts, *, done):
            return local_engine(1).run(
                work, replace(request, kept=tmp_path / "a", scratch=tmp_path / "b"), parts, done=done
            )

    images = InMemory([jpeg(image) for image in photographs(3)], read_by="processes")
    with pytest.raises(UserError, match="shared"):
        find_matches(images, [images], folder=tmp_path / "kept", engine=Elsewhere(), report=lambda line: None)


def test_thumbnails_are_read_from_the_first_good_file(tmp_path: Path):
    """A part whose kept file is damaged, and some of whose images cannot be read now, lies in the second."""
    rows = np.zeros(3, ROW)
    rows["thumbnail"] = np.arange(3)[:, None, None]
    files = tmp_path / "kept.npy", tmp_path / "scratch.npy"
    for file in files:
        np.save(file, rows)
    files[0].write_bytes(files[0].read_bytes()[:-500])
    found = KeptFingerprints("x", "x", (3,), (files,)).thumbnails(np.array([2, 0]))
    assert found[:, 0, 0].tolist() == [2, 0]
