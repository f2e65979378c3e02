"""Findings in samples (images, labels, duplicates), and their report."""

import dataclasses
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardvit.data_shards.checking.findings import MOST_PLACES
from shardvit.data_shards.checking.page import as_json, as_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.shards.tar_index import open_index
from tests.data_shards.checking.doctored import (
    CLASSES,
    by_kind,
    encoded,
    exchange,
    flip,
    image_place,
    looked_at,
    members,
    only,
    overwrite,
    put,
    tars,
)
from tests.data_shards.external_tars import write_tar


def test_images_that_are_none(shards: Path):
    keys = put(tars(shards / "train")[0], images={0: b"", 1: b"<html>", 2: encoded(1000)[:-300]})
    plain, decoded = (only(looked_at(shards, decode=decode), "image") for decode in (False, True))
    assert [place.key for place in plain.places] == keys[:2]  # that it is cut shows only
    assert [place.key for place in decoded.places] == keys[:3]  # when it is decoded
    assert plain.count == 2 and "empty" in plain.places[0].detail and "format" in plain.places[1].detail
    assert "truncated" in decoded.places[2].detail


def bomb() -> bytes:
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    return stream.getvalue()


# libjpeg fills with grey what is missing of coded data that ends early, though the end marker is there
CUT = encoded(2000, side=64)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"images": {3: bomb()}}, "image", "bomb"),
        ({"images": {3: CUT[: len(CUT) * 2 // 3] + b"\xff\xd9"}}, "mended-image", ""),
        ({"images": {3: None}}, "incomplete-sample", ""),
        ({"labels": {3: b"3"}}, "label", "3 classes"),
        ({"labels": {3: b"-1"}}, "label", "-1"),
        ({"labels": {3: b"dog"}}, "label", "'dog'"),
        ({"labels": {3: b""}}, "label", "empty"),
    ],
)
def test_a_damaged_sample_is_named_with_the_reason(shards: Path, change: dict[str, Any], kind: str, reason: str):
    tar = tars(shards / "train")[0]
    key = put(tar, **change)[3]
    result = looked_at(shards, decode=True)
    (place,) = only(result, kind).places
    assert (place.shard, place.key) == (tar.name, key) and reason in place.detail
    assert result.exit_code == (kind != "mended-image")


# Duplicates.


def copy_image(source: Path, row: int, target: Path, target_row: int, *, label: bytes | None = None) -> tuple[str, str]:
    """The image, and as its label the same or another one; returns both keys."""
    key, offset, size = image_place(source, row)
    data = source.read_bytes()[offset : offset + size]
    own_label = label or dict(members(source))[f"{key}.cls"]
    return key, put(target, images={target_row: data}, labels={target_row: own_label})[target_row]


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


def rename_classes(shards: Path, classes: list[str], *splits: str) -> None:
    for split in splits:
        path = shards / split / "manifest.json"
        names = {"classes": classes, "label_map": {name: number for number, name in enumerate(classes)}}
        path.write_text(json.dumps(json.loads(path.read_text()) | names))


def test_classes_in_another_order(shards: Path):
    rename_classes(shards, ["ant", "cow", "bee"], "val")
    found = only(looked_at(shards), "class-list")
    assert found.places[0].detail == "class 1 is 'bee' in train and 'cow' in val"


@pytest.mark.parametrize(
    ("classes", "kind", "detail"),
    [
        (["ant", "Ant ", "cow"], "alike-classes", "'ant', 'Ant '"),
        (["ant", "bee", "cow", "dodo"], "empty-class", "dodo"),
    ],
)
def test_doubtful_classes_are_a_warning(shards: Path, classes: list[str], kind: str, detail: str):
    rename_classes(shards, classes, "train", "val")
    found = [(each.kind, each.split, each.places[0].detail, each.severity) for each in looked_at(shards).findings]
    assert found == [(kind, split, detail, "warning") for split in ("train", "val")]


def test_all_images_of_one_class(tmp_path: Path):
    pack("digits", tmp_path / "one", classes=["3"], report=lambda line: None)
    found = only(looked_at(tmp_path / "one"), "one-class")
    assert (found.severity, found.places[0].detail) == ("warning", "3")


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
    assert split.multi_label and list(split.classes) == ["blue", "red"]
    assert tuple(split.classes.values()) == (
        sum("blue" in labels[i % 4] for i in range(split.samples)),
        sum("red" in labels[i % 4] for i in range(split.samples)),
    )


# The report.


def test_the_json_holds_what_the_docstring_promises(shards: Path):
    tars(shards / "train")[0].unlink()
    content = json.loads(json.dumps(as_json(looked_at(shards, decode=True, world_size=2, lanes=4))))
    assert content["ok"] is False and (content["problems"], content["warnings"]) == (1, 0)
    assert set(content) == {
        "version", "location", "ok", "problems", "warnings", "seconds", "splits", "fitness", "against",
        "findings",
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
    names = [f"c{number:03d}" for number in range(100)]
    uneven = dataclasses.replace(result.splits[0], classes=dict(zip(names, range(1, 101), strict=True)))
    text = as_text(dataclasses.replace(result, splits=(uneven,)))
    assert "100, 1 to 100 images each (median 51); most to least 100 to 1" in text
    assert "c000 1, c001 2, c002 3" in text and "c099 100, c098 99, c097 98" in text and "c050" not in text
    even = dataclasses.replace(uneven, classes=dict.fromkeys(names, 7))
    assert "100, 7 images each" in as_text(dataclasses.replace(result, splits=(even,)))
