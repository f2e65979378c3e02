"""The store over HTTP, the S3 protocol and commands, with faults: right bytes, or an error that says what to do."""

import asyncio
import hashlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store import remote
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import MissingObject, RetryPolicy, Store, StoreError
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import (
    QUICK,
    StoreFor,
    assert_attempts,
    content_of,
    make_entry,
    make_tar,
    parts,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[3]


def test_a_local_shard_needs_no_cache(tmp_path: Path):
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(0))
    assert content_of(Store(), make_entry(str(path))) == make_tar(0)
    with pytest.raises(MissingObject, match=r"b\.tar is not there"):
        Store().open_file(make_entry(str(tmp_path / "b.tar")))
    with pytest.raises(UserError, match=r"data\.cache\.folder"):
        Store().open(make_entry("http://127.0.0.1:1/a.tar"))


def test_a_second_opening_asks_the_server_nothing(server: FaultServer, store: Store):
    content = make_tar(0, key="with white space ")
    server.files["/a.tar"] = content
    entry = make_entry(f"{server.url}/a.tar", content=content)
    assert content_of(store, entry) == content
    asked = len(server.requests)
    copy = pickle.loads(pickle.dumps(store))
    shard = copy.open(entry)
    assert [shard.index.keys[row] for row in range(4)] == [f"with white space {row}" for row in range(4)]
    os.close(shard.descriptor)
    assert content_of(copy, entry) == content
    assert len(server.requests) == asked == 2  # its first byte, for its size, and all of it
    assert parts(store) == []


@pytest.mark.parametrize(
    "faults",
    [
        ["503"],
        ["500", "429", "502"],
        ["cut:0", "cut:70000", "reset:70000"],
        ["stall:70000"],
        ["stall:0"],
        ["short:5000"],
        ["garbage"],
        ["close:5000"],
        ["cut:10000", "503", "cut:10000", "garbage", "cut:10000"],
    ],
    ids=",".join,
)
@pytest.mark.parametrize("has_ranges", [True, False], ids=["ranges", "no ranges"])
def test_faults_of_a_server_are_waited_out(
    faults: list[str], has_ranges: bool, server: FaultServer, store_for: StoreFor
):
    content = make_tar(0)
    server.files["/a.tar"], server.faults["/a.tar"], server.has_ranges = content, deque(faults), has_ranges
    store, waits = store_for(faults)
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=content)) == content
    assert_attempts(server, "/a.tar", faults=faults, waits=waits)
    assert parts(store) == []


@pytest.mark.parametrize("fault", ["cut:70000", "close:70000"])
def test_a_cut_is_found_without_a_digest(fault: str, server: FaultServer, store: Store):
    server.files["/a.tar"], server.faults["/a.tar"] = make_tar(0), deque([fault, fault])
    assert content_of(store, make_entry(f"{server.url}/a.tar")) == make_tar(0)


@pytest.mark.parametrize(
    ("fault", "tag"),
    [
        ("cut:400000", "strong"),
        ("cut:400000", "weak"),
        ("connection:400000", "strong"),
        ("connection:3001", "weak"),
        ("cut:37", "strong"),
    ],
)
def test_a_cut_transfer_goes_on_where_it_was(
    fault: str, tag: Literal["strong", "weak"], server: FaultServer, store_for: StoreFor
):
    most_bytes = int(fault.partition(":")[2])  # of an answer, or of all answers of a connection
    content = make_tar(0, num_bytes=20 * most_bytes)
    server.files["/a.tar"], server.always["/a.tar"], server.tag = content, fault, tag
    store, _ = store_for([])
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=content)) == content
    spans = [span or "bytes=0-" for _, path, span in server.requests if path == "/a.tar"]
    starts = [int(span.removeprefix("bytes=").partition("-")[0]) for span in spans if span != "bytes=0-0"]
    assert 0 not in starts[len(starts) // 2 :]
    # What lies in the client's buffer when a connection ends is lost, so an attempt may bring a part of `most_bytes`.
    assert len(starts) < 50 + 100 * len(content) / most_bytes


def test_a_transfer_ends_where_all_of_a_cut_answer_is_lost(
    server: FaultServer, store_for: StoreFor, monkeypatch: pytest.MonkeyPatch
):
    """A slow client has read nothing when the connection ends, and then its buffer is gone."""

    async def late(response: Any, most_bytes: int) -> bytes:
        while not response.content.is_eof() and response.content.exception() is None:
            await asyncio.sleep(0)
        return await response.content.read(most_bytes)

    monkeypatch.setattr(remote, "read", late)
    content = make_tar(0, num_bytes=1_000_000)
    server.files["/a.tar"], server.always["/a.tar"] = content, "cut:50000"
    store, waits = store_for([])
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=content)) == content
    assert len(waits) < 60


def test_a_single_cut_costs_a_few_requests(server: FaultServer, store: Store):
    content = make_tar(0, num_bytes=40_000_000)
    server.files["/a.tar"], server.faults["/a.tar"] = content, deque(["", "cut:5000000"])
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=content)) == content
    assert 5 < server.count("/a.tar") < 20


def test_ranges_of_what_may_be_two_files_are_not_put_together(server: FaultServer, store: Store):
    content, server.tag = make_tar(0), "weak"
    server.files["/a.tar"], server.faults["/a.tar"] = content, deque(["cut:70000"])
    assert content_of(store, make_entry(f"{server.url}/a.tar")) == content  # no digest would notice
    assert [span for _, path, span in server.requests if path == "/a.tar"] == [
        "bytes=0-0",  # the fingerprint that is a part of its name in the cache
        *("bytes=0-0", ""),
        *("bytes=0-0", ""),
    ]


def test_a_shard_that_changes_during_a_cut_is_read_anew(server: FaultServer, store: Store):
    old, new = make_tar(0), make_tar(1)
    server.files["/a.tar"], server.faults["/a.tar"] = old, deque(["cut:50000"])

    def replace(seconds: float) -> None:
        server.files["/a.tar"] = new

    store = Store(store.cache, retry=RetryPolicy(wrong_attempts=2), sleep=replace)
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=new)) == new


@pytest.mark.parametrize(
    ("fault", "reason", "advice"),
    [
        ("503", "HTTP status 503", "check the network"),
        ("cut:1000", "", "check the network"),
        ("stall:0", "", "check the network"),
        ("short:5000", "it has 5000 bytes where", "upload or pack it again"),
        ("garbage", "sha256 digest", "upload or pack it again"),
        ("403", "HTTP status 403", "credentials"),
        ("404", "HTTP status 404", "is not there"),
    ],
)
def test_an_error_names_the_shard_the_reason_and_what_to_do(
    fault: str, reason: str, advice: str, server: FaultServer, impatient: Store, impatient_with_stalls: Store
):
    store = impatient_with_stalls if fault.startswith("stall") else impatient
    content, server.has_ranges = make_tar(0), False
    server.files["/a.tar"], server.always["/a.tar"] = content, fault
    url = server.url.replace("://", "://user:SECRET@") + "/a.tar?signature=SECRET"
    with pytest.raises(StoreError, match=advice) as caught:
        store.open(make_entry(url, content=content))
    message = str(caught.value)
    assert f"{server.url}/a.tar" in message and reason in message and "SECRET" not in message
    if fault not in ("403", "404"):
        wait_until(lambda: server.count("/a.tar") > 1)  # a slow server comes later to what was given up
    attempts = server.count("/a.tar")
    assert attempts == {"403": 1, "404": 1, "short:5000": 3, "garbage": 3}.get(fault, attempts)
    assert parts(store) == []


def test_an_unknown_host_is_an_error_after_all_attempts():
    store = Store(retry=RetryPolicy(give_up_seconds=0.05, first_delay_seconds=0.1))
    with pytest.raises(StoreError, match=r"http://no-such-host\.invalid/a\.tar: .*: check the network"):
        store.read_small("http://u:p@no-such-host.invalid/a.tar", most_bytes=10)


def test_a_shard_of_another_size_than_the_manifest_says(server: FaultServer, store: Store):
    server.files["/a.tar"] = make_tar(0)
    with pytest.raises(StoreError, match=rf"it has {len(make_tar(0))} bytes where 5 are expected, 3 times"):
        store.open(make_entry(f"{server.url}/a.tar", size=5))
    with pytest.raises(StoreError, match=r"bytes where 900000 are expected, 3 times"):
        store.open(make_entry(f"{server.url}/a.tar", size=900_000))


def test_a_broken_tar_is_named_with_the_offset(server: FaultServer, store: Store):
    broken = make_tar(0)[:60_000]
    server.files["/a.tar"] = broken
    with pytest.raises(StoreError, match=r"a\.tar.*byte \d+.*, 3 times"):
        store.open(make_entry(f"{server.url}/a.tar"))
    server.requests.clear()
    with pytest.raises(UserError, match=r"a\.tar.*byte \d+"):  # as it was packed: once is enough
        store.open(make_entry(f"{server.url}/a.tar", content=broken))
    assert server.count("/a.tar") == 1
    descriptor = store.open_file(make_entry(f"{server.url}/a.tar", content=broken))
    assert os.pread(descriptor, 10**6, 0) == broken
    os.close(descriptor)


def test_a_changed_object_is_another_file(server: FaultServer, store: Store):
    entry = make_entry(f"{server.url}/a.tar")  # no digest is known
    for seed in range(2):
        server.files["/a.tar"] = make_tar(seed)
        assert content_of(Store(store.cache, retry=QUICK), entry) == make_tar(seed)
    assert content_of(store, entry) == make_tar(1)
    server.files["/a.tar"] = make_tar(2)  # behind the back of a store that has seen the old one
    assert store.cache is not None
    os.remove(next(path for path in store.cache.folder.glob("*.tar") if path.read_bytes() == make_tar(1)))
    with pytest.raises(StoreError, match="not the file any more"):
        store.open(entry)


def test_passwords_and_signatures_do_not_make_another_file(server: FaultServer, store: Store):
    content = make_tar(0)
    server.files["/a.tar"] = content
    for access in ("", "u:p@", "v:q@"):
        url = server.url.replace("://", f"://{access}") + f"/a.tar?signature={access}"
        assert content_of(store, make_entry(url, content=content)) == content
    assert server.count("/a.tar") == 1


def test_small_files(server: FaultServer, store: Store):
    server.files["/manifest.json"] = b"{}" * 500
    server.faults["/manifest.json"] = deque(["503", "cut:10"])
    assert store.read_small(f"{server.url}/manifest.json", most_bytes=1000) == b"{}" * 500
    assert store.size(f"{server.url}/manifest.json") == 1000
    with pytest.raises(UserError, match="more than 999 bytes"):
        store.read_small(f"{server.url}/manifest.json", most_bytes=999)
    with pytest.raises(MissingObject):
        store.read_small(f"{server.url}/sizes.json", most_bytes=1000)
    server.files["/manifest.json"] += b" "
    assert store.size(f"{server.url}/manifest.json") == 1001


def test_a_missing_package_is_named(store: Store):
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(UserError, match=r"gs://bucket/a\.json: .*package is missing.*gcsfs"):
        store.read_small("gs://bucket/a.json", most_bytes=10)


def test_an_unknown_kind_of_url(store: Store):
    with pytest.raises(UserError, match=r"nosuch://bucket/a\.json"):
        store.size("nosuch://bucket/a.json")


# ---- several processes ---------------------------------------------------------------------------------------------

PROCESS = """
import os, sys
from pathlib import Path
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.shard_set import ShardEntry
from shardvit.data_shards.store.store import Store
url, folder, num_bytes, sha256 = sys.argv[1:]
entry = ShardEntry(url, "a", 4, int(num_bytes), sha256, None, LabelSpec())
shard = Store(CacheConfig(folder=Path(folder), limit_bytes=50_000_000)).open(entry)
assert "torch" not in sys.modules
sys.stdout.buffer.write(os.pread(shard.descriptor, int(num_bytes) + 1, 0))
"""


def start_process(server: FaultServer, folder: Path, content: bytes) -> subprocess.Popen[bytes]:
    args = [f"{server.url}/a.tar", str(folder), str(len(content)), hashlib.sha256(content).hexdigest()]
    return subprocess.Popen([sys.executable, "-c", PROCESS, *args], cwd=ROOT, stdout=subprocess.PIPE)


def test_three_processes_download_a_shard_once(server: FaultServer, tmp_path: Path):
    content = make_tar(0, num_bytes=1_000_000)
    server.files["/a.tar"], server.pause_seconds = content, 0.05
    processes = [start_process(server, tmp_path / "cache", content) for _ in range(3)]
    assert [process.communicate(timeout=240)[0] for process in processes] == [content] * 3
    assert server.count("/a.tar") == 1
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".npz", ".tar"]


def test_a_process_killed_while_it_downloads_leaves_nothing_that_is_taken_for_whole(
    server: FaultServer, tmp_path: Path
):
    content = make_tar(0, num_bytes=4_000_000)
    server.files["/a.tar"], server.always["/a.tar"] = content, f"stall:{len(content) // 2}"
    server.has_ranges = False  # a range is written when it ends, and this one takes a minute to time out
    process = start_process(server, tmp_path / "cache", content)

    def has_begun() -> bool:
        found = list((tmp_path / "cache").glob("*.part"))
        # Reserved in full from the start, it looks whole but for its name; zeros where nothing came yet.
        return bool(found) and bool(np.frombuffer(found[0].read_bytes()[:1_000_000], np.uint8)[-65536:].any())

    wait_until(has_begun)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("*.tar")) == []
    (part,) = (tmp_path / "cache").glob("*.part")
    assert part.stat().st_size == len(content)
    server.always.clear()
    other = make_entry(f"{server.url}/b.tar", content=make_tar(1))
    server.files["/b.tar"] = make_tar(1)
    store = Store(CacheConfig(folder=tmp_path / "cache", limit_bytes=50_000_000), retry=QUICK)
    store.prefetch(other)
    assert list((tmp_path / "cache").glob("*.part")) == []  # what the dead one left is gone
    assert content_of(store, make_entry(f"{server.url}/a.tar", content=content)) == content
