"""Requests foreseen against those that a bucket sees."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from shardvit.data_shards.packing.forecast.trial import forecast
from shardvit.data_shards.packing.pack import list_source, pack
from shardvit.data_shards.store import upload
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import encoded


def seen(server: FaultServer) -> dict[str, int]:
    """Requests by kind, as stores charge them; DELETE is free."""
    kinds = {"list": 0, "get": 0, "put": 0}
    for method, path in server.asked:
        is_list = method == "GET" and ("list-type=" in path or "?uploads" in path)
        kinds["list" if is_list else "get" if method in ("GET", "HEAD") else "put"] += method != "DELETE"
    return kinds


@pytest.mark.parametrize("options", [{}, {"duplicates": "drop"}, {"samples_per_shard": 1}])
@pytest.mark.parametrize("out", ["here", "s3://shards/set"])
def test_a_bucket_sees_the_requests_that_were_foreseen(
    s3: FaultServer, put: Callable[[str, bytes], None], tmp_path: Path, options: dict[str, object], out: str
):
    sizes = 0
    for number in range(30):
        data = encoded(number)
        put(f"raw/{('cat', 'dog')[number % 2]}/{number}.png", data)
        sizes += len(data)
    out = out if out.startswith("s3") else str(tmp_path / out)
    options = {"samples_per_shard": 4, "holdout": 0.2, "report": lambda line: None, **options}
    listed, request = list_source("s3://shards/raw", out, **options)
    cost = forecast(listed, request, out, workers=2)
    assert not any(method in ("PUT", "POST") for method, _ in s3.asked)
    s3.asked.clear()
    pack("s3://shards/raw", out, **options)
    assert asdict(cost.requests) == seen(s3)
    assert cost.remote_bytes == sizes * (1 + ("duplicates" in options))
    written = sum(each.bytes for each in cost.splits)
    assert (cost.sent_bytes, cost.bytes - cost.sent_bytes) == ((written, 0) if "s3" in out else (0, written))


def test_requests_of_an_upload_are_those_of_its_parts(s3: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload, "PART_BYTES", 5 * 2**20)  # S3's least
    for size in (0, 10 * 2**20 - 1, 10 * 2**20, 11 * 2**20):
        (tmp_path / "file").write_bytes(bytes(size))
        s3.asked.clear()
        upload.upload("s3://shards/file", tmp_path / "file")
        assert sum(method in ("PUT", "POST") for method, _ in s3.asked) == upload.count_requests(size)
