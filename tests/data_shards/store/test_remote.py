"""Shards that commands write, and shards in buckets (the S3 protocol), with faults."""

import hashlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.shards.location import CommandRefused
from shardvit.data_shards.shards.webdataset_parts import part
from shardvit.data_shards.store.store import MissingObject, Store, StoreError
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import StoreFor, assert_attempts, content_of, make_entry, make_tar, parts

# ---- commands ------------------------------------------------------------------------------------------------------


def test_the_output_of_a_command_is_a_shard(tmp_path: Path, store: Store):
    (tmp_path / "a.tar").write_bytes(make_tar(0))
    entry = make_entry(f"pipe:cat '{tmp_path}/a.tar' && echo x >> '{tmp_path}/count'")
    assert content_of(store, entry) == content_of(store, entry) == make_tar(0)
    assert (tmp_path / "count").read_text() == "x\n"  # the cache has it


def test_a_command_that_fails_after_it_wrote_a_whole_shard_has_failed(tmp_path: Path, store: Store):
    (tmp_path / "a.tar").write_bytes(make_tar(0))
    (tmp_path / "fail").write_text("echo first >&2; echo no credits for $1 left >&2; exit 3")
    command = f"cat {tmp_path}/a.tar; sh {tmp_path}/fail SECRETTOKEN"
    with pytest.raises(StoreError, match="exit status 3") as caught:
        store.open(make_entry(f"pipe:{command}"))
    message = str(caught.value)
    assert message.startswith("pipe:cat ... a.tar: ") and "no credits for ... left" in message
    assert "first" not in message and "SECRETTOKEN" not in message
    assert parts(store) == []


def test_a_command_that_fails_once(tmp_path: Path, store: Store):
    (tmp_path / "a.tar").write_bytes(make_tar(0))
    mark = tmp_path / "mark"
    command = (
        f"if test -e {mark}; then cat {tmp_path}/a.tar; else touch {mark}; head -c 5000 {tmp_path}/a.tar; exit 1; fi"
    )
    assert content_of(store, make_entry(f"pipe:{command}")) == make_tar(0)


def test_a_command_whose_output_is_cut_short_without_a_word(tmp_path: Path, store: Store):
    (tmp_path / "a.tar").write_bytes(make_tar(0))
    with pytest.raises(StoreError, match="byte"):
        store.open(make_entry(f"pipe:head -c 60000 {tmp_path}/a.tar | cat"))


def test_commands_that_hang_or_do_not_exist(
    impatient: Store, impatient_with_stalls: Store, monkeypatch: pytest.MonkeyPatch
):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        with pytest.raises(StoreError, match="wrote nothing for 1 s"):
            impatient_with_stalls.open(make_entry("pipe:sleep 1000; sleep 1000"))
    assert len(started) > 1
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    with pytest.raises(StoreError, match="exit status 127"):
        impatient.open(make_entry("pipe:no-such-program-anywhere x.tar"))


# ---- the S3 protocol -----------------------------------------------------------------------------------------------


def test_a_shard_from_a_bucket_in_several_ranges(s3: FaultServer, put: Callable[[str, bytes], None], store: Store):
    content = make_tar(0, num_bytes=20_000_000)
    put("train/a b.tar", content)
    assert content_of(store, make_entry("s3://shards/train/a b.tar", content=content)) == content
    assert len({span for method, _, span in s3.requests if method == "GET"}) == 3
    assert store.size("s3://shards/train/a b.tar") == len(content)
    assert hashlib.md5(content).hexdigest() in store.fingerprint("s3://shards/train/a b.tar")


@pytest.mark.parametrize(
    "faults", [["503"], ["cut:5000"], ["stall:5000"], ["short:5000"], ["garbage"], ["500", "cut:0"]]
)
def test_faults_of_a_bucket_are_waited_out(
    faults: list[str], s3: FaultServer, put: Callable[[str, bytes], None], store_for: StoreFor
):
    put("a.tar", make_tar(0))
    s3.faults["/shards/a.tar"] = deque(faults)
    store, waits = store_for(faults)
    assert content_of(store, make_entry("s3://shards/a.tar", content=make_tar(0))) == make_tar(0)
    assert_attempts(s3, "/shards/a.tar", faults=faults, waits=waits)


@pytest.mark.parametrize("most_bytes", [3_000_000, 50_000])
def test_a_bucket_behind_a_proxy_that_cuts_every_transfer(
    most_bytes: int, s3: FaultServer, put: Callable[[str, bytes], None], store_for: StoreFor
):
    content = make_tar(0, num_bytes=4 * most_bytes)
    put("a.tar", content)
    s3.always["/shards/a.tar"] = f"cut:{most_bytes}"
    store, _ = store_for([])
    assert content_of(store, make_entry("s3://shards/a.tar", content=content)) == content


def test_a_bucket_that_lacks_a_shard_has_a_truncated_one_or_is_down(
    s3: FaultServer, put: Callable[[str, bytes], None], impatient: Store
):
    with pytest.raises(MissingObject, match=r"s3://shards/none\.tar is not there"):
        impatient.open(make_entry("s3://shards/none.tar", content=b"x"))
    with pytest.raises(MissingObject, match="bucket"):
        impatient.read_small("s3://no-such-bucket/manifest.json", most_bytes=10)
    put("a.tar", make_tar(0)[:60_000])
    with pytest.raises(StoreError, match=r"it has 60000 bytes where \d+ are expected"):
        impatient.open(make_entry("s3://shards/a.tar", content=make_tar(0)))
    s3.always["/shards/a.tar"] = "503"
    with pytest.raises(StoreError, match=r"s3://shards/a\.tar: .*in a row"):
        impatient.open(make_entry("s3://shards/a.tar"))


def test_a_public_bucket_is_read_without_credentials(
    s3: FaultServer, put: Callable[[str, bytes], None], store: Store, monkeypatch: pytest.MonkeyPatch
):
    config = pytest.importorskip("fsspec.config")
    put("x.json", b"{}")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="credentials"):
        store.read_small("s3://shards/x.json", most_bytes=10)
    settings: dict[str, dict[str, object]] = {}
    config.set_conf_env(settings, {"FSSPEC_S3_ANON": "true", "FSSPEC_S3_ENDPOINT_URL": s3.url})
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setitem(config.conf, "s3", settings["s3"])
    assert Store(store.cache).read_small("s3://shards/x.json", most_bytes=10) == b"{}"


# ---- schemes that gopen knows, and fsspec does not -----------------------------------------------------------------


@pytest.fixture
def gopen_schemes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """webdataset's table of handlers, as it was after the test."""
    table = part("gopen").gopen_schemes
    for scheme in ("robot", "robotcat"):
        monkeypatch.setitem(table, scheme, None)
    return table


def test_a_scheme_of_gopen_is_a_shard(tmp_path: Path, store: Store, gopen_schemes: dict[str, Any]):
    """A handler of one's own, and one that runs a program, as those of webdataset do."""
    (tmp_path / "a.tar").write_bytes(make_tar(0))

    def run(url: str, mode: str, bufsize: int) -> Any:
        return part("gopen").Pipe(["cat", tmp_path / url.rpartition("/")[2]], mode=mode, bufsize=bufsize)

    gopen_schemes["robot"] = lambda url, mode, bufsize: (tmp_path / url.rpartition("/")[2]).open("rb")
    gopen_schemes["robotcat"] = run
    for scheme in ("robot", "robotcat"):
        entry = make_entry(f"{scheme}://u:SECRET@box/{scheme}/a.tar", content=make_tar(0))
        assert content_of(store, entry) == make_tar(0)
        assert store.size(f"{scheme}://box/a.tar") is None and store.fingerprint(f"{scheme}://box/a.tar") == ""
        with pytest.raises(StoreError) as caught:
            store.open(make_entry(f"{scheme}://u:SECRET@box/none.tar"))
        assert str(caught.value).startswith(f"{scheme}://box/none.tar") and "SECRET" not in str(caught.value)
        with pytest.raises(CommandRefused, match=f"may start programs, as any {scheme}:// may"):
            Store(store.cache).open(make_entry(f"{scheme}://box/other.tar"))
    assert parts(store) == []


def test_a_program_of_gopen_that_is_not_installed_is_named(impatient: Store, gopen_schemes: dict[str, Any]):
    gopen_schemes["robot"] = lambda url, mode, bufsize: part("gopen").Pipe(["no-such-program", url], mode=mode)
    with pytest.raises(StoreError, match=r"cannot be read \(no-such-program, which gopen runs for robot://") as caught:
        impatient.open(make_entry("robot://box/a.tar"))
    assert not isinstance(caught.value, MissingObject)


def test_a_program_of_gopen_that_hangs_is_killed(impatient_with_stalls: Store, gopen_schemes: dict[str, Any]):
    started: list[Any] = []

    def run(url: str, mode: str, bufsize: int) -> Any:
        started.append(part("gopen").Pipe(["sleep", "1000"], mode=mode, bufsize=bufsize))
        return started[-1]

    gopen_schemes["robot"] = run
    with pytest.raises(StoreError, match="wrote nothing for 1 s"):
        impatient_with_stalls.open(make_entry("robot://box/a.tar"))
    assert len(started) > 1 and all(pipe.proc.returncode == -signal.SIGKILL for pipe in started)
