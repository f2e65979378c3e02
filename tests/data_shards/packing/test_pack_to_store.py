"""Packing from and to a bucket, with faults: the bytes of a local packing, and nothing half-written to see."""

import hashlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_all_splits
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.store.ranges import list_url, read_whole
from shardvit.data_shards.store.store import Store
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import tree, write_folder

OUT = "s3://shards/some/set"
quiet: Report = list[str]().append
OPTIONS: dict[str, Any] = {"holdout": 0.2, "samples_per_shard": 300, "name": "digits"}
pytestmark = pytest.mark.usefixtures("s3")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("local") / "set"
    pack("digits", out, report=quiet, **OPTIONS)
    return tree(out)


def stored() -> dict[str, str]:
    return {name: hashlib.sha256(read_whole(f"{OUT}/{name}")).hexdigest() for name, *_ in list_url(OUT)}


def test_a_set_in_a_bucket_has_the_bytes_of_a_local_one(expected: dict[str, str]):
    told = list[str]()
    report = pack("digits", OUT, report=told.append, **OPTIONS)
    assert stored() == expected
    assert sum(manifest.num_samples for manifest in report.manifests) == 1797
    assert pack("digits", OUT, report=quiet, **OPTIONS).compared  # nothing is written again
    with pytest.raises(UserError, match="another request"):
        pack("digits", OUT, report=quiet, **OPTIONS | {"seed": 1})
    assert stored() == expected


def test_throttled_cut_and_never_listed(s3: FaultServer, expected: dict[str, str]):
    """Each request fails at first, many later ones too, and no listing knows of any object."""
    seen, keys = Counter[str](), Counter[tuple[str, str]]()

    def meddle(method: str, path: str) -> str:
        seen[method] += 1
        keys[method, path] += 1
        if method == "GET" and ("list-type" in path or "uploads" in path):
            return "unlisted"
        fault = ("503", "500", "drop", "deaf")[seen[method] % 4]
        return fault if keys[method, path] == 1 and (seen[method] < 20 or seen[method] % 3 == 0) else ""

    s3.meddle = meddle
    pack("digits", OUT, report=quiet, **OPTIONS)
    s3.meddle = lambda method, path: ""
    assert stored() == expected


HELD = """
import json, os, sys, threading
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.store import upload

put, count, most = upload._put, 0, int(sys.argv[2])
released = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), released.set()), daemon=True).start()

def put_and_wait(remote, data, num_bytes):
    global count
    count += 1
    if count > most:
        os.write(1, b"held\\n")  # whole, of several threads
        released.wait()
    put(remote, data, num_bytes)

upload._put = put_and_wait
pack(sys.argv[4], sys.argv[1], report=lambda line: None, **json.loads(sys.argv[3]))
"""


@contextmanager
def held(most_puts: int, source: str = "digits", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that packs, and waits after so many uploads for a line or the end of its input."""
    command = [sys.executable, "-c", HELD, OUT, str(most_puts), json.dumps(options or OPTIONS), source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


@pytest.mark.parametrize("most_puts", [1, 6, 16])
def test_killed_while_it_writes(most_puts: int, expected: dict[str, str]):
    with held(most_puts) as process:
        process.kill()
    with pytest.raises(UserError, match="not there"):
        open_all_splits([f"{OUT}/train"], store=Store(), report=quiet)
    if most_puts > 4:  # the plan is there
        with pytest.raises(UserError, match="another request"):
            pack("digits", OUT, report=quiet, **OPTIONS | {"seed": 1})
    pack("digits", OUT, report=quiet, **OPTIONS)
    assert stored() == expected


@pytest.mark.parametrize("most_puts", [6, 18, 30])
def test_one_goes_on_after_another_has_finished(most_puts: int, expected: dict[str, str]):
    """It waits in its plan, at a shard or at a record; nothing of its own is left."""
    with held(most_puts) as process:
        pack("digits", OUT, report=quiet, **OPTIONS)
        assert stored() == expected
        process.communicate(b"go\n")
    assert process.returncode == 0
    assert stored() == expected


@pytest.mark.parametrize("most_puts", [2, 12])
def test_one_appends_after_another_has_appended_the_same(most_puts: int, tmp_path: Path):
    for name in ("first", "second"):
        write_folder(tmp_path / name, {"cat": 20, "dog": 20})
    options: dict[str, Any] = {"samples_per_shard": 20, "name": "pets"}
    pack(str(tmp_path / "first"), OUT, report=quiet, **options)
    options |= {"existing": "append"}
    with held(most_puts, str(tmp_path / "second"), **options) as process:
        report = pack(str(tmp_path / "second"), OUT, report=quiet, **options)
        assert sum(manifest.num_samples for manifest in report.manifests) == 80
        whole = stored()
        process.communicate(b"go\n")
    assert process.returncode == 0
    assert stored() == whole


def test_two_at_once(expected: dict[str, str]):
    errors = list[BaseException]()

    def run() -> None:
        try:
            pack("digits", OUT, report=quiet, **OPTIONS)
        except BaseException as error:  # noqa: BLE001 - for the main thread
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    pack("digits", OUT, report=quiet, **OPTIONS)
    assert stored() == expected


def tars(files: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if name.endswith((".tar", ".idx"))}


def test_from_and_to_a_throttled_bucket(tmp_path: Path, s3: FaultServer, put: Callable[[str, bytes], None]):
    """Every object's first request fails, in reading, listing and writing."""
    write_folder(tmp_path / "images", {"cat": 30, "dog": 20})
    for path in (tmp_path / "images").rglob("*.*"):
        put(f"images/{path.relative_to(tmp_path / 'images').as_posix()}", path.read_bytes())
    options: dict[str, Any] = {"samples_per_shard": 20, "name": "pets", "report": quiet}
    pack(str(tmp_path / "images"), tmp_path / "set", **options)
    asked = Counter[tuple[str, str]]()

    def meddle(method: str, path: str) -> str:
        asked[method, path] += 1
        return ("503", "500", "deaf")[len(asked) % 3] if asked[method, path] == 1 else ""

    s3.meddle = meddle
    pack("s3://shards/images", OUT, **options)
    assert sum("/images/" in path for _, path in asked) >= 50
    assert tars(stored()) == tars(tree(tmp_path / "set")) != {}


def test_an_image_that_changes_after_it_was_listed(tmp_path: Path, s3: FaultServer, put: Callable[[str, bytes], None]):
    """Another one of the same size, put there once the first image is read."""
    write_folder(tmp_path / "images", {"cat": 6, "dog": 6})
    contents = {f"images/{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.rglob("*/*/*.*")}
    for name, content in contents.items():
        put(name, content)
    changed = list[str]()

    def meddle(method: str, path: str) -> str:
        if method == "GET" and path.startswith("/shards/images/") and not changed:
            changed.append(next(name for name in contents if not path.endswith(name)))
            put(changed[0], contents[changed[0]][:-1] + b"x")
        return ""

    s3.meddle = meddle
    with pytest.raises(UserError, match="changed since it was listed") as caught:
        pack("s3://shards/images", OUT, name="pets", report=quiet)
    assert changed[0].removeprefix("images/") in str(caught.value)
    with pytest.raises(UserError, match="not there"):
        open_all_splits([f"{OUT}/train"], store=Store(), report=quiet)


def test_places_that_cannot_be_written_to():
    for out, reason in (
        ("https://host/set", "cannot be written to"),
        ("pipe:cat > x", "cannot be written to"),
        ("s3://no-such-bucket/set", "not there"),
    ):
        with pytest.raises(UserError, match=reason):
            pack("digits", out, report=quiet, **OPTIONS)
