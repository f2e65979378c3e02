"""The shard doctor: every damage that is done to a sound set is found, named and counted, and nothing else is."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_shards.checking.check import CheckResult, check
from data_shards.checking.findings import MOST_PLACES, Finding
from data_shards.checking.report import as_json, as_text
from data_shards.errors import UserError
from data_shards.packing.pack import pack
from data_shards.shard_set import ShardEntry, ShardsSpec
from data_shards.store.store import Store
from data_shards.tars.tar_index import index_path, open_index

CLASSES = ("ant", "bee", "cow")


def encoded(seed: int, *, side: int = 24, image_format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, image_format)
    return stream.getvalue()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ with 36 images in 4 shards of 9, val/ with 12 in 2, of 3 classes; every fourth image a PNG."""
    top = tmp_path_factory.mktemp("sound")
    for number in range(48):
        folder = top / "in" / ("val" if number >= 36 else "train") / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if number % 4 == 0 else "JPEG"
        (folder / f"{number}.{kind.lower()}").write_bytes(encoded(number, image_format=kind))
    pack(str(top / "in"), top / "set", samples_per_shard=9, report=lambda line: None)
    return top / "set"


@pytest.fixture
def shards(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / "set")


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def looked_at(location: Path | str, **options: Any) -> CheckResult:
    spec = options.pop("spec", None) or ShardsSpec(str(location))
    return check(spec, **{"processes": 1, "report": lambda line: None, **options})


def by_kind(result: CheckResult) -> dict[str, Finding]:
    kinds = [finding.kind for finding in result.findings]
    assert len(kinds) == len(set(kinds)), kinds
    return {finding.kind: finding for finding in result.findings}


def only(result: CheckResult, kind: str) -> Finding:
    found = by_kind(result)
    assert list(found) == [kind], found
    return found[kind]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x55]))


def image_place(tar: Path, row: int) -> tuple[str, int, int]:
    index = open_index(tar)
    return index.keys[row], int(index.image_offset[row]), int(index.image_size[row])


def members(tar: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(tar) as stream:
        return [(member.name, stream.extractfile(member).read()) for member in stream]


def write_tar(tar: Path, content: list[tuple[str, bytes]]) -> None:
    with tarfile.open(tar, "w") as stream:
        for name, data in content:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            stream.addfile(member, io.BytesIO(data))


def exchange(tar: Path, content: list[tuple[str, bytes]]) -> None:
    """Another content that the manifest vouches for, and no index beside it."""
    write_tar(tar, content)
    index_path(tar).unlink(missing_ok=True)
    path = tar.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    (entry,) = (entry for entry in manifest["shards"] if entry["file"] == tar.name)
    entry |= {"num_bytes": tar.stat().st_size, "sha256": hashlib.sha256(tar.read_bytes()).hexdigest()}
    path.write_text(json.dumps(manifest))


def part_of(content: list[tuple[str, bytes]], key: str, *, is_label: bool) -> int:
    (number,) = (
        i for i, (name, _) in enumerate(content) if name.startswith(f"{key}.") and name.endswith(".cls") == is_label
    )
    return number


# A sound set.


def test_a_sound_set_has_nothing_to_report(sound: Path):
    result = looked_at(sound, decode=True)
    assert result.findings == () and result.exit_code == 0
    train, val = result.splits
    assert (train.split, train.num_samples, train.num_stated, train.num_shards) == ("train", 36, 36, 4)
    assert (val.split, val.num_samples, val.num_shards) == ("val", 12, 2)
    assert train.classes == CLASSES and train.class_counts == (12, 12, 12)
    assert train.num_bytes == sum(tar.stat().st_size for tar in tars(sound / "train"))
    assert train.shard_samples is not None and (train.shard_samples.least, train.shard_samples.most) == (9, 9)
    assert train.formats == {"JPEG": 27, "PNG": 9}
    assert train.heights is not None and train.widths is not None
    assert (train.heights.least, train.heights.most, train.widths.median) == (24, 24, 32)
    sizes = [len(encoded(number, image_format="PNG" if number % 4 == 0 else "JPEG")) for number in range(36)]
    assert train.image_bytes is not None
    assert (train.image_bytes.least, train.image_bytes.most) == (min(sizes), max(sizes))
    assert train.decode_ms is not None and train.decode_ms > 0


def test_without_decode_nothing_is_said_of_pixels(sound: Path):
    result = looked_at(sound / "train")
    assert result.findings == () and [split.split for split in result.splits] == ["train"]
    assert result.splits[0].heights is result.splits[0].decode_ms is None


def test_processes_find_what_one_finds(shards: Path):
    """However the samples are divided among them."""
    (first, second, *_) = tars(shards / "train")
    os.truncate(first, first.stat().st_size // 2)
    _, offset, size = image_place(second, 4)
    overwrite(second, offset, bytes(size))
    alone = looked_at(shards, decode=True)
    together = looked_at(shards, decode=True, processes=2)
    assert alone.findings and alone.findings == together.findings
    for one, other in zip(alone.splits, together.splits, strict=True):
        assert one.class_counts == other.class_counts and one.heights == other.heights


# Damaged shards.


def test_a_flipped_bit_is_found_by_the_digest_alone(shards: Path):
    tar = tars(shards / "train")[2]
    _, offset, size = image_place(tar, 1)
    flip(tar, offset + size - 40)
    found = only(looked_at(shards), "digest")
    assert found.severity == "problem" and [place.shard for place in found.places] == [tar.name]
    assert looked_at(shards, digests=False).findings == ()


def test_a_truncated_tar_loses_what_is_behind_and_is_told_once(shards: Path):
    tar = tars(shards / "train")[1]
    _, offset, _ = image_place(tar, 5)
    os.truncate(tar, offset + 3)
    result = looked_at(shards)
    found = only(result, "damaged-shard")
    assert found.places[0].shard == tar.name
    for words in ("bytes where the manifest says", f"at byte {offset + 3}", "4 samples are lost"):
        assert words in found.places[0].detail
    assert result.splits[0].num_samples == 32 and result.splits[0].num_stated == 36
    assert "36 are stated" in as_text(result)


@pytest.mark.parametrize("has_index", [True, False])
def test_behind_a_damaged_header_the_index_knows_more(shards: Path, has_index: bool):
    tar = tars(shards / "train")[0]
    _, offset, _ = image_place(tar, 5)
    overwrite(tar, offset - 512, b"\xff" * 100)
    if not has_index:
        index_path(tar).unlink()
    result = looked_at(shards)
    found = only(result, "damaged-shard")
    assert ("4 samples are lost" in found.places[0].detail) != has_index
    assert result.splits[0].num_samples == (36 if has_index else 32)


def test_swapped_and_spoilt_indexes(shards: Path):
    first, second, third, _ = tars(shards / "train")
    content = index_path(first).read_bytes()
    index_path(first).write_bytes(index_path(second).read_bytes())
    index_path(second).write_bytes(content)
    index_path(third).write_text("nonsense\n")
    result = looked_at(shards)
    found = only(result, "index")
    assert [place.shard for place in found.places] == [first.name, second.name, third.name]
    assert ".idx" in found.remedy and "delete" in found.remedy
    for tar in (first, second, third):
        index_path(tar).unlink()
    assert looked_at(shards).findings == ()  # as the remedy promises
    assert result.splits[0].num_samples == 36  # and all were looked at meanwhile


def test_an_index_with_a_sample_less(shards: Path):
    path = index_path(tars(shards / "train")[0])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["v1.2 8", *lines[1:-1]]) + "\n")
    assert "lists 8 samples, the tar's headers 9" in only(looked_at(shards), "index").places[0].detail


def test_missing_and_extra_tars(shards: Path):
    first, second, *_ = tars(shards / "train")
    shutil.copy(second, second.with_name("backup.tar"))
    first.unlink()
    found = by_kind(looked_at(shards))
    assert set(found) == {"missing-shard", "extra-tar"}
    assert found["missing-shard"].places[0] == (first.name, "", "9 samples are lost")
    assert found["extra-tar"].severity == "warning" and found["extra-tar"].places[0].shard == "backup.tar"


def test_all_tars_missing(shards: Path):
    for tar in tars(shards / "train"):
        tar.unlink()
    result = looked_at(shards / "train", decode=True)
    assert only(result, "missing-shard").count == 4
    assert "4 shards of the manifest are not there" in as_text(result) and as_json(result)["splits"][0]["samples"] == 0


def test_a_tar_that_cannot_be_opened_does_not_stop_the_others(shards: Path):
    tar = tars(shards / "train")[0]
    tar.unlink()
    tar.mkdir()
    result = looked_at(shards)
    (found,) = (each for each in result.findings if each.places[0].shard == tar.name)
    assert found.severity == "problem" and result.splits[0].num_samples == 27


def test_a_tar_that_is_none(shards: Path):
    tar = tars(shards / "train")[0]
    tar.write_bytes(b"<html>503</html>".ljust(tar.stat().st_size))
    assert "no tar header at byte 0" in only(looked_at(shards), "damaged-shard").places[0].detail


def test_another_tar_than_the_manifest_counts(shards: Path):
    tar = tars(shards / "train")[0]
    exchange(tar, members(tar)[:-2])
    assert only(looked_at(shards), "sample-count").places[0].detail == "8 where 9 are stated"


def test_a_broken_manifest_does_not_keep_the_other_split_from_being_checked(shards: Path):
    (shards / "train" / "manifest.json").write_text("{")
    result = looked_at(shards, world_size=4)
    found = only(result, "unusable-set")
    assert found.split == "train" and "manifest.json" in found.places[0].detail
    assert [split.split for split in result.splits] == ["val"] and result.exit_code == 1
    assert result.fitness is None  # of held-out images it would mean nothing


def test_a_lost_manifest_is_missed_where_the_other_split_has_one(shards: Path):
    (shards / "val" / "manifest.json").unlink()
    found = only(looked_at(shards), "unusable-set")
    assert found.split == "val" and "there is no manifest.json" in found.places[0].detail


class KillingStore(Store):
    """Opening the first shard ends the process, as a crash of a decoder does."""

    def open_file(self, entry: ShardEntry) -> int:
        if entry.name.endswith("000000.tar"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open_file(entry)


def test_a_crash_is_pinned_to_its_shard(shards: Path):
    result = looked_at(shards / "train", store=KillingStore(), processes=2)
    found = only(result, "crashed-check")
    assert {place.shard for place in found.places} == {tars(shards / "train")[0].name}
    assert result.splits[0].num_samples == 27


def test_where_no_process_can_be_started_it_is_done_without(shards: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object) -> Any:
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken)
    result = looked_at(shards, decode=True, processes=2)
    assert result.findings == () and result.splits[0].num_samples == 36


# Damaged samples.


def test_images_that_are_none(shards: Path):
    tar = tars(shards / "train")[0]
    content = members(tar)
    keys = list(open_index(tar).keys)
    bad = {keys[0]: b"", keys[1]: b"<html>", keys[2]: encoded(1000)[:-300]}
    for key, data in bad.items():
        at = part_of(content, key, is_label=False)
        content[at] = (f"{key}.jpg", data)
    exchange(tar, content)
    plain, decoded = (only(looked_at(shards, decode=decode), "image") for decode in (False, True))
    assert [place.key for place in plain.places] == keys[:2]  # that it is cut shows only
    assert [place.key for place in decoded.places] == keys[:3]  # when it is decoded
    assert plain.count == 2 and "empty" in plain.places[0].detail and "format" in plain.places[1].detail
    assert "truncated" in decoded.places[2].detail


def test_a_decompression_bomb_is_named(shards: Path):
    tar = tars(shards / "train")[0]
    content = members(tar)
    key = open_index(tar).keys[3]
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    content[part_of(content, key, is_label=False)] = (f"{key}.png", stream.getvalue())
    exchange(tar, content)
    found = only(looked_at(shards, decode=True), "image")
    assert found.places[0].key == key and "bomb" in found.places[0].detail


def test_what_a_decoder_mends_is_a_warning(shards: Path):
    """Coded data that ends early, though the end marker is there: libjpeg fills the rest with grey."""
    tar = tars(shards / "train")[0]
    content = members(tar)
    key = open_index(tar).keys[3]
    data = encoded(2000, side=64)
    content[part_of(content, key, is_label=False)] = (f"{key}.jpg", data[: len(data) * 2 // 3] + b"\xff\xd9")
    exchange(tar, content)
    result = looked_at(shards, decode=True)
    found = only(result, "mended-image")
    assert (found.places[0].shard, found.places[0].key) == (tar.name, key) and result.exit_code == 0


@pytest.mark.parametrize(("label", "reason"), [(b"3", "3 classes"), (b"-1", "-1"), (b"dog", "'dog'"), (b"", "empty")])
def test_labels_that_are_none(shards: Path, label: bytes, reason: str):
    tar = tars(shards / "train")[0]
    content = members(tar)
    key = open_index(tar).keys[7]
    content[part_of(content, key, is_label=True)] = (f"{key}.cls", label)
    exchange(tar, content)
    found = only(looked_at(shards), "label")
    assert (found.places[0].key, found.count) == (key, 1) and reason in found.places[0].detail


def test_a_sample_without_its_image(shards: Path):
    tar = tars(shards / "train")[0]
    content = members(tar)
    key = open_index(tar).keys[2]
    del content[part_of(content, key, is_label=False)]
    exchange(tar, content)
    assert only(looked_at(shards), "incomplete-sample").places[0].key == key


# Duplicates.


def copy_image(source: Path, row: int, target: Path, target_row: int, *, label: bytes | None = None) -> tuple[str, str]:
    """The image, and as its label the same or another one; returns both keys."""
    key, offset, size = image_place(source, row)
    data = source.read_bytes()[offset : offset + size]
    content = members(target)
    other = open_index(target).keys[target_row]
    own_label = label or dict(members(source))[f"{key}.cls"]
    content[part_of(content, other, is_label=False)] = (f"{other}.png", data)
    content[part_of(content, other, is_label=True)] = (f"{other}.cls", own_label)
    exchange(target, content)
    return key, other


def test_the_same_image_twice(shards: Path):
    first, *_, last = tars(shards / "train")
    key, other = copy_image(first, 0, last, 8)
    result = looked_at(shards)
    found = only(result, "duplicate-image")
    assert (found.count, found.severity, found.places[0].shard) == (1, "warning", last.name)
    assert found.places[0].key == other and f"{key} in {first.name}" in found.places[0].detail
    assert result.exit_code == 0


def test_the_same_image_with_another_label(shards: Path):
    first, *_, last = tars(shards / "train")
    key, _, _ = image_place(first, 0)
    label = int(dict(members(first))[f"{key}.cls"])
    _, other = copy_image(first, 0, last, 8, label=str((label + 1) % 3).encode())
    found = only(looked_at(shards), "contradicting-label")
    assert found.severity == "problem" and found.places[0].key == other
    assert CLASSES[label] in found.places[0].detail and CLASSES[(label + 1) % 3] in found.places[0].detail


def test_an_image_of_train_in_val(shards: Path):
    source, target = tars(shards / "train")[1], tars(shards / "val")[0]
    key, other = copy_image(source, 3, target, 2)
    found = only(looked_at(shards), "leaked-image")
    assert (found.split, found.count, found.severity) == ("train and val", 1, "problem")
    assert (found.places[0].shard, found.places[0].key) == (target.name, other)
    assert f"{key} in {source.name}" in found.places[0].detail
    assert looked_at(shards / "val").findings == ()


def test_a_key_twice(shards: Path):
    first, *_, last = tars(shards / "train")
    key, other = open_index(first).keys[0], open_index(last).keys[0]
    exchange(last, [(name.replace(f"{other}.", f"{key}."), data) for name, data in members(last)])
    found = only(looked_at(shards), "duplicate-key")
    assert found.places[0] == (last.name, key, f"as in {first.name}") and found.severity == "warning"


# Classes and sizes.


def test_classes_in_another_order(shards: Path):
    path = shards / "val" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["classes"] = ["ant", "cow", "bee"]
    manifest["label_map"] = {"ant": 0, "cow": 1, "bee": 2}
    path.write_text(json.dumps(manifest))
    found = only(looked_at(shards), "class-list")
    assert found.places[0].detail == "class 1 is 'bee' in train and 'cow' in val"


def test_a_class_without_samples(shards: Path):
    for split in ("train", "val"):
        path = shards / split / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["classes"].append("dodo")
        manifest["label_map"]["dodo"] = 3
        path.write_text(json.dumps(manifest))
    found = [finding for finding in looked_at(shards).findings if finding.kind == "empty-class"]
    assert [(each.split, each.places[0].detail, each.severity) for each in found] == [
        ("train", "dodo", "warning"),
        ("val", "dodo", "warning"),
    ]


def test_tars_of_another_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No manifest, labels in JSON, several each; uneven; one cut."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    labels = [["red"], ["red", "blue"], [], ["blue"]]
    folder = tmp_path / "laion"
    folder.mkdir()
    number = 0
    for shard, size in enumerate((4, 4, 12, 4)):
        content = []
        for _ in range(size):
            content.append((f"{number:05d}.jpg", encoded(number)))
            content.append((f"{number:05d}.json", json.dumps({"tags": labels[number % 4]}).encode()))
            number += 1
        write_tar(folder / f"{shard:05d}.tar", content)
    os.truncate(folder / "00003.tar", 3000)
    spec = ShardsSpec(str(folder), label="json:tags", kind="multi")
    result = looked_at(folder, spec=spec)
    found = by_kind(result)
    assert set(found) == {"damaged-shard", "uneven-shards", "no-digests"}
    assert found["no-digests"].severity == "info" and found["damaged-shard"].places[0].shard == "00003.tar"
    (split,) = result.splits
    assert split.is_multi_label and split.classes == ("blue", "red")
    assert split.class_counts == (
        sum("blue" in labels[i % 4] for i in range(split.num_samples)),
        sum("red" in labels[i % 4] for i in range(split.num_samples)),
    )


# The report.


def test_the_json_holds_what_the_docstring_promises(shards: Path):
    tars(shards / "train")[0].unlink()
    content = json.loads(json.dumps(as_json(looked_at(shards, decode=True, world_size=2, lanes=4))))
    assert content["ok"] is False and (content["problems"], content["warnings"]) == (1, 0)
    assert set(content) == {
        "version", "location", "ok", "problems", "warnings", "seconds", "splits", "fitness", "findings",
    }  # fmt: skip
    train = content["splits"][0]
    assert set(train) == {
        "split", "name", "source", "digest", "samples", "samples_stated", "shards", "bytes", "multi_label", "classes",
        "samples_per_shard", "bytes_per_shard", "bytes_per_image", "formats", "height", "width", "decode_ms",
    }  # fmt: skip
    assert train["samples"] == sum(train["classes"].values()) == 27 and train["height"]["max"] == 24
    assert content["fitness"]["lanes"] == 4
    (found,) = content["findings"]
    assert set(found) == {"severity", "kind", "split", "count", "message", "remedy", "places"}
    assert set(found["places"][0]) == {"shard", "key", "detail"}


def test_the_text_ends_with_the_verdict_and_every_problem_with_what_to_do(shards: Path):
    tar = tars(shards / "train")[0]
    shutil.copy(tar, tar.with_name("more.tar"))
    overwrite(tar, image_place(tar, 0)[1] - 512, b"\xff" * 100)
    text = as_text(looked_at(shards, world_size=2, lanes=4))
    assert text.splitlines()[-1].startswith("check: 1 problem, 1 warning (")
    blocks = [block for block in text.split("\n\n") if block.startswith(("PROBLEM", "warning"))]
    assert [block.split()[0] for block in blocks] == ["PROBLEM", "warning"]
    assert all("\n  -> " in block for block in blocks)
    assert "for 2 processes on one node" in text and "#####" in text


def test_many_places_are_counted_and_some_are_shown(tmp_path: Path, shards: Path):
    tar = tars(shards / "train")[0]
    content = [part for number in range(1200) for part in ((f"k{number}.cls", b"9"), (f"k{number}.png", b"\x89PNG"))]
    exchange(tar, content)
    found = by_kind(looked_at(shards / "train"))
    assert found["label"].count == found["image"].count == 1200 and len(found["label"].places) == MOST_PLACES
    text = as_text(looked_at(shards / "train"))
    assert "... and 1,192 more" in text and len(text) < 10_000


def test_mistakes_of_the_user_are_told_as_such(shards: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    cases: list[tuple[ShardsSpec, str]] = [
        (ShardsSpec(str(tmp_path / "nowhere")), "nowhere"),
        (ShardsSpec(str(tmp_path / "empty")), "manifest.json"),
        (ShardsSpec(str(shards / "train"), label="cls"), "label"),
        (ShardsSpec(str(shards), kind="multi"), "kind"),
    ]
    for spec, words in cases:
        with pytest.raises(UserError, match=words):
            looked_at("", spec=spec)


@pytest.mark.parametrize(
    "damage", [lambda tar: flip(tar, 600), lambda tar: os.truncate(tar, 0), lambda tar: tar.unlink()]
)
def test_nothing_is_changed(shards: Path, damage: Callable[[Path], None]):
    damage(tars(shards / "train")[0])
    before = {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    assert looked_at(shards, decode=True).exit_code == 1
    assert {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()} == before


def test_many_classes_are_summed_up(sound: Path):
    """Beyond some number of classes a line for each would be no report."""
    result = looked_at(sound / "train")
    names = tuple(f"c{number:03d}" for number in range(100))
    uneven = dataclasses.replace(result.splits[0], classes=names, class_counts=tuple(range(1, 101)))
    text = as_text(dataclasses.replace(result, splits=(uneven,)))
    assert "100, 1 to 100 images each (median 51); most to least 100 to 1" in text
    assert "c000 1, c001 2, c002 3" in text and "c099 100, c098 99, c097 98" in text and "c050" not in text
    even = dataclasses.replace(uneven, class_counts=(7,) * 100)
    assert "100, 7 images each" in as_text(dataclasses.replace(result, splits=(even,)))
