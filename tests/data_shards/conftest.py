"""Servers and shards for the tests of what is read from elsewhere."""

import dataclasses
import hashlib
import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_shards.labels import LabelSpec
from data_shards.shard_set import ShardEntry
from data_shards.store.cache import CacheConfig
from data_shards.store.store import RetryPolicy, Store
from tests.data_shards.http_server import FaultServer, serve

# Faults are waited out here, too, but not for minutes.
QUICK = RetryPolicy(
    first_delay_seconds=0.01,
    most_delay_seconds=0.02,
    give_up_seconds=20.0,
    wrong_attempts=3,
    connect_timeout_seconds=2.0,
    stall_timeout_seconds=0.3,
)

MakeTar = Callable[..., bytes]
MakeEntry = Callable[..., ShardEntry]


@pytest.fixture
def quick() -> RetryPolicy:
    return QUICK


@pytest.fixture
def store(tmp_path: Path, quick: RetryPolicy) -> Store:
    return Store(CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000), retry=quick)


@pytest.fixture
def impatient(tmp_path: Path, quick: RetryPolicy) -> Store:
    """Gives up after two to a handful of attempts, however slow the machine: it does not really wait."""
    retry = dataclasses.replace(quick, first_delay_seconds=100, most_delay_seconds=100, give_up_seconds=150)
    cache = CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000)
    return Store(cache, retry=retry, sleep=lambda seconds: None)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with serve(FaultServer()) as told:
        yield told


@pytest.fixture
def make_tar() -> MakeTar:
    """`make_tar(seed, num_bytes=...)`: the bytes of a tar with four samples, about that large."""

    def make(seed: int, *, num_bytes: int = 100_000, key: str = "k") -> bytes:
        draw = random.Random(seed)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for number in range(4):
                for name, content in (("jpg", draw.randbytes(num_bytes // 4)), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{key}{number}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return stream.getvalue()

    return make


@pytest.fixture
def make_entry() -> MakeEntry:
    """`make_entry(url, content=...)`: an entry that knows the digest of its content, or without it none."""

    def make(url: str, *, content: bytes | None = None, size: int | None = None) -> ShardEntry:
        return ShardEntry(
            url=url,
            name=url.rpartition("/")[2],
            num_samples=4,
            num_bytes=size if content is None else len(content),
            sha256="" if content is None else hashlib.sha256(content).hexdigest(),
            index=None,
            labels=LabelSpec(),
        )

    return make


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
    """A bucket "shards" behind a proxy that makes faults, and the environment that leads to it."""
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
