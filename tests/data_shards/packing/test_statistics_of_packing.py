"""The table that packing writes: that of `check` over the shards, by any number of workers, whatever died meanwhile."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shardvit.data_shards.engines.engine import LocalEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.image import Resize
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.sets.statistics import STATISTICS_FILE
from shardvit.data_shards.sets.statistics_summary import summarise
from tests.data_shards.checking.doctored import looked_at
from tests.data_shards.packing.folders import encoded

OPTIONS = {"samples_per_shard": 6, "holdout": 0.2, "unreadable": "skip", "report": lambda line: None}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(40):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(encoded(number % 31, "PNG", "L" if number % 5 == 0 else "RGB"))
    (tmp_path / "images" / "cat" / "bad.png").write_bytes(b"no image")
    return tmp_path / "images"


def table(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / STATISTICS_FILE)


def test_packing_and_check_write_the_same_table(images: Path, tmp_path: Path):
    pack(str(images), tmp_path / "set", **OPTIONS)
    packed = {split: table(tmp_path / "set" / split) for split in ("train", "val")}
    with pytest.raises(UserError, match="remove it first"):  # it would lose the paths
        looked_at(tmp_path / "set", decode=True, statistics=True)
    for split in packed:
        (tmp_path / "set" / split / STATISTICS_FILE).unlink()
    looked_at(tmp_path / "set", decode=True, statistics=True)
    for split, ours in packed.items():
        checked = table(tmp_path / "set" / split)
        assert not [path for path in checked["path"] if isinstance(path, str)]
        pd.testing.assert_frame_equal(ours.drop(columns="path"), checked.drop(columns="path"))
        for row in ours.itertuples():
            assert row.bytes == (images / row.path).stat().st_size and row.key.split("_")[1] == Path(row.path).stem
    assert sum(map(len, packed.values())) == 40 and True in set(packed["train"]["duplicate"])


def test_the_table_is_the_same_by_threads_and_by_processes(images: Path, tmp_path: Path):
    for name, engine in (("a", None), ("b", LocalEngine(1)), ("c", LocalEngine(3))):
        pack(str(images), tmp_path / name, name="x", engine=engine, **OPTIONS)
    for split in ("train", "val"):
        tables = {(tmp_path / name / split / STATISTICS_FILE).read_bytes() for name in "abc"}
        assert len(tables) == 1


def test_the_summary_counts_what_packing_left_out(images: Path, tmp_path: Path):
    pack(str(images), tmp_path / "set", **OPTIONS)
    seen = [summarise(str(tmp_path / "set" / split)) for split in ("train", "val")]
    assert sum(each.unreadable for each in seen) == 1 and sum(each.images for each in seen) == 40


def test_reduced_images_have_the_sizes_and_bytes_of_the_shards(images: Path, tmp_path: Path):
    pack(str(images), tmp_path / "set", resize=Resize(5), **OPTIONS)
    ours = table(tmp_path / "set" / "train")
    for split in ("train", "val"):
        (tmp_path / "set" / split / STATISTICS_FILE).unlink()
    looked_at(tmp_path / "set", decode=True, statistics=True)
    checked = table(tmp_path / "set" / "train")
    same = ["key", "labels", "width", "height", "bytes", "digest", "duplicate"]
    pd.testing.assert_frame_equal(ours[same], checked[same])
    assert (ours[["height", "width"]].min(axis=1) == 5).all()
    assert np.abs(ours["mean_g"].to_numpy() - checked["mean_g"].to_numpy()).max() < 8  # JPEG's loss
