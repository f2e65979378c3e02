"""A set's summary against pandas over the whole table; pages from the table alone."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets import statistics
from shardvit.data_shards.sets.statistics import SampleStatistics, image_statistics, to_parquet, write_statistics
from shardvit.data_shards.sets.statistics_summary import mean_and_std, summarise
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.data_shards.store.folders import LocalFolder
from shardvit.data_shards.store.store import Store
from shardvit.launch.pages.shards_page import show_statistics


def made(folder, *, shards=4, images=30, multi=False, monkeypatch):
    monkeypatch.setattr(statistics, "ROWS", 17)
    rng = np.random.default_rng(0)
    parts, pixels = [], []
    for shard in range(shards):
        rows = []
        for row in range(images):
            height, width = rng.integers(1, 60, 2)
            array = rng.integers(0, rng.integers(2, 256), (height, width, 3), dtype=np.uint8)
            labels = rng.choice(5, rng.integers(0, 4), replace=False).tolist() if multi else [int(rng.integers(5))]
            data = rng.bytes(int(rng.integers(1, 2000))) if row else b"copy"
            key = f"{shard}-{row}"
            if row == 3:
                rows.append(SampleStatistics(row, key, None, labels, image_statistics(None, data)))
                continue
            pixels.append(array)
            rows.append(SampleStatistics(row, key, None, labels, image_statistics(array, data)))
        parts.append((shard, to_parquet(rows)))
    kind = LabelSpec(part="json", key="label", kind="multi") if multi else LabelSpec()
    names = tuple(Shard(f"x-{number}.tar", images, 1, "") for number in range(shards))
    manifest = Manifest(folder, "x", "train", tuple("abcde"), names, "s", labels=kind)
    write_statistics(LocalFolder(folder), manifest, parts, unreadable=[1, 1])
    import pyarrow.parquet as pq

    frame = pq.read_table(folder / "statistics.parquet").to_pandas()
    return frame[frame["width"] > 0], pixels


@pytest.mark.parametrize("multi", [False, True])
def test_the_summary_is_pandas_of_the_whole_table(tmp_path, monkeypatch, multi):
    frame, pixels = made(tmp_path, multi=multi, monkeypatch=monkeypatch)
    seen = summarise(str(tmp_path))
    assert (seen.images, seen.unreadable, seen.duplicates) == (len(frame), 2 + 4, 3)
    assert seen.bytes == frame["bytes"].sum()
    assert seen.images_of_class.tolist() == frame["labels"].explode().value_counts().reindex(range(5)).tolist()
    assert seen.labels_an_image == frame["labels"].map(len).value_counts().to_dict()
    values, counts = seen.bins("width")
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == frame["width"].value_counts().to_dict()
    values, counts = seen.bins("aspect")
    aspects = np.sort(frame["width"] / frame["height"])
    assert np.allclose(np.repeat(values, counts), aspects, rtol=0.0011)
    # The set's moments, as torchvision's users compute them: each image with the same weight.
    mean = np.mean([each.reshape(-1, 3).mean(0) for each in pixels], axis=0) / 255
    square = np.mean([(each.reshape(-1, 3).astype(float) ** 2).mean(0) for each in pixels], axis=0) / 255**2
    assert np.allclose(seen.mean, mean, atol=1e-6)
    assert np.allclose(seen.std, np.sqrt(square - mean**2), atol=1e-5)
    levels = np.histogram(frame["mean_g"], bins=np.arange(0, 257, 8))[0]
    assert seen.moments[1].tolist() == levels.tolist()
    named = {what: [each.key for each in seen.extremes if each.what == what] for what in ("most bytes", "darkest")}
    dark = frame[["mean_r", "mean_g", "mean_b"]].astype(float).mean(axis=1)
    assert named["most bytes"] == frame.sort_values("bytes", ascending=False, kind="stable")["key"].head(5).tolist()
    assert named["darkest"] == frame.loc[dark.sort_values(kind="stable").index, "key"].head(5).tolist()
    assert {each.shard for each in seen.extremes} <= {f"x-{number}.tar" for number in range(4)}


@pytest.mark.parametrize("multi", [False, True])
def test_the_page_needs_nothing_but_the_table(tmp_path, monkeypatch, multi):
    folder = tmp_path / "elsewhere"
    made(folder, multi=multi, monkeypatch=monkeypatch)
    shown = show_statistics(str(folder / "statistics.parquet"), store=Store())
    page = shown.write(tmp_path / "page", command="show").read_text()
    assert "116" in page and "imbalance" not in page and "x-0.tar" in page
    assert ("labels.png" in shown.files) == multi


def test_a_missing_or_foreign_table_is_refused(tmp_path):
    with pytest.raises(UserError, match="check SET --decode --statistics"):
        summarise(str(tmp_path))
    Image.new("RGB", (2, 2)).save(stream := io.BytesIO(), "PNG")
    (tmp_path / "statistics.parquet").write_bytes(stream.getvalue())
    with pytest.raises(UserError, match=r"statistics\.parquet: is no table"):
        summarise(str(tmp_path))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"width": [1]}), tmp_path / "statistics.parquet")
    with pytest.raises(UserError, match=r"statistics\.parquet: is no table"):
        summarise(str(tmp_path))


def test_means_read_alone_are_the_summarys(tmp_path, monkeypatch):
    made(tmp_path, monkeypatch=monkeypatch)
    seen, found = summarise(str(tmp_path)), mean_and_std(str(tmp_path))
    assert found is not None and found.images == seen.images
    assert np.allclose(found.mean, seen.mean) and np.allclose(found.std, seen.std)


@pytest.mark.parametrize("channels", [10**9, -1, "5"])
def test_a_table_of_any_number_of_channels_is_refused(tmp_path, monkeypatch, channels):
    import pyarrow.parquet as pq

    made(tmp_path, monkeypatch=monkeypatch)
    table = pq.read_table(tmp_path / "statistics.parquet")
    facts = statistics.read_facts(table.schema.metadata) | {"channels": channels}
    pq.write_table(table.replace_schema_metadata({b"shardvit": json.dumps(facts)}), tmp_path / "statistics.parquet")
    for read in (summarise, mean_and_std):
        with pytest.raises(UserError, match="no table of a set's statistics"):
            read(str(tmp_path))
