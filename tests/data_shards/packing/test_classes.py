"""Classes that were hardly meant: refused with what to type if they were, or said; from folders, tars and lists."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.shards.labels import similar_names
from tests.data_shards.packing.folders import encoded, quiet, spoken


def write(root: Path, *files: str) -> str:
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(encoded(number))
    return str(root)


@pytest.mark.parametrize("other", ["CAT", "cat ", "c at", "Cat\u3000"])
def test_names_that_differ_only_by_case_or_blanks(tmp_path: Path, other: str):
    assert similar_names(["dog", "cat", "cart", other]) == [["cat", other]]
    spec = write(tmp_path / "in", "dog/1.png", "cat/2.png", f"{other}/3.png")
    if other.isprintable():
        with pytest.raises(UserError, match=rf"classes .*'{other}'.* differ only by case or blanks.*--keep-classes"):
            quiet(spec, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        assert quiet(spec, tmp_path / "out", doubtful_classes="keep").train.num_classes == 3
        assert quiet(spec, tmp_path / "two", classes=["cat", other]).train.classes == ("cat", other)


def test_labels_of_a_list_that_differ_only_by_blanks(tmp_path: Path):
    spec = write(tmp_path / "in", "1.png", "2.png", "3.png")
    (tmp_path / "labels.csv").write_text("path,label\n1.png,cat\n2.png,cat \n3.png,dog\n")
    labels = LabelList(tmp_path / "labels.csv")
    with pytest.raises(UserError, match=r"'cat', 'cat ' differ only"):
        quiet(spec, tmp_path / "out", labels=labels)
    assert quiet(spec, tmp_path / "out", labels=labels, doubtful_classes="keep").train.classes == ("cat", "cat ", "dog")


@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_of_classes_that_become_one_class(tmp_path: Path, split: str):
    spec = write(tmp_path / "in", *(f"{split}x/y/{name}" for name in ("cat/1.png", "cat/2.png", "dog/3.png")))
    their = f"{split}x/y/cat, {split}x/y/dog"
    with pytest.raises(
        UserError, match=rf"one class alone, as {their} are all x: give {spec}/{split}x/y, or add --keep-classes"
    ):
        quiet(spec, tmp_path / "out")
    assert quiet(spec, tmp_path / "out", doubtful_classes="keep").train.classes == ("x",)
    assert quiet(f"{spec}/{split}x/y", tmp_path / "two").train.classes == ("cat", "dog")


def test_folders_in_several_classes_are_said_and_kept(tmp_path: Path):
    spec = write(tmp_path / "in", "pet/cat/1.png", "pet/dog/2.png", "car/images/3.png", "car/images/4.png")
    result, text = spoken(spec, tmp_path / "out")
    assert result.train.classes == ("car", "pet")
    (line,) = [line for line in text.splitlines() if "classes have several folders each" in line]
    assert "1 of 2 classes" in line and "pet/cat, pet/dog are all pet" in line and "car/images" not in line


def test_one_class_that_is_one_folder_is_nothing_to_speak_of(tmp_path: Path):
    spec = write(tmp_path / "in", "cat/images/1.png", "cat/images/2.png")
    assert quiet(spec, tmp_path / "out").train.classes == ("cat",)
