"""`check --decode --statistics`: the table of a set that has none, whoever packed it, by any number of processes."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import manifest_of
from shardvit.data_shards.sets.statistics import STATISTICS_FILE
from tests.data_shards.checking.doctored import by_kind, looked_at, tars
from tests.data_shards.packing.folders import by_index, encoded


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A set where some images are there twice, in one class or two; some grey."""
    for number in range(40):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        data = encoded(number % 29, "PNG", "L" if number % 29 % 3 == 0 else "RGB")
        (folder / f"{number}.png").write_bytes(data)
    out = tmp_path / "set"
    pack(str(tmp_path / "images"), out, samples_per_shard=7, report=lambda line: None)
    (out / "train" / STATISTICS_FILE).unlink(missing_ok=True)
    return out


def measured(location: Path, **options: object) -> pd.DataFrame:
    looked_at(location, decode=True, statistics=True, **options)
    return pd.read_parquet(location / STATISTICS_FILE)


def test_the_table_is_that_of_all_pixels_and_its_copies_are_those_that_check_finds(copies: Path):
    result = looked_at(copies, decode=True, statistics=True)
    table = pd.read_parquet(copies / "train" / STATISTICS_FILE)
    manifest = manifest_of(str(copies / "train"), store=None)
    samples = by_index(manifest)
    assert table["key"].tolist() == [key for key, _, _ in samples]
    assert table["labels"].map(list).tolist() == [[label] for *_, label in samples]
    for row, (_, data, _) in zip(table.itertuples(), samples, strict=True):
        assert row.bytes == len(data)
    for shard, rows in table.groupby("shard"):
        assert rows["row"].tolist() == list(range(manifest.shards[shard].num_samples))
    found = by_kind(result)
    kinds = [found[kind] for kind in ("duplicate-image", "contradicting-label") if kind in found]
    places = {(each.shard, each.key) for kind in kinds for each in kind.places}
    copied = table[table["duplicate"]]
    assert {(manifest.shards[row.shard].file, row.key) for row in copied.itertuples()} == places
    assert len(copied) == 11 == len(table) - table["digest"].nunique()


def test_moments_are_torchvisions_over_all_pixels(copies: Path, tmp_path: Path):
    table = measured(copies / "train")
    for row in table.itertuples():
        name = row.key.split("_")[1]
        place = next((tmp_path / "images").rglob(f"{name}.png"))
        pixels = np.asarray(Image.open(place).convert("RGB"), float).reshape(-1, 3)
        assert np.allclose([row.mean_r, row.mean_g, row.mean_b], pixels.mean(0), atol=1e-4)
        assert np.allclose([row.std_r, row.std_g, row.std_b], pixels.std(0), atol=1e-4)
        assert (row.width, row.height) == (11, 9)
    greys = table[(table["mean_r"] == table["mean_g"]) & (table["mean_g"] == table["mean_b"])]
    assert len(greys) == sum(number % 29 % 3 == 0 for number in range(40))


def test_one_process_or_three_write_the_same_bytes(copies: Path):
    measured(copies / "train")
    one = (copies / "train" / STATISTICS_FILE).read_bytes()
    measured(copies / "train", engine=local_engine(3))
    assert (copies / "train" / STATISTICS_FILE).read_bytes() == one
    left = {path.name for path in (copies / "train").iterdir() if path.name.startswith(".")}
    assert left == set()


def test_tars_without_a_manifest_need_a_folder_for_it(copies: Path, tmp_path: Path):
    (tmp_path / "tars").mkdir()
    for tar in tars(copies / "train"):
        shutil.copy(tar, tmp_path / "tars")
    with pytest.raises(UserError, match="--output"):
        looked_at(tmp_path / "tars", decode=True, statistics=True)
    looked_at(tmp_path / "tars", decode=True, statistics=True, statistics_to=str(tmp_path / "made"))
    ours, theirs = measured(copies / "train"), pd.read_parquet(tmp_path / "made" / STATISTICS_FILE)
    pd.testing.assert_frame_equal(ours.drop(columns="labels"), theirs.drop(columns="labels"))


def test_an_image_that_cannot_be_decoded_has_a_row_without_pixels_and_a_lost_shard_none(copies: Path):
    tar = tars(copies / "train")[0]
    data = bytearray(tar.read_bytes())
    at = data.find(b"IDAT")
    data[at + 4 : at + 40] = bytes(36)
    tar.write_bytes(data)
    tars(copies / "train")[3].unlink()
    table = measured(copies / "train")
    assert len(table) == 40 - 7 and set(table["shard"]) == {0, 1, 2, 4, 5}
    assert list(table["width"]).count(0) == 1 and int(np.isnan(table["mean_r"].to_numpy()).sum()) == 1


def test_packings_table_which_knows_paths_is_not_replaced(copies: Path, tmp_path: Path):
    pack(str(tmp_path / "images"), tmp_path / "fresh", report=lambda line: None)
    table = tmp_path / "fresh" / "train" / STATISTICS_FILE
    before = table.read_bytes()
    with pytest.raises(UserError, match="packing wrote it"):
        measured(table.parent)
    looked_at(table.parent, decode=True, statistics=True, statistics_to=str(tmp_path / "ours"))
    measured(copies / "train")
    measured(copies / "train")  # our own is
    assert table.read_bytes() == before
    assert pd.isna([*pd.read_parquet(tmp_path / "ours" / "train" / STATISTICS_FILE)["path"]]).all()


def test_a_folder_that_cannot_be_written_is_refused_before_reading(copies: Path):
    (copies / "train" / f".{STATISTICS_FILE}").mkdir()  # root may write everywhere else
    with pytest.raises(UserError, match="--output"):
        measured(copies / "train")
