"""`shardvit pack` as it is typed: every option reaches the packer, and unfit ones are one sentence."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.launch import cli
from tests.data_shards.packing.sources.layouts import binary, cifar100, write_tar


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In a folder with 12 images of two classes: exit code and what was said."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / "photos" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "photos/dog/0.png").replace(tmp_path / "photos/dog/00.png")
    (tmp_path / "photos/dog/copy.png").write_bytes((tmp_path / "photos/dog/2.png").read_bytes())

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shardvit", "pack", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out + output.err

    return run


def request(out: str) -> dict:
    return json.loads(Path(out, "pack.json").read_text())["request"]


def test_plainly(call):
    code, text = call("photos", "out")
    assert code == 0 and "13 images of 2 classes" in text and "Next: shardvit check out" in text
    assert "1 image with the bytes of an earlier one (1 group)" in text
    code, text = call("photos", "out")
    assert code == 0 and "was packed before" in text


def test_all_options_of_a_folder(call):
    Path("val.txt").write_text("dog/00.png\ncat/1.png\n")
    Path("photos/cat/bad.png").write_bytes(b"x")
    code, text = call(
        *("photos", "out", "--holdout-list", "val.txt", "--samples-per-shard", "4", "--resize-short", "20"),
        *("--quality", "70", "--drop-duplicates", "--skip-unreadable", "--seed", "3", "--classes", "dog, cat"),
    )
    assert code == 0, text
    asked = request("out")
    assert asked.pop("holdout_list").startswith(str(Path("val.txt").resolve()))
    assert asked == {
        "source": str(Path("photos").resolve()),
        "classes": ["dog", "cat"],
        "holdout": None,
        "samples_per_shard": 4,
        "seed": 3,
        "resize": {"short_pixels": 20, "quality": 70},
        "unreadable": "skip",
        "duplicates": "drop",
    }
    assert read_manifest("out/val").num_samples == 2 and read_manifest("out/train").num_samples == 10
    assert "1 image left out: see out/unreadable.jsonl" in text


def test_a_set_has_the_name_of_its_folder_or_the_one_that_is_given(call):
    assert call("photos", "shards/one")[0] == call("photos", "shards/two", "--name", "mine")[0] == 0
    assert read_manifest("shards/one/train").name == "one" and read_manifest("shards/two/train").name == "mine"
    assert {path.name for path in Path("shards").rglob("*.tar")} == {"one-train-000000.tar", "mine-train-000000.tar"}
    assert "name" not in request("shards/one") and request("shards/two")["name"] == "mine"
    code, text = call("photos", "shards/two")
    assert code == 2 and "name: 'mine' then, None now" in text
    Path("shards/one").rename("shards/moved")
    assert "was packed before" in call("photos", "shards/moved")[1]


def test_an_out_inside_of_the_source_is_refused(call):
    for out in ("photos/out", "photos", "photos/dog/x/y"):
        code, text = call("photos", out)
        assert code == 2 and "lies inside" in text
    assert {path.name for path in Path("photos").iterdir()} == {"cat", "dog"}
    Path("digits").mkdir()
    assert call("digits", "digits/out", "--classes", "0")[0] == 0  # a name, and no folder
    assert call("photos", "photos-packed")[0] == 0


def test_all_images_are_read_again_if_it_is_asked_for(call):
    assert call("photos", "out", "--verify")[0] == 0
    assert "bytes of none (--verify reads all)" in call("photos", "out")[1]
    assert "bytes of 13" in call("photos", "out", "--verify")[1]


def test_classes_may_be_kept_as_they_are(call):
    Path("photos/Cat").mkdir()
    Path("photos/cat/1.png").rename("photos/Cat/1.png")
    code, text = call("photos", "out")
    assert code == 2 and "'Cat', 'cat'" in text
    assert call("photos", "out", "--keep-classes")[0] == 0 and read_manifest("out/train").num_classes == 3


def test_a_number_of_images_is_held_out(call):
    code, text = call("photos", "out", "--holdout-images", "3")
    assert code == 0, text
    assert request("out")["holdout_images"] == 3 and request("out")["holdout"] is None
    assert read_manifest("out/val").num_samples == 3 and read_manifest("out/train").num_samples == 10


def test_the_parts_of_a_published_set(call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    image = Path("photos/cat/1.png").read_bytes()
    write_tar(Path("train.tar"), {"n00000001/1.JPEG": image, "n00000002/2.JPEG": Path("photos/cat/3.png").read_bytes()})
    write_tar(Path("val.tar"), {"a.JPEG": image, "b.JPEG": image})
    Path("val.csv").write_text("ImageId,PredictionString\na,n00000002 1 2 3 4\nb,n00000001 1 2 3 4\n")
    code, text = call("train.tar", "out", "--val", "val.tar", "--val-labels", "val.csv")
    assert code == 0, text
    assert {key: request("out")[key] for key in ("val", "val_labels")} == {
        "val": str(Path("val.tar").resolve()),
        "val_labels": str(Path("val.csv").resolve()),
    }
    assert read_manifest("out/val").num_samples == 2 and read_manifest("out/train").classes == (
        "n00000001",
        "n00000002",
    )
    write_tar(Path("cifar-100-binary.tar.gz"), binary(cifar100()))
    code, text = call("cifar-100-binary.tar.gz", "cifar", "--superclasses")
    assert code == 0 and read_manifest("cifar/train").num_classes == 20, text
    assert request("cifar")["cifar_labels"] == "coarse"


def test_images_above_the_limit_are_unreadable_unless_it_is_raised(call):
    code, text = call("photos", "out", "--max-image-pixels", "100")
    assert code == 2 and "13 of 13 images cannot be read" in text
    assert "--max-image-pixels" in json.loads(Path("out.unreadable.jsonl").read_text().splitlines()[0])["reason"]
    code, text = call("photos", "out", "--max-image-pixels", "100000")
    assert code == 0 and request("out")["max_image_pixels"] == 100_000
    code, text = call("photos", "out")
    assert code == 2 and "max_image_pixels: 100000 then" in text


def test_labels_from_a_list_and_shards_by_size(call):
    Path("names.txt").write_text("dog\nbird\ncat\n")
    Path("list.csv").write_text("file,what\ncat/1.png,cat|dog\ndog/2.png,dog\ncat/3.png,cat\n")
    code, text = call(
        *("photos", "out", "--labels", "list.csv", "--path-column", "file", "--label-column", "what"),
        *("--class-names", "names.txt", "--shard-size", "20kB"),
    )
    assert code == 0, text
    manifest = read_manifest("out/train")
    assert manifest.classes == ("dog", "bird", "cat") and manifest.labels.kind == "multi"
    assert len(manifest.shards) == 3
    assert "does not name 10 images" in text and "1 of 3 classes have no image in split train (first: bird)" in text
    asked = request("out")
    assert asked["shard_size_bytes"] == 20_000 and asked["samples_per_shard"] is None
    assert asked["labels"] == {
        "file": str(Path("list.csv").resolve()),
        "path_column": "file",
        "label_column": "what",
        "class_names": str(Path("names.txt").resolve()),
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--quality", "80"], "--resize-short"),
        (["--resize-short", "20", "--quality", "0"], "quality"),
        (["--resize-short", "0"], "resize_short"),
        (["--resize-short", "20", "--shard-size", "1MB"], "samples_per_shard"),
        (["--max-image-pixels", "0"], "--max-image-pixels"),
        (["--shard-size", "many"], "--shard-size: 'many' is no size"),
        (["--shard-size", "1MB", "--samples-per-shard", "3"], "not both"),
        (["--path-column", "x"], "--labels"),
        (["--class-names", "x"], "--labels"),
        (["--labels", "none.csv"], "none.csv"),
        (["--holdout-list", "none.txt"], "none.txt"),
        (["--holdout-list", "none.txt", "--holdout", "0.1"], "not both"),
        (["--holdout-list", "none.txt", "--holdout-images", "3"], "not both"),
        (
            ["--holdout", "0.1", "--holdout-images", "3"],
            "--holdout, --holdout-images, --holdout-list: give one of them, not both",
        ),
        (["--holdout-images", "0"], "--holdout-images"),
        (["--holdout", "10"], "not 10: 10 % is --holdout 0.1, and --holdout-images takes a number"),
        (["--holdout", "2.5"], "not 2.5: 2.5 % is --holdout 0.025"),
        (["--holdout", "300"], "not 300, and --holdout-images takes a number"),
        (["--holdout", "-1"], "between 0 and 1"),
        (["--name", " "], "name"),
        (["--holdout-images", "13"], "13 images"),
        (["--superclasses"], "--superclasses"),
        (["--val-labels", "none.csv"], "--val-labels"),
        (["--val", "nowhere"], "nowhere"),
    ],
)
def test_options_that_are_refused(call, options: list[str], named: str):
    code, text = call("photos", "out", *options)
    assert code == 2 and named in text
    assert text.splitlines()[-1].startswith("shardvit: ") and text.count("\n") <= 2
    assert {path.name for path in Path().iterdir()} == {"photos"}


def test_an_unreadable_image_ends_it_and_is_listed(call):
    Path("photos/cat/bad.png").write_bytes(b"x")
    code, text = call("photos", "out")
    assert code == 2 and text.count("\n") == 2
    assert "1 of 14 images cannot be read: cat/bad.png" in text and "--skip-unreadable" in text
    assert json.loads(Path("out.unreadable.jsonl").read_text())["path"] == "cat/bad.png"
    Path("photos/cat/bad.png").unlink()
    code, text = call("photos", "out")
    assert code == 0 and {path.name for path in Path().iterdir()} == {"photos", "out"}
