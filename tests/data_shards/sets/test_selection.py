"""A choice of a set's samples: exactly those of which the expression is true, in the set's order, wherever it lies."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.tars.samples import SampleOptions
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.sets.selection import write_choice
from shardvit.data_shards.shards.manifest import read_manifest
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import Sample, by_index, write_folder
from tests.data_shards.reading.test_named_manifest import samples
from tests.data_shards.sets.measured import measure


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chosen")
    write_folder(root / "in", {"cat": 20, "dog": 11, "eel": 6})
    for copy in range(5):
        shutil.copy(root / "in/cat/im. 0.png", root / f"in/cat/copy{copy}.png")
    pack(str(root / "in"), root / "out", samples_per_shard=6, holdout=0.3, report=lambda line: None)
    for split in ("train", "val"):
        measure(read_manifest(root / "out" / split))
    return root / "out"


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "out"))


def select(location: Path | str, text: str, *, name: str = "x") -> list[str]:
    lines: list[str] = []
    write_choice(str(location), text, name=name, report=lines.append)
    return lines


def opened(location: Path) -> list[Sample]:
    return [(each.key, each.image, each.labels[0]) for each in samples(open_shards(str(location)))]


def expected(split: Path, *, classes: str = "cat dog eel", least_bytes: int = 0) -> list[Sample]:
    manifest = read_manifest(split)
    names = classes.split()
    every = [each for each in by_index(manifest) if manifest.classes[each[2]] in names and len(each[1]) >= least_bytes]
    return every


def test_of_each_split_its_own_samples(out: Path):
    lines = select(out, "class_name != 'dog' and bytes >= 400")
    assert len(lines) == 2
    for split in ("train", "val"):
        chosen = expected(out / split, classes="cat eel", least_bytes=400)
        assert opened(out / split / "manifest-x.json") == chosen != []
        made = read_manifest(out / split / "manifest-x.json")
        assert made.parent == read_manifest(out / split).digest and made.where == "class_name != 'dog' and bytes >= 400"
        assert made.classes == ("cat", "dog", "eel") and f"{len(chosen):,} of " in " ".join(lines)
    assert opened(out / "train") == expected(out / "train")  # as it was


def test_a_choice_of_a_choice(out: Path):
    select(out / "train", "class_name != 'dog'", name="no-dogs")
    select(out / "train/manifest-no-dogs.json", "class_name != 'eel'", name="cats")
    assert opened(out / "train/manifest-cats.json") == expected(out / "train", classes="cat")
    assert (
        read_manifest(out / "train/manifest-cats.json").parent
        == read_manifest(out / "train/manifest-no-dogs.json").digest
    )


def test_not_duplicate_leaves_one_of_each(out: Path):
    select(out / "train", "not duplicate")
    images = [image for _, image, _ in expected(out / "train")]
    assert sorted({*images}) == sorted(image for _, image, _ in opened(out / "train/manifest-x.json"))


def test_nothing_and_everything_are_told(out: Path):
    with pytest.raises(UserError, match="no image is left where width > 1000"):
        select(out, "width > 1000")
    assert not list(out.rglob("manifest-*"))
    (line,) = select(out / "train", "width > 0")
    assert "all " in line and opened(out / "train/manifest-x.json") == expected(out / "train")


def test_the_same_again_and_another_of_that_name(out: Path):
    select(out / "train", "class_name == 'cat'")
    first = read_manifest(out / "train/manifest-x.json")
    (line,) = select(out / "train", "class_name == 'cat'")
    assert "was written before" in line
    select(out / "train", "class_name == 'eel'")
    assert read_manifest(out / f"train/manifest-{first.digest}.json").digest == first.digest
    assert opened(out / "train/manifest-x.json") == expected(out / "train", classes="eel")


@pytest.mark.parametrize("name", ["../x", "", "a b", "x" * 200])
def test_names_that_are_no_file_are_refused(out: Path, name: str):
    with pytest.raises(UserError, match="--manifest"):
        select(out / "train", "width > 0", name=name)


def test_statistics_of_other_shards_are_refused(out: Path):
    manifest = read_manifest(out / "train")
    measure(replace(manifest, shards=manifest.shards[1:]))
    with pytest.raises(UserError, match=rf"lacks samples of {manifest.shards[0].file}"):
        select(out / "train", "width > 0")


def test_without_statistics_nothing_is_chosen(out: Path):
    (out / "train/statistics.parquet").unlink()
    with pytest.raises(UserError, match=r"statistics\.parquet.*check --decode"):
        select(out, "width > 0")


def test_in_a_bucket(packed: Path, s3: FaultServer):
    import s3fs  # noqa: F401

    from shardvit.data_shards.store.folders import open_folder

    for path in (packed / "train").iterdir():
        open_folder("s3://shards/out/train").write(path.name, path.read_bytes())
    select("s3://shards/out", "class_name == 'cat'")
    chosen = open_shards("s3://shards/out/train/manifest-x.json")
    assert chosen.num_samples == len(expected(packed / "train", classes="cat"))


def test_packed_again_it_is_the_same_samples_with_the_same_bytes(out: Path, tmp_path: Path):
    where = "class_name != 'dog' and bytes >= 400"
    select(out, where)
    pack(
        str(out), tmp_path / "again", samples=SampleOptions(where=where), samples_per_shard=3, report=lambda line: None
    )
    for split in ("train", "val"):
        again, chosen = (
            read_manifest(tmp_path / "again" / split),
            expected(out / split, classes="cat eel", least_bytes=400),
        )
        assert sorted(each[1:] for each in by_index(again)) == sorted(each[1:] for each in chosen)
        assert again.classes == ("cat", "dog", "eel")
    pack(str(out / "train/manifest-x.json"), tmp_path / "third", samples_per_shard=3, report=lambda line: None)
    assert {each[1:] for each in by_index(read_manifest(tmp_path / "third/train"))} == {
        each[1:] for each in expected(out / "train", classes="cat eel", least_bytes=400)
    }


@pytest.mark.parametrize("spec", ["digits", "in", "in/cat/im. 0.png", "none"])
def test_what_is_no_packed_set_has_no_choice(packed: Path, tmp_path: Path, spec: str):
    source = spec if spec == "digits" else str(packed.parent / spec)
    with pytest.raises(UserError, match=r"--where: .* no packed set"):
        pack(source, tmp_path / "x", samples=SampleOptions(where="width > 1"), report=lambda line: None)
