"""What `pack --dry-run` foresees against what packing then does; money and times by hand."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.forecast.cost import (
    PackCost,
    SplitCost,
    StoreRequests,
    Trial,
    parse_bandwidth,
    parse_prices,
)
from shardvit.data_shards.packing.forecast.trial import forecast
from shardvit.data_shards.packing.image import Resize
from shardvit.data_shards.packing.pack import list_source, pack
from shardvit.data_shards.shards.manifest import read_manifest
from tests.data_shards.packing.folders import write_folder


def quiet(line: str) -> None:
    pass


def foreseen(source: Path, out: Path, **options: object) -> PackCost:
    listed, request = list_source(str(source), out, report=quiet, **options)
    return forecast(listed, request, str(out), workers=2)


def files_below(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_size if path.is_file() else -1) for path in folder.rglob("*")}


@pytest.mark.parametrize("options", [{"samples_per_shard": 7, "holdout": 0.2}, {"shard_size_bytes": 20_000}])
def test_images_shards_and_bytes_are_those_of_the_packing_and_nothing_is_written(tmp_path: Path, options: dict):
    source, out = tmp_path / "images", tmp_path / "set"
    write_folder(source, {"cat": 23, "dog": 17})
    before = files_below(tmp_path)
    cost = foreseen(source, out, **options)
    assert files_below(tmp_path) == before
    pack(str(source), out, report=quiet, **options)
    for each in cost.splits:
        manifest = read_manifest(out / each.split)
        assert (each.images, each.shards) == (manifest.num_samples, len(manifest.shards))
        written = sum(path.stat().st_size for path in (out / each.split).iterdir() if path.suffix in (".tar", ".idx"))
        assert abs(each.bytes - written) <= 12_000 * each.shards
        assert abs(each.largest_bytes - max(shard.num_bytes for shard in manifest.shards)) <= 12_000
    assert cost.images == 40 and cost.classes == 2
    assert cost.source_bytes == sum(path.stat().st_size for path in source.rglob("*.*g"))
    assert cost.requests == StoreRequests() and cost.remote_bytes == cost.sent_bytes == 0
    assert cost.trial.images == 40 and cost.trial.unreadable == 0 and cost.trial.growth == 1


def test_reduced_images_are_tried(tmp_path: Path):
    source, draw = tmp_path / "images" / "cat", np.random.default_rng(0)
    source.mkdir(parents=True)
    for number in range(12):
        small = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        small.resize((300 + number, 280)).save(source / f"{number}.png")
    (source / "bad.png").write_bytes(b"no image")
    options = {"resize": Resize(64), "doubtful_classes": "keep", "unreadable": "skip"}
    cost = foreseen(source.parent, tmp_path / "set", **options)
    assert (cost.trial.images, cost.trial.unreadable) == (13, 1) and cost.trial.growth < 0.5
    pack(str(source.parent), tmp_path / "set", report=quiet, **options)
    (split,) = cost.splits
    assert abs(split.bytes - read_manifest(tmp_path / "set" / "train").num_bytes) < 15_000


def made(**changed: object) -> PackCost:
    splits = (SplitCost("train", 900_000, 900, 90_000_000_000, 10**8), SplitCost("val", 100_000, 100, 10**10, 10**8))
    values = {
        "source": "s3://raw/x",
        "classes": 10,
        "splits": splits,
        "source_bytes": 10**11,
        "remote_bytes": 10**11,
        "requests": StoreRequests(list=2000, get=1_000_000, put=4000),
        "destination": "store",
        "scratch_bytes": 10**9,
        "trial": Trial(64, 0.0036, 0.0001),
        "workers": 10,
        "bytes_per_second": 1.25e9,
        "prices": {"get": 0.0004, "put": 0.005, "list": 0.005, "egress": 0.09, "storage": 0.023, "core_hour": 0.04},
    }
    return PackCost(**values | changed)


def test_hours_and_money_by_hand():
    cost = made()
    assert cost.core_hours == pytest.approx(1.0) and cost.hours == pytest.approx(0.1)
    assert cost.network_hours == pytest.approx(160 / 3600)
    expected = {"get": 0.4, "put": 0.02, "list": 0.01, "egress": 9.0, "storage": 2.3, "core_hour": 0.04}
    assert cost.money == pytest.approx(expected)
    assert any("11.77" in line for line in cost.lines())
    slow = made(bytes_per_second=1e6)
    assert slow.hours == slow.network_hours == pytest.approx(2e5 / 3600)
    here = made(destination="disk", prices={})
    assert here.sent_bytes == 0 and here.money == {} and not any("money" in line for line in here.lines())
    unknown = made(trial=Trial(0))
    assert unknown.core_hours is None and any("unknown" in line for line in unknown.lines())
    assert set(cost.as_json()) >= {"images", "core_hours", "money", "requests", "splits"}


def test_what_is_typed():
    assert parse_prices("get=0.0004, core_hour=2") == {"get": 0.0004, "core_hour": 2}
    assert parse_prices(None) == {}
    for text in ("gets=1", "get", "get=x", "get=-1", "get=nan", ""):
        if text:
            with pytest.raises(UserError, match="--price"):
                parse_prices(text)
    assert parse_bandwidth("10Gbit") == 1.25e9 and parse_bandwidth("500mbit") == 6.25e7
    for text in ("10", "0Gbit", "fast", "10GB"):
        with pytest.raises(UserError, match="--bandwidth"):
            parse_bandwidth(text)
