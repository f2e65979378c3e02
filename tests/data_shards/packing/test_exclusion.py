"""`pack --exclude-matches-of`: what is left out, listed and recorded; the same after an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.engines.threads import ThreadEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.request import Exclusion
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.manifest import load_manifest
from shardvit.data_shards.store.store import Store
from shardvit.launch.pages.duplicates_page import write_duplicates
from tests.data_shards.checking.near_duplicates.planted import edited, jpeg, photographs
from tests.data_shards.packing.folders import quiet


def write(root: Path, images: list[bytes]) -> Path:
    for number, data in enumerate(images):
        file = root / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return root


def exclusion(*folders: Path) -> Exclusion:
    return Exclusion(tuple(open_shards(str(folder)) for folder in folders), Store(), write_duplicates)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with copies (at 20 and 21) of images of a test set, and that test set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = photographs(30)
    held_out = [jpeg(image) for image in images[:8]]
    copies = [held_out[2], jpeg(edited(images[5], "mirrored"), quality=50)]
    source = write(tmp_path / "source", [*(jpeg(image) for image in images[8:28]), *copies])
    test = quiet(str(write(tmp_path / "test", held_out)), tmp_path / "test-shards").train.root
    return source, test


def test_matches_are_left_out_listed_and_recorded(sets: tuple[Path, Path], tmp_path: Path):
    source, test = sets
    report = quiet(str(source), tmp_path / "out", exclusion=exclusion(test), samples_per_shard=7)
    assert report.num_images == 20 and report.counts.excluded == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "excluded.jsonl").read_text().splitlines()]
    found = {line["path"]: (line["kind"], line["mirrored"], line["label"], line["split"]) for line in lines}
    assert found == {
        "cat/020.jpg": ("equal-bytes", False, "cat", "train"),
        "dog/021.jpg": ("near-duplicate", True, "dog", "train"),
    }
    assert {line["against"] for line in lines} == {str(test)}
    assert (tmp_path / "out" / "excluded.html").read_text().count("<img") == 2
    digest = load_manifest(test).digest
    assert load_manifest(tmp_path / "out" / "train").without_matches_of == (digest,)
    assert json.loads((tmp_path / "out" / "pack.json").read_text())["request"]["without_matches_of"] == [digest]


def test_the_sets_are_hashed_on_the_engine_that_was_given(sets: tuple[Path, Path], tmp_path: Path):
    works: list[tuple[str, int]] = []

    class Noting(ThreadEngine):
        def run(self, work: Any, request: Any, parts: Any, *, done: Any) -> Any:
            works.append((work.__name__, len(parts)))
            return super().run(work, request, parts, done=done)

    source, test = sets
    report = quiet(str(source), tmp_path / "out", exclusion=exclusion(test), engine=Noting(2))
    assert report.counts.excluded == 2
    assert works == [("_make_part", len(load_manifest(test).shards)), ("make_shard", 1)]


def test_what_is_unsure_is_packed_and_listed(sets: tuple[Path, Path], tmp_path: Path):
    source, test = sets
    (source / "cat" / "200.jpg").write_bytes(jpeg(edited(photographs(30)[6], "changed")))
    report = quiet(str(source), tmp_path / "out", exclusion=exclusion(test))
    assert report.num_images == 21 and (report.counts.excluded, report.counts.unsure) == (2, 1)
    assert any("unsure.jsonl" in line for line in report.lines(dropped=False))
    (line,) = map(json.loads, (tmp_path / "out" / "unsure.jsonl").read_text().splitlines())
    assert (line["path"], line["kind"]) == ("cat/200.jpg", "unsure")
    assert (tmp_path / "out" / "excluded.html").read_text().count("<img") == 3


def test_another_exclusion_is_another_request(sets: tuple[Path, Path], tmp_path: Path):
    source, test = sets
    out = tmp_path / "out"
    quiet(str(source), out, exclusion=exclusion(test))
    assert quiet(str(source), out, exclusion=exclusion(test)).compared
    more = quiet(str(write(tmp_path / "more", [jpeg(image) for image in photographs(4, seed=9)])), tmp_path / "m")
    for other in (None, exclusion(more.train.root), exclusion(test, more.train.root)):
        with pytest.raises(UserError, match="without_matches_of"):
            quiet(str(source), out, exclusion=other)


def test_held_out_images_stay_and_duplicates_are_dropped_beside(sets: tuple[Path, Path], tmp_path: Path):
    source, test = sets
    again = (source / "cat" / "000.jpg").read_bytes()
    (source / "cat" / "100.jpg").write_bytes(again)
    (tmp_path / "list.txt").write_text("dog/021.jpg\ncat/002.jpg\n")
    options = dict(holdout_list=tmp_path / "list.txt", duplicates="drop", exclusion=exclusion(test))
    report = quiet(str(source), tmp_path / "out", **options)
    assert [manifest.num_samples for manifest in report.manifests] == [19, 2]
    assert (report.counts.excluded, report.counts.duplicates) == (1, 1)
    assert load_manifest(tmp_path / "out" / "val").without_matches_of == ()


def test_a_damaged_other_set_is_refused_rather_than_half_excluded(sets: tuple[Path, Path], tmp_path: Path):
    source, test = sets
    found = exclusion(test)
    min(test.glob("*.tar")).unlink()
    with pytest.raises(UserError, match="tar"):
        quiet(str(source), tmp_path / "out", exclusion=found)
    assert not (tmp_path / "out").exists()
