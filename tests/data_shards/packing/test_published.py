"""Gzipped archives packed: through an interruption, and nothing of their copy is left."""

import json
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import decompress
from tests.data_shards.packing.folders import quiet, tree
from tests.data_shards.packing.sources.layouts import class_tars, imagenet_train, jpeg, write_tar

TRAIN = imagenet_train()


@pytest.fixture(autouse=True)
def _listings_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_a_gzipped_archive_leaves_nothing_and_is_not_decompressed_to_see_that_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = write_tar(
        tmp_path / "winter21_whole.tar.gz", {f"w/{name}": data for name, data in class_tars(TRAIN).items()}
    )
    first = quiet(str(source), tmp_path / "out", holdout_images=2)
    assert [manifest.num_samples for manifest in first.manifests] == [len(TRAIN) - 2, 2]
    assert leftovers(tmp_path) == []
    monkeypatch.setattr(decompress, "_decompress", lambda *_: pytest.fail("decompressed again"))
    assert quiet(str(source), tmp_path / "out", holdout_images=2).compared
    with pytest.raises(UserError, match="holdout_images"):
        quiet(str(source), tmp_path / "out", holdout_images=3)


def test_a_packing_that_ended_goes_on_with_the_same_copy_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {f"{name}/{i}.jpg": jpeg(100 * k + i) for k, name in enumerate("abc") for i in range(8)}
    source = write_tar(tmp_path / "set.tar.gz", files)
    quiet(str(source), tmp_path / "whole", samples_per_shard=4)
    broken = {**files, "b/3.jpg": b"no image"}
    other = write_tar(tmp_path / "other/set.tar.gz", broken)
    with pytest.raises(UserError, match=r"b/3\.jpg"):
        quiet(str(other), tmp_path / "out", samples_per_shard=4)
    assert leftovers(tmp_path) == [".out.packing", ".out.unpacked"]
    monkeypatch.setattr(decompress, "_decompress", lambda *_: pytest.fail("decompressed again"))
    result = quiet(str(other), tmp_path / "out", samples_per_shard=4, unreadable="skip")
    assert result.counts.unreadable == 1 and leftovers(tmp_path) == []
    assert json.loads((tmp_path / "out/unreadable.jsonl").read_text())["path"] == "b/3.jpg"
    same = {shard: digest for shard, digest in tree(tmp_path / "out/train").items() if shard.endswith(".tar")}
    whole = tree(tmp_path / "whole/train")
    assert sum(whole[shard] == digest for shard, digest in same.items()) == len(same) - 1 > 3


def test_a_mistake_leaves_no_copy(tmp_path: Path):
    source = write_tar(tmp_path / "a.tar.gz", {"readme.txt": b"no image"})
    with pytest.raises(UserError, match="no image"):
        quiet(str(source), tmp_path / "out")
    assert leftovers(tmp_path) == []
