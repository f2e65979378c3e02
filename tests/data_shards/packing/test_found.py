"""Duplicates and unreadable files: found, listed, and never silently dropped."""

import json
import os
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.tar_index import open_index
from tests.data_shards.packing.folders import encoded, packed_images, quiet, spoken


def jpeg(seed: int) -> bytes:
    return encoded(seed, "JPEG")


def write(root: Path, files: dict[str, bytes | int]) -> Path:
    for file, content in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(jpeg(content) if isinstance(content, int) else content)
    return root


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- what is not in class folders


def test_loose_images_and_empty_classes_are_left_out_and_listed(tmp_path: Path):
    clean = write(tmp_path / "clean/in", {"a/1.jpg": 1, "a/2.jpg": 2, "b/3.jpg": 3, "b/4.jpg": 4})
    dirty = write(tmp_path / "in", {"a/1.jpg": 1, "a/2.jpg": 2, "b/3.jpg": 3, "b/4.jpg": 4, "loose.jpg": 5})
    (dirty / "c").mkdir()
    with pytest.raises(UserError, match=r"2 problems: .*loose\.jpg.*/c: "):
        quiet(str(dirty), tmp_path / "out")
    result, text = spoken(str(dirty), tmp_path / "out", unreadable="skip")
    assert "loose.jpg" in text and f"{dirty / 'c'}: " in text and "1 image left out" in text
    (entry,) = read_lines(tmp_path / "out/unreadable.jsonl")
    assert (entry["path"], entry["split"], entry["label"]) == ("loose.jpg", "train", None)
    plain = quiet(str(clean), tmp_path / "plain")
    same = zip(result.train.shard_paths, plain.train.shard_paths, strict=True)
    assert all(ours.read_bytes() == theirs.read_bytes() for ours, theirs in same)
    assert quiet(str(dirty), tmp_path / "out", unreadable="skip").compared
    (tmp_path / "none/c").mkdir(parents=True)
    with pytest.raises(UserError, match="no image is left"):
        quiet(str(tmp_path / "none"), tmp_path / "out3", unreadable="skip")


def test_a_third_split_is_packed_and_found_again(tmp_path: Path):
    two = {"train/a/1.jpg": 1, "train/a/2.jpg": 2, "val/a/3.jpg": 3}
    alone = quiet(str(write(tmp_path / "two/in", two)), tmp_path / "before")
    root = str(write(tmp_path / "in", two | {"test/a/4.jpg": 4, "test/a/5.jpg": 1}))
    result, text = spoken(root, tmp_path / "out")
    assert [(manifest.split, manifest.num_samples) for manifest in result.manifests] == [
        ("train", 2),
        ("val", 1),
        ("test", 2),
    ]
    keys = [key for manifest in result.manifests for path in manifest.shard_paths for key in open_index(path).keys]
    assert len(set(keys)) == 5
    assert "1 group in several of train, val, test" in text
    for ours, theirs in zip(result.manifests[:2], alone.manifests, strict=True):  # the others are as they were
        assert [path.read_bytes() for path in ours.shard_paths] == [path.read_bytes() for path in theirs.shard_paths]
    assert len(quiet(root, tmp_path / "out").manifests) == 3


# ---- equal bytes

SPLIT = {
    "train/a/1.jpg": 1,
    "train/a/2.jpg": 2,
    "train/a/3.jpg": 1,  # as 1, same label
    "train/b/4.jpg": 4,
    "train/b/5.jpg": 2,  # as 2, another label
    "val/a/6.jpg": 6,
    "val/b/7.jpg": 4,  # as 4, in val
    "val/b/8.jpg": 8,
}


def test_duplicates_are_kept_and_pointed_out(tmp_path: Path):
    result, text = spoken(str(write(tmp_path / "in", SPLIT)), tmp_path / "out")
    assert result.num_images == 8
    groups = read_lines(tmp_path / "out/duplicates.jsonl")
    found = {
        frozenset((image["path"], image["split"], image["label"]) for image in group["images"]) for group in groups
    }
    assert found == {
        frozenset({("train/a/1.jpg", "train", "a"), ("train/a/3.jpg", "train", "a")}),
        frozenset({("train/a/2.jpg", "train", "a"), ("train/b/5.jpg", "train", "b")}),
        frozenset({("train/b/4.jpg", "train", "b"), ("val/b/7.jpg", "val", "b")}),
    }
    assert all(image["packed"] for group in groups for image in group["images"])
    keys = {key for manifest in result.manifests for path in manifest.shard_paths for key in open_index(path).keys}
    assert {image["key"] for group in groups for image in group["images"]} <= keys
    assert "3 images with the bytes of an earlier one (3 groups)" in text
    assert "! 1 group both in train and in val" in text and "! 1 group with labels that differ" in text
    again, text_again = spoken(str(tmp_path / "in"), tmp_path / "out")
    assert again.compared and again.counts == result.counts
    *lines_again, compared, _ = text_again.splitlines()
    assert (
        lines_again[2:] == text.splitlines()[2:-1] and "names, sizes and times of 8 images; bytes of none" in compared
    )


def test_dropped_duplicates_leave_one_of_each_and_it_is_in_train(tmp_path: Path):
    result, text = spoken(str(write(tmp_path / "in", SPLIT)), tmp_path / "out", duplicates="drop")
    assert result.val is not None
    train, val = packed_images(result.train), packed_images(result.val)
    assert sorted(train + val) == sorted(jpeg(seed) for seed in (1, 2, 4, 6, 8))
    assert jpeg(4) in train
    groups = read_lines(tmp_path / "out/duplicates.jsonl")
    for group in groups:
        assert [image["packed"] for image in group["images"]] == [True, False]
    packed = {image["key"] for group in groups for image in group["images"] if image["packed"]}
    dropped = {image["key"] for group in groups for image in group["images"] if not image["packed"]}
    keys = {key for manifest in result.manifests for path in manifest.shard_paths for key in open_index(path).keys}
    assert packed <= keys and not dropped & keys and len(dropped) == 3
    assert "3 images left out with the bytes of an earlier one" in text and "train keeps it" in text


def test_dropping_leaves_keys_and_the_held_out_choice_as_they_are(tmp_path: Path):
    files = {f"{name}/{i}.jpg": i % 17 + (name == "b") * 10 for name in "ab" for i in range(25)}
    root = str(write(tmp_path / "in", files))
    whole, _ = spoken(root, tmp_path / "whole", holdout=0.3)
    part, _ = spoken(root, tmp_path / "part", holdout=0.3, duplicates="drop")
    assert whole.val is not None and part.val is not None

    def keys(manifest: Manifest) -> set[str]:
        return {key for path in manifest.shard_paths for key in open_index(path).keys}

    assert keys(part.train) <= keys(whole.train) and keys(part.val) <= keys(whole.val)
    images = packed_images(part.train) + packed_images(part.val)
    assert len(images) == len(set(images)) == len({jpeg(seed) for seed in files.values()})


def test_a_class_that_only_had_duplicates_is_refused(tmp_path: Path):
    root = write(tmp_path / "in", {"train/a/1.jpg": 1, "val/a/2.jpg": 1})
    with pytest.raises(UserError, match="no image is left for split val"):
        spoken(str(root), tmp_path / "out", duplicates="drop")


# ---- unreadable

BROKEN = {
    **{f"train/{name}/{i}.jpg": i + 100 * (name == "b") for name in "ab" for i in range(30)},
    "val/a/1.jpg": 400,
    "val/b/1.jpg": 401,
    "train/a/90.jpg": jpeg(1)[:80],
    "train/a/91.jpg": b"",
    "train/b/92.jpg": b"<html>not found</html>",
    "train/b/93.jpg": jpeg(2)[:-20],
    "train/b/94.png": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "train/b/95.jpg": jpeg(3)[:200],
    "val/b/99.jpg": b"\xff\xd8\xff",
}
BAD = {file for file, content in BROKEN.items() if isinstance(content, bytes)}


def test_all_unreadable_images_are_named_in_a_list_and_in_part_on_screen(tmp_path: Path):
    root = write(tmp_path / "in", BROKEN)
    with pytest.raises(UserError) as caught:
        spoken(str(root), tmp_path / "out", samples_per_shard=7)
    message = str(caught.value)
    assert "7 of 69 images cannot be read" in message and "and 2 more" in message and "\n" not in message
    assert "0x" not in message  # no address of an object
    assert sum(file in message for file in BAD) == 5
    listed = read_lines(tmp_path / "out.unreadable.jsonl")
    assert {entry["path"] for entry in listed} == BAD
    assert all(entry["reason"] and entry["label"] == entry["path"].split("/")[1] for entry in listed)
    assert str(tmp_path / "out.unreadable.jsonl") in message
    assert not (tmp_path / "out").exists()


def test_unreadable_images_are_skipped_and_listed(tmp_path: Path):
    root = write(tmp_path / "in", BROKEN)
    result, text = spoken(str(root), tmp_path / "out", samples_per_shard=7, unreadable="skip")
    assert result.num_images == 62
    images = [image for manifest in result.manifests for image in packed_images(manifest)]
    assert sorted(images) == sorted(jpeg(seed) for seed in BROKEN.values() if isinstance(seed, int))
    assert {entry["path"] for entry in read_lines(tmp_path / "out/unreadable.jsonl")} == BAD
    assert "unreadable: 7 images left out" in text
    assert not (tmp_path / "out.unreadable.jsonl").exists()
    with pytest.raises(UserError, match="unreadable: 'skip' then, None now"):
        spoken(str(root), tmp_path / "out", samples_per_shard=7)


def test_shards_and_classes_of_which_nothing_is_left(tmp_path: Path):
    root = write(tmp_path / "in", {"a/1.jpg": 1, "a/2.jpg": 2, "b/1.jpg": b"x", "b/2.jpg": b"y"})
    result, text = spoken(str(root), tmp_path / "out", samples_per_shard=1, unreadable="skip")
    assert [shard.num_samples for shard in result.train.shards] == [1, 1]
    assert len(list((tmp_path / "out/train").glob("*.tar"))) == len(list((tmp_path / "out/train").glob("*.idx"))) == 2
    assert "no image of the class b in split train can be read" in text and "class a in" not in text
    write(tmp_path / "all", {"a/1.jpg": b"x"})
    with pytest.raises(UserError, match="no image of split train can be read"):
        spoken(str(tmp_path / "all"), tmp_path / "out2", unreadable="skip")


def test_an_unreadable_duplicate_is_not_said_to_be_packed(tmp_path: Path):
    root = write(tmp_path / "in", {"a/1.jpg": 1, "a/2.jpg": b"x", "a/3.jpg": b"x"})
    result, _ = spoken(str(root), tmp_path / "out", unreadable="skip")
    assert (result.counts.unreadable, result.counts.duplicates) == (2, 1)
    (group,) = read_lines(tmp_path / "out/duplicates.jsonl")
    assert [image["packed"] for image in group["images"]] == [False, False]


def test_what_is_no_plain_file_is_unreadable_and_not_waited_for(tmp_path: Path):
    root = write(tmp_path / "in", {"a/1.jpg": 1})
    os.mkfifo(root / "a/2.jpg")
    (root / "a/3.jpg").symlink_to(root / "nowhere.jpg")
    with pytest.raises(UserError, match="2 of 3 images cannot be read"):
        spoken(str(root), tmp_path / "out")


def test_names_that_are_no_utf8_can_be_listed(tmp_path: Path):
    root = write(tmp_path / "in", {"a/1.jpg": 1})
    with open(os.fsencode(root) + b"/a/\xe9.jpg", "wb") as stream:
        stream.write(b"x")
    result, _ = spoken(str(root), tmp_path / "out", unreadable="skip")
    (entry,) = read_lines(tmp_path / "out/unreadable.jsonl")
    assert os.fsencode(entry["path"]) == b"a/\xe9.jpg" and result.num_images == 1
