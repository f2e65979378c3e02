"""`shardvit check --against`: exit codes, text, JSON, and the report."""

import json
import shutil
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import load_manifest
from tests.data_shards.checking.near_duplicates.planted import edited, jpeg, photographs
from tests.launch.conftest import Call


def packed(root: Path, name: str, images: list[bytes]) -> Path:
    for number, data in enumerate(images):
        file = root / name / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    pack(str(root / name), root / "shards" / name, samples_per_shard=8, report=lambda line: None)
    return root / "shards" / name / "train"


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """A training set with one equal image and one cropped mirror image of those in a test set; and a third set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = photographs(40)
    held_out = [jpeg(image) for image in images[:8]]
    near = jpeg(edited(edited(images[5], "cropped"), "mirrored"))
    train = [*(jpeg(image) for image in images[8:28]), held_out[2], near]
    return tuple(
        packed(tmp_path, name, each)
        for name, each in (("train", train), ("test", held_out), ("more", [jpeg(image) for image in images[28:]]))
    )  # type: ignore[return-value]


def test_what_is_in_the_test_set_too_is_a_problem(call: Call, sets: tuple[Path, Path, Path], tmp_path: Path):
    train, test, more = sets
    report = tmp_path / "report"
    code, output, _ = call("check", train, "--against", test, more, "--report", report, "--json")
    assert code == 1
    result = json.loads(output)
    assert [(each["source"], each["equal_bytes"], each["near_duplicates"]) for each in result["against"]] == [
        (str(test), 1, 1),
        (str(more), 0, 0),
    ]
    assert {found["kind"]: found["count"] for found in result["findings"]} == {"equal-bytes": 1, "near-duplicate": 1}
    lines = [json.loads(line) for line in (report / "matches.jsonl").read_text().splitlines()]
    kinds = {line["kind"]: line for line in lines}
    assert "_002_" in kinds["equal-bytes"]["other"]["key"] and "_020_" in kinds["equal-bytes"]["image"]["key"]
    assert "_005_" in kinds["near-duplicate"]["other"]["key"] and kinds["near-duplicate"]["mirrored"]
    page = (report / "matches.html").read_text()
    assert page.count("<img") == 2 and page.count("src=") == page.count('src="data:image/jpeg;base64,')


def test_no_match_is_exit_code_0_and_the_set_itself_only_a_warning(
    call: Call, sets: tuple[Path, Path, Path], tmp_path: Path
):
    train, test, more = sets
    code, output, _ = call("check", more, "--against", train, test)
    assert code == 0 and "all is well" in output
    images = photographs(6, seed=4)
    again = packed(tmp_path, "again", [*map(jpeg, images), jpeg(edited(images[0], "x 0.7"))])
    code, output, _ = call("check", again, "--against", again)
    assert code == 0 and "near-duplicates of earlier images" in output


def test_what_is_unsure_is_listed_and_no_problem(call: Call, sets: tuple[Path, Path, Path], tmp_path: Path):
    images = photographs(40)
    changed = packed(tmp_path, "changed", [jpeg(edited(image, "changed")) for image in images[5:8]])
    code, output, _ = call("check", changed, "--against", sets[1], "--report", tmp_path / "report", "--json")
    result = json.loads(output)
    (against,) = result["against"]
    assert (code, against["unsure"], against["near_duplicates"], against["equal_pixels"]) == (0, 3, 0, 0)
    assert [(each["kind"], each["severity"], each["count"]) for each in result["findings"]] == [("unsure", "info", 3)]
    lines = [json.loads(line) for line in (tmp_path / "report" / "matches.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["unsure"] * 3
    assert (tmp_path / "report" / "matches.html").read_text().count("<img") == 3


def test_the_pairs_come_most_alike_first(call: Call, tmp_path: Path, sets: tuple[Path, Path, Path]):
    images = photographs(8)
    copies = [
        *(jpeg(edited(images[0], "changed")), jpeg(images[1], quality=20), jpeg(images[1], quality=60)),
        jpeg(images[3]),
    ]
    call("check", packed(tmp_path, "copies", copies), "--against", sets[1], "--report", tmp_path / "report")
    lines = (tmp_path / "report" / "matches.jsonl").read_text().splitlines()
    keys = [json.loads(line)["image"]["key"] for line in lines]
    assert [next(number for number in range(4) if f"_00{number}_" in key) for key in keys] == [3, 2, 1, 0]
    page = (tmp_path / "report" / "matches.html").read_text()
    assert sorted(keys, key=page.index) == keys


def test_against_a_folder_with_splits_is_against_each(call: Call, sets: tuple[Path, Path, Path], tmp_path: Path):
    train, test, more = sets
    both = tmp_path / "both"
    both.mkdir()
    (both / "train").symlink_to(more)
    (both / "val").symlink_to(test)
    code, output, _ = call("check", train, "--against", both, "--json")
    against = json.loads(output)["against"]
    assert code == 1 and [each["source"] for each in against] == [str(both / "train"), str(both / "val")]
    assert [each["equal_bytes"] for each in against] == [0, 1]
    # packed from train's images, without those that are also in a split of the folder
    assert call("pack", tmp_path / "train", tmp_path / "out", "--exclude-matches-of", both)[0] == 0
    assert load_manifest(tmp_path / "out" / "train").num_samples == 20


def test_help_says_what_is_missed(call: Call):
    text = call("check", "--help")[1]
    assert all(word in text for word in ("Missed", "rotated", "upside down", "collage", "unsure"))


def test_a_split_is_not_compared_with_itself_beside_others(call: Call, tmp_path: Path, sets: tuple[Path, Path, Path]):
    train, test, _ = sets
    both = tmp_path / "both"
    both.mkdir()
    (both / "train").symlink_to(train)
    (both / "val").symlink_to(test)
    code, output, _ = call("check", both, "--against", both / "val", "--json")
    result = json.loads(output)
    assert code == 1 and [(each["split"], each["equal_bytes"]) for each in result["against"]] == [("train", 1)]


def test_mistakes_are_one_sentence(call: Call, sets: tuple[Path, Path, Path], tmp_path: Path):
    train, test, _ = sets
    code, _, error = call("check", train, "--report", tmp_path / "r")
    assert code == 2 and "--output" in error and "--against" in error
    code, _, error = call("check", train, "--against", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in error and "Traceback" not in error
    tar = min(test.glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-3000])
    code, _, error = call("check", train, "--against", test)
    assert code == 2 and tar.name in error


def test_a_damaged_set_is_compared_as_far_as_it_goes(call: Call, sets: tuple[Path, Path, Path]):
    train, test, _ = sets
    min(train.glob("*.tar")).unlink()
    code, output, _ = call("check", train, "--against", test, "--json")
    kinds = {found["kind"] for found in json.loads(output)["findings"]}
    assert code == 1 and {"missing-shard", "not-compared"} <= kinds


def test_mistakes_are_told_before_anything_is_read(
    call: Call, sets: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("hours of reading, for nothing")

    monkeypatch.setattr("shardvit.data_shards.checking.check._scan_set", never)
    code, _, errors = call("check", sets[0], "--against", sets[1], tmp_path / "nowhere")
    assert code == 2 and "nowhere" in errors
    taken = tmp_path / "taken"
    taken.write_text("")
    code, _, errors = call("check", sets[0], "--against", sets[1], "--report", taken)
    assert code == 2 and "--output" in errors and "taken" in errors


def test_a_copy_elsewhere_is_another_set(call: Call, sets: tuple[Path, Path, Path], tmp_path: Path):
    copy = shutil.copytree(sets[0], tmp_path / "copy")
    code, output, _ = call("check", sets[0], "--against", copy, "--json")
    (against,) = json.loads(output)["against"]
    assert code == 1 and against["equal_bytes"] == 22 and against["digest"] == load_manifest(copy).digest


def test_options_that_name_sets_need_one(call: Call, tmp_path: Path):
    code, _, error = call("check", tmp_path, "--against")
    assert code == 2 and "--against: " in error
    code, _, error = call("pack", tmp_path, tmp_path / "out", "--exclude-matches-of")
    assert code == 2 and "--exclude-matches-of: " in error and not (tmp_path / "out").exists()
