"""The table of statistics against pandas and numpy over all pixels; the same by any cut of the work."""

import io

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shardvit.data_shards.sets import statistics
from shardvit.data_shards.sets.statistics import (
    STATISTICS_FILE,
    SampleStatistics,
    image_statistics,
    read_facts,
    repeated,
    rows_by_shard,
    to_parquet,
    write_statistics,
)
from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.data_shards.store.folders import LocalFolder


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(1, 1), (7, 64), (64, 64), (33, 5)])
def test_a_small_images_moments_are_those_of_all_its_pixels(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    found = image_statistics(pixels, b"bytes")
    assert (found.height, found.width, found.bytes) == (*shape, 5)
    assert np.allclose(found.means, pixels.mean(axis=(0, 1)))
    assert np.allclose(found.stds, pixels.std(axis=(0, 1)), atol=1e-6)


def test_a_large_images_grid_is_regular_and_centred():
    rows, columns = np.mgrid[0:1000, 0:300]
    pixels = np.stack([rows % 256, columns % 256, rows * 0 + 9], axis=2).astype(np.uint8)
    found = image_statistics(pixels, b"")
    grid = pixels[3::16, 2::5]
    assert grid.shape == (63, 60, 3)
    assert np.allclose(found.means, grid.mean(axis=(0, 1)))
    assert found.means[2] == 9 and found.stds[2] == 0
    whole = pixels.reshape(-1, 3).mean(axis=0)
    assert np.allclose(found.means, whole, atol=4)


def samples(count, *, start=0, copies=3):
    made = []
    for row in range(count):
        pixels = np.full((4, 5, 3), (start + row) % copies, np.uint8)
        image = image_statistics(None if row == 1 else pixels, b"no image" if row == 1 else png(pixels))
        made.append(SampleStatistics(row, f"k{start + row}", f"a/{row}\udcff.png", [row % 2], image))
    return made


def table(folder, parts, *, shards=3):
    shown = tuple(Shard(f"x-{number}.tar", 5, 1, f"{number:064}") for number in range(shards))
    manifest = Manifest(folder, "x", "train", ("cat", "dog"), shown, "src")
    write_statistics(LocalFolder(folder), manifest, parts, unreadable=[2])
    return pq.ParquetFile(folder / STATISTICS_FILE)


def test_the_table_marks_later_copies_and_does_not_depend_on_how_the_work_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "ROWS", 4)
    of_shard = [samples(5, start=5 * number) for number in range(3)]
    whole = table(tmp_path / "a", [(number, to_parquet(each)) for number, each in enumerate(of_shard)])
    cut = [(number, to_parquet(piece)) for number, each in enumerate(of_shard) for piece in (each[:2], [], each[2:])]
    table(tmp_path / "b", cut)
    assert (tmp_path / "a" / STATISTICS_FILE).read_bytes() == (tmp_path / "b" / STATISTICS_FILE).read_bytes()
    assert [whole.metadata.row_group(each).num_rows for each in range(whole.num_row_groups)] == [4, 4, 4, 3]
    frame = whole.read().to_pandas()
    readable = frame[frame["width"] > 0]
    assert (frame["duplicate"] == (frame["digest"].duplicated() & (frame["width"] > 0))).all()
    assert readable["duplicate"].sum() == len(readable) - readable["digest"].nunique() > 0
    assert frame["shard"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert pd.isna(frame.loc[1, "mean_r"])
    facts = read_facts(whole.schema_arrow.metadata)
    assert (facts["classes"], facts["unreadable"], facts["shards"][2]) == (["cat", "dog"], [2], "x-2.tar")
    assert [each.name for each in tmp_path.joinpath("a").iterdir()] == [STATISTICS_FILE]


def test_an_empty_set_has_an_empty_table(tmp_path):
    assert table(tmp_path, [], shards=0).read().num_rows == 0


def test_copies_by_pandas_with_equal_first_words():
    digests = np.random.default_rng(1).integers(0, 5, (500, 2), dtype=np.uint64)
    assert (repeated(digests) == pd.DataFrame(digests).duplicated().to_numpy()).all()


def test_a_table_is_cut_into_shards_and_joined_with_more_as_if_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "ROWS", 4)
    parts = [(number, to_parquet(samples(5, start=5 * number))) for number in range(3)]
    table(tmp_path / "whole", parts)
    table(tmp_path / "first", parts[:2], shards=2)
    manifest = Manifest(
        tmp_path, "x", "train", ("cat", "dog"), (Shard("x-0.tar", 5, 1, ""), Shard("x-1.tar", 5, 1, "")), ""
    )
    cut = rows_by_shard(tmp_path / "first" / STATISTICS_FILE, manifest)
    table(tmp_path / "joined", [*cut, parts[2]])
    same = [(tmp_path / name / STATISTICS_FILE).read_bytes() for name in ("whole", "joined")]
    assert same[0] == same[1]
    again = rows_by_shard(
        tmp_path / "joined" / STATISTICS_FILE, manifest
    )  # as of a killed packing: its rows are left out
    assert {number for number, _ in again} == {0, 1}
