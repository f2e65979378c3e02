"""Ranges and listings, here and of stores, with faults."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store import ranges
from shardvit.data_shards.store.download import Downloads, StoreError
from shardvit.data_shards.store.ranges import list_url, read_range, read_whole, stat_url
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK

Put = Callable[[str, bytes], None]
CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "SHARED", Downloads(QUICK))


@pytest.fixture(params=["local", "s3", "http", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Put]:
    """A folder's location, and a way to put files there."""

    def put_here(name: str, content: bytes) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def put_in_memory(name: str, content: bytes) -> None:
        import fsspec

        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", content)

    match request.param:
        case "local":
            return str(tmp_path), put_here
        case "memory":
            return f"memory://{tmp_path.name}", put_in_memory
        case "http":
            server: FaultServer = request.getfixturevalue("server")
            return f"{server.url}/x", lambda name, content: server.files.update({f"/x/{name}": content})
        case _:
            request.getfixturevalue("s3")
            put: Put = request.getfixturevalue("put")
            return "s3://shards/x", lambda name, content: put(f"x/{name}", content)


def test_ranges_and_stamps(place: tuple[str, Put]):
    folder, put = place
    put("a.tar", CONTENT)
    put("empty", b"")
    location = f"{folder}/a.tar"
    size, stamp = stat_url(location)
    assert size == len(CONTENT) and bool(stamp) == (not folder.startswith("memory"))
    for offset, end in ((0, 1), (5, 600), (0, len(CONTENT)), (len(CONTENT) - 1, len(CONTENT)), (7, 7)):
        assert read_range(location, offset, end - offset, stamp=stamp) == CONTENT[offset:end]
    assert read_whole(location) == CONTENT and read_whole(f"{folder}/empty") == b""
    for offset, num_bytes in ((len(CONTENT) - 5, 6), (len(CONTENT) + 5, 6)):
        with pytest.raises(OSError, match="changed since it was listed"):
            read_range(location, offset, num_bytes)
    put("a.tar", CONTENT[::-1] + b"x")
    if stamp:
        with pytest.raises(OSError, match="changed since it was listed"):
            read_range(location, 0, 5, stamp=stamp)
    with pytest.raises(FileNotFoundError):
        stat_url(f"{folder}/none")
    with pytest.raises(OSError, match=r"changed|No such file"):
        read_range(f"{folder}/none", 0, 5)


@pytest.mark.parametrize("shape", ["flat", "classes", "splits", "odd"])
def test_a_listing_is_in_the_order_of_all_names(shape: str, place: tuple[str, Put], monkeypatch: pytest.MonkeyPatch):
    folder, put = place
    names = {
        "flat": [f"{number}.jpg" for number in range(1100)],
        "classes": [f"n{number:03}/{image}.jpg" for number in range(20) for image in range(3)],
        "splits": [f"{split}/c{number}/i.jpg" for split in ("train", "val") for number in range(12)] + ["a.txt"],
        "odd": ["a/b", "a.b", "a b/c", "ab/é", "ab/z", "A/x/y/z/w", "b#1/?", "0"],
    }[shape]
    if folder.startswith("http"):
        with pytest.raises(UserError, match="lists no folder"):
            list(list_url(folder))
        return
    monkeypatch.setattr(ranges, "_MOST_LOOSE", 1000)
    for number, name in enumerate(names):
        put(name, b"x" * (number % 7))
    listed = list(list_url(folder))
    sizes = {name: number % 7 for number, name in enumerate(names)}
    assert [(name, size) for name, size, _ in listed] == [(n, sizes[n]) for n in sorted(names, key=str.encode)]
    for name, size, stamp in listed[:3]:
        assert stat_url(f"{folder}/{name}") == (size, stamp)


@pytest.mark.parametrize("faults", [["503"], ["500", "429", "503"], ["cut:5"], ["reset:5"], ["short:5"]])
def test_faults_are_waited_out(faults: list[str], s3: FaultServer, put: Put):
    put("x/a.tar", CONTENT)
    s3.faults["/shards/x/a.tar"] = deque(faults)
    assert read_range("s3://shards/x/a.tar", 100, 500) == CONTENT[100:600]
    assert s3.count("/shards/x/a.tar") == len(faults) + 1
    s3.faults["/shards"] = deque(["503", "500", "reset:5"])
    assert [name for name, *_ in list_url("s3://shards/x")] == ["a.tar"]
    assert not s3.faults["/shards"]


def test_a_range_of_a_bucket_is_one_request_and_wrong_places_are_refused(s3: FaultServer, put: Put):
    put("x/a.tar", CONTENT)
    read_range("s3://shards/x/a.tar", 100, 500, stamp=stat_url("s3://shards/x/a.tar")[1])
    assert [method for method, *_ in s3.requests] == ["HEAD", "GET"]
    with pytest.raises(StoreError, match="not there"):
        list(list_url("s3://no-such-bucket/x"))
    assert list(list_url("s3://shards/nothing")) == []


def test_a_web_server_without_ranges(server: FaultServer):
    """Whole files come from it, but no parts of one."""
    server.has_ranges = False
    server.files["/a"] = CONTENT
    assert read_whole(f"{server.url}/a") == CONTENT
    with pytest.raises(StoreError, match="no ranges"):
        read_range(f"{server.url}/a", 5, 5)
