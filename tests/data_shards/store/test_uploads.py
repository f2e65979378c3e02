"""Uploads to a bucket, with faults: the object is there whole or not at all, and no unfinished upload stays."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from shardvit.data_shards.store import ranges, upload
from shardvit.data_shards.store.download import Downloads, StoreError
from shardvit.data_shards.store.folders import StoreFolder
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK

MIB = 2**20
FOLDER = StoreFolder("s3://shards/set")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, s3: FaultServer) -> None:
    monkeypatch.setattr(ranges, "SHARED", Downloads(QUICK))
    monkeypatch.setattr(upload, "UPLOADS", Downloads(QUICK, requests=2))
    monkeypatch.setattr(upload, "PART_BYTES", 5 * MIB)  # the least that S3 takes


@pytest.fixture
def content() -> bytes:
    return random.Random(1).randbytes(17 * MIB)  # four parts


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "shard").write_bytes(content)
    return tmp_path / "shard"


def kind_of(method: str, path: str) -> str:
    """A request's kind, as S3 has them."""
    query = path.partition("?")[2]
    if method == "POST":
        return "create" if query.startswith("uploads") else "complete"
    if method == "PUT":
        return "part" if "partNumber" in query else "put"
    if method == "DELETE":
        return "abort" if "uploadId" in query else "delete"
    return "list" if "list-type" in query or "uploads" in query else method.lower()


def unfinished() -> list[dict[str, str]]:
    from shardvit.data_shards.store.bucket import unfinished_uploads

    return ranges.SHARED.retried(FOLDER.location, unfinished_uploads)


@pytest.mark.parametrize("fault", ["503", "500", "429", "drop", "deaf"])
def test_the_first_requests_of_each_kind_fail(fault: str, s3: FaultServer, file: Path, content: bytes):
    seen = Counter[str]()

    def meddle(method: str, path: str) -> str:
        seen[kind := kind_of(method, path)] += 1
        return fault if seen[kind] <= 3 else ""

    s3.meddle = meddle
    FOLDER.put("a.tar", file)
    FOLDER.write("b.json", b"{}")
    assert FOLDER.read("a.tar") == content and FOLDER.read("b.json") == b"{}"
    assert [(name, size) for name, size, _ in ranges.list_url(FOLDER.location)] == [("a.tar", 17 * MIB), ("b.json", 2)]
    FOLDER.remove("b.json")
    assert FOLDER.size("b.json") is None
    assert {"create", "part", "complete", "put", "delete", "head", "get", "list"} <= set(seen)
    s3.meddle = lambda method, path: ""
    FOLDER.tidy()  # a creation whose answer was lost has an id that nobody knows
    assert not unfinished()


def test_an_upload_that_is_refused_is_aborted_and_what_was_there_stays(s3: FaultServer, file: Path):
    FOLDER.write("a.tar", b"before")
    s3.meddle = lambda method, path: "403" if "partNumber=3" in path else ""
    with pytest.raises(StoreError, match=r"s3://shards/set/a\.tar cannot be written"):
        FOLDER.put("a.tar", file)
    assert FOLDER.read("a.tar") == b"before" and file.exists() and not unfinished()


def test_an_upload_that_is_interrupted_is_aborted(s3: FaultServer, file: Path, monkeypatch: pytest.MonkeyPatch):
    """By Ctrl-C, which comes to the main thread while it waits for the parts."""
    main = threading.main_thread().ident
    assert main is not None

    def meddle(method: str, path: str) -> str:
        if "partNumber=2" in path:
            signal.pthread_kill(main, signal.SIGINT)
            s3.released.wait(240)
        return ""

    s3.meddle = meddle
    with pytest.raises(KeyboardInterrupt):
        FOLDER.put("a.tar", file)
    assert FOLDER.size("a.tar") is None and not unfinished()


def test_an_upload_that_another_process_aborts_begins_again(s3: FaultServer, file: Path, content: bytes):
    aborted = list[str]()

    def meddle(method: str, path: str) -> str:
        if kind_of(method, path) == "complete" and not aborted:
            aborted.append(path)
            FOLDER.tidy()
        return "404" if path in aborted and method == "POST" else ""  # as S3; moto has a status of 500

    s3.meddle = meddle
    FOLDER.put("a.tar", file)
    assert aborted and FOLDER.read("a.tar") == content and not unfinished()


def test_an_upload_whose_completion_was_not_heard_is_repeated(s3: FaultServer, file: Path, content: bytes):
    completions = Counter[str]()

    def meddle(method: str, path: str) -> str:
        completions[path] += kind_of(method, path) == "complete"
        is_first = len(+completions) == 1 and completions[path]
        return "" if not is_first else "deaf" if completions[path] == 1 else "404"

    s3.meddle = meddle
    FOLDER.put("a.tar", file)
    assert FOLDER.read("a.tar") == content and not unfinished()
    assert sum(kind_of(method, path) == "part" for method, path in s3.asked) == 8


def test_two_uploads_of_one_name_at_once(tmp_path: Path, content: bytes):
    """The last one wins, whole."""
    contents = [content, bytes(reversed(content))]
    threads = list[threading.Thread]()
    for number, each in enumerate(contents):
        (tmp_path / str(number)).write_bytes(each)
        threads.append(threading.Thread(target=FOLDER.put, args=("a.tar", tmp_path / str(number))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FOLDER.read("a.tar") in contents and not unfinished()


@pytest.mark.parametrize("fault", ["", "503", "deaf", "501"])
def test_of_several_that_claim_a_name_one_has_it(s3: FaultServer, fault: str):
    """501: a store that does not know conditions, by which the first of two, not at once, still has it."""
    seen = Counter[str]()

    def meddle(method: str, path: str) -> str:
        seen[method] += 1
        return fault if method == "PUT" and seen[method] in (1, 3) else ""

    s3.meddle = meddle
    assert FOLDER.claim("claim", b"first") == b"first"
    found = list[bytes]()
    threads = [
        threading.Thread(target=lambda number=number: found.append(FOLDER.claim("claim", b"%d" % number)))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"first"] * 4 and FOLDER.read("claim") == b"first"


def test_a_process_killed_in_the_middle_leaves_nothing_to_see(s3: FaultServer, file: Path, content: bytes):
    arrived = threading.Semaphore(0)

    def meddle(method: str, path: str) -> str:
        if kind_of(method, path) == "part":
            arrived.release()
            if "partNumber=4" in path:
                s3.released.wait(240)
        return ""

    s3.meddle = meddle
    program = (
        "import sys; from pathlib import Path; from shardvit.data_shards.store import folders, upload; "
        f"upload.PART_BYTES = {5 * MIB}; folders.open_folder(sys.argv[1]).put('a.tar', Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, FOLDER.location, str(file)])
    for _ in range(4):
        assert arrived.acquire(timeout=240)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    s3.meddle = lambda method, path: ""
    assert FOLDER.size("a.tar") is None and list(ranges.list_url(FOLDER.location)) == []
    assert len(unfinished()) == 1
    FOLDER.put("a.tar", file)
    assert FOLDER.read("a.tar") == content and len(unfinished()) == 1
    FOLDER.tidy()
    assert not unfinished() and FOLDER.read("a.tar") == content


def test_secrets_of_a_url_are_not_shown(s3: FaultServer):
    with pytest.raises(StoreError) as caught:
        StoreFolder("s3://key:SECRET@no-such-bucket/set").write("a", b"x")
    assert "SECRET" not in str(caught.value)
