"""Requests foreseen against those that a bucket sees."""

from collections import Counter
from pathlib import Path

import pytest

from shardvit.data_shards.packing.forecast.trial import forecast
from shardvit.data_shards.packing.pack import list_source, pack
from shardvit.data_shards.store import ranges, upload
from shardvit.data_shards.store.download import Downloads, RetryPolicy
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import encoded


@pytest.fixture(autouse=True)
def connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave those of earlier tests' servers alone."""
    monkeypatch.setattr(ranges, "SHARED", Downloads(RetryPolicy()))
    monkeypatch.setattr(upload, "UPLOADS", Downloads(RetryPolicy(), requests=6))


def quiet(line: str) -> None:
    pass


def seen(server: FaultServer) -> Counter[str]:
    """Requests by kind, as stores charge them."""
    kinds = Counter[str]()
    for method, path in server.asked:
        is_list = method == "GET" and "list-type=" in path
        kinds["list" if is_list else "get" if method in ("GET", "HEAD") else "put"] += method != "DELETE"
    return kinds


@pytest.mark.parametrize("options", [{}, {"duplicates": "drop"}])
def test_images_of_a_bucket_are_asked_for_as_often_as_foreseen(s3: FaultServer, put, tmp_path: Path, options: dict):
    sizes = 0
    for number in range(30):
        data = encoded(number)
        put(f"raw/{('cat', 'dog')[number % 2]}/{number}.png", data)
        sizes += len(data)
    listed, request = list_source("s3://shards/raw", tmp_path / "set", report=quiet, **options)
    looks = sum("list-type=" in path and "manifest.json" in path for _, path in s3.asked)  # whether it is a packed set
    lists = seen(s3)["list"] - looks
    cost = forecast(listed, request, str(tmp_path / "set"), workers=2)
    assert cost.remote_bytes == sizes * (1 + bool(options))
    assert cost.requests.list == lists and cost.requests.put == 0
    s3.asked.clear()
    pack("s3://shards/raw", tmp_path / "set", report=quiet, **options)
    assert sum(method == "GET" and ".png" in path for method, path in s3.asked) == cost.requests.get
