"""Servers and shards for the tests of what is read from elsewhere."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardvit.data_shards.store import ranges, upload
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.download import Downloads
from shardvit.data_shards.store.store import RetryPolicy, Store
from tests.data_shards.http_server import FaultServer, serve
from tests.data_shards.opened import QUICK, StoreFor

STALL_SECONDS = 1.0  # where a server or a command does stall; a slow one may seem to as well


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000), retry=QUICK, commands="run")


@pytest.fixture
def store_for(tmp_path: Path) -> StoreFor:
    """`store_for(faults)`: a store for a server with these faults, and the waits between its attempts."""

    def make(faults: list[str]) -> tuple[Store, list[float]]:
        waits: list[float] = []
        if any(fault.startswith("stall") for fault in faults):
            policy = dataclasses.replace(QUICK, stall_timeout_seconds=STALL_SECONDS)
        else:
            policy = QUICK
        cache = CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000)
        return Store(cache, retry=policy, sleep=waits.append), waits

    return make


@pytest.fixture
def impatient(tmp_path: Path) -> Store:
    """Gives up after two to a handful of attempts, however slow the machine: it does not really wait."""
    return make_impatient(tmp_path, QUICK)


@pytest.fixture
def impatient_with_stalls(tmp_path: Path) -> Store:
    """The same, and soon takes a transfer for lost that has stalled."""
    return make_impatient(tmp_path, dataclasses.replace(QUICK, stall_timeout_seconds=STALL_SECONDS))


def make_impatient(tmp_path: Path, policy: RetryPolicy) -> Store:
    # Of so many seconds that it does not count how long the attempts themselves take.
    retry = dataclasses.replace(policy, first_delay_seconds=1e5, most_delay_seconds=1e5, give_up_seconds=1.5e5)
    cache = CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000)
    return Store(cache, retry=retry, sleep=lambda seconds: None, commands="run")


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with serve(FaultServer()) as told:
        yield told


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    """moto's server, which speaks the S3 protocol."""
    import logging

    moto_server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    yield started.get_host_and_port()
    started.stop()


@pytest.fixture
def s3(moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultServer]:
    """A bucket "shards" behind a proxy that makes faults, the environment that leads to it, and new connections."""
    import http.client

    with serve(FaultServer(upstream=moto_address)) as told:
        monkeypatch.setenv("AWS_ENDPOINT_URL", told.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        connection = http.client.HTTPConnection(*moto_address)
        connection.request("POST", "/moto-api/reset")
        connection.getresponse().read()
        connection.request("PUT", "/shards")
        assert connection.getresponse().read() is not None
        connection.close()
        monkeypatch.setattr(ranges, "SHARED", Downloads(QUICK))  # an earlier test's leads to its server
        monkeypatch.setattr(upload, "UPLOADS", Downloads(QUICK, requests=6))
        yield told


@pytest.fixture
def put(moto_address: tuple[str, int]) -> Callable[[str, bytes], None]:
    """`put(key, content)`: an object in the bucket, past the proxy."""
    import http.client
    from urllib.parse import quote

    def upload(key: str, content: bytes) -> None:
        connection = http.client.HTTPConnection(*moto_address)
        connection.request("PUT", f"/shards/{quote(key)}", body=content, headers={"x-amz-acl": "public-read"})
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        connection.close()

    return upload
