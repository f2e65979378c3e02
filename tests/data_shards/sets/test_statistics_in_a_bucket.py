"""A set in a bucket: `check` writes its table beside the manifest, and the summary reads only parts of it."""

from collections.abc import Callable
from pathlib import Path

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.sets.statistics import STATISTICS_FILE
from shardvit.data_shards.sets.statistics_summary import summarise
from shardvit.data_shards.store.store import Store
from shardvit.launch.pages.shards_page import show_statistics
from tests.data_shards.checking.doctored import looked_at
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import write_folder


def test_check_makes_the_table_there_and_show_reads_it(
    s3: FaultServer,
    put: Callable[[str, bytes], None],
    tmp_path: Path,
    store: Store,
):
    write_folder(tmp_path / "images", {"cat": 9, "dog": 8})
    pack(str(tmp_path / "images"), tmp_path / "set", samples_per_shard=5, report=lambda line: None)
    for path in (tmp_path / "set" / "train").iterdir():
        if path.name != STATISTICS_FILE:
            put(f"set/train/{path.name}", path.read_bytes())
    looked_at("s3://shards/set/train", decode=True, statistics=True, store=store)
    here, there = summarise(str(tmp_path / "set" / "train")), summarise("s3://shards/set/train")
    assert (there.images, there.bytes) == (here.images, here.bytes) == (17, here.bytes)
    assert there.mean.tolist() == here.mean.tolist() and there.extremes == here.extremes
    s3.asked.clear()
    shown = show_statistics("s3://shards/set", store=store)
    assert any("17" in number for number, _ in shown.facts)
    assert not any(".tar" in path for _, path in s3.asked)
