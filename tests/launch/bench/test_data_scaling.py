import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.bench import data
from shardvit.launch.bench.data_remote import Pass, remote_lines, rows_of
from shardvit.launch.bench.data_scaling import scale
from shardvit.launch.bench.data_server import running_store
from shardvit.launch.bench.data_threads import (
    Scaling,
    ThreadsRun,
    efficiency,
    likely_efficiency,
    limits_of,
    scaling_lines,
    split_threads,
)
from tests.launch.bench.test_data import jpeg


def run(threads: int, *, seconds: float = 1.5, waited_seconds: float = 0.0) -> ThreadsRun:
    """1,000 images of 1 ms to decode, 0.2 to resize and 0.3 of all else."""
    spent = {"cpu_seconds": 1.5, "system_seconds": 0.1, "decode_seconds": 1.0, "resize_seconds": 0.2}
    return ThreadsRun(
        threads, 1000, seconds, **spent, page_faults=5000, waited_seconds=waited_seconds, pixels=100_000 * 1000
    )


def test_efficiency_is_speed_a_thread_to_that_of_one():
    assert efficiency({1: 100, 2: 180, 4: 300}) == {1: 1.0, 2: 0.9, 4: 0.75}


def test_waits_for_a_core_do_not_count():
    assert run(1, seconds=2.0).images_per_second == 500
    # Two threads that ran a second each and stood in a queue for another.
    assert run(2, seconds=2.0, waited_seconds=2.0).images_per_second == 1000


def test_limits_follow_from_one_thread():
    limits = limits_of(run(1), file_bytes=100_000, copied_bytes_per_second=1e10)
    assert limits.gil == pytest.approx(1000 / 0.3)
    assert limits.kernel == pytest.approx(10_000)
    # File and pixels three times, as the output: 224 x 224 x 3.
    assert limits.bytes_an_image == pytest.approx(3 * (100_000 + 300_000 + 150_528))
    assert limits.memory == pytest.approx(1e10 / limits.bytes_an_image)


def test_the_narrowest_limit_decides():
    assert likely_efficiency(0.9, threads=8, one_rate=1000) == 0.9
    assert likely_efficiency(0.9, threads=8, one_rate=1000, memory=4000) == 0.5
    assert likely_efficiency(1.1, threads=8, one_rate=1000, memory=9000) == 1.0


def test_threads_beyond_the_cores_are_left_out_unless_asked_for():
    assert split_threads([2, 4, 8], cores=2, beyond_cores=False) == ([1, 2], [4, 8])
    assert split_threads([2, 4, 8], cores=2, beyond_cores=True) == ([1, 2, 4, 8], [])


def test_the_report_tells_measured_from_derived_and_what_was_not_run():
    slept = {number: run(number, seconds=1.6 / number) for number in (1, 2, 8)}
    scaling = Scaling({1: run(1), 2: run(2, seconds=1.0)}, slept, left_out=[8], cores=2)
    report = "\n".join(scaling_lines(scaling, file_bytes=1e5, copied_bytes_per_second=1e9))
    measured, derived = report.split("threads, derived")
    assert [line.split()[:4] for line in measured.splitlines() if line.strip().startswith("2 ")] == [
        ["2", "1000", "1000", "0.75"]
    ]
    # 1 GB/s for 1.65 MB an image: 605 images/s where 8 cores would make 5,333.
    assert derived.splitlines()[-1].split() == ["8", "1.00", "5333", "8.8", "0.11"]
    assert "not run: 8 threads on 2 cores" in measured


def a_pass(reader: str, *, seconds: float, connections: int) -> Pass:
    rest = {"first_seconds": 0.1, "cpu_seconds": 0.5, "requests": 8, "megabytes": 100.0}
    return Pass(reader, 10, seconds, images=1000, connections=connections, **rest)


def test_readers_are_compared_by_medians_and_by_connection():
    passes = [a_pass("ours", seconds=seconds, connections=4) for seconds in (1, 2, 50)]
    row = rows_of([*passes, a_pass("fsspec", seconds=4, connections=2)])["ours", 10]
    assert row.images_per_second == 500 and row.per_connection == 125 and row.cpu_ms == 0.5
    report = remote_lines("http", passes, {"mosaic": "it has no HTTP"})
    assert "mosaic" in report[0] and "it has no HTTP" in report[0]
    assert report[-1].split()[:5] == ["10", "ours", "500", "4", "125"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"threads": "two"}, "two"),
        ({"threads": "0,1"}, "0,1"),
        ({"places": "local,ftp"}, "ftp"),
        ({"places": "http", "images": 10}, "10"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, named):
    with pytest.raises(UserError, match=named):
        data.bench(tmp_path, **options)


def test_the_server_sends_ranges_after_the_delay_and_counts(tmp_path):
    content = bytes(range(256)) * 1000
    (tmp_path / "one.tar").write_bytes(content)
    with running_store("http", tmp_path) as store:
        store.reset(delay_ms=200)
        before = time.monotonic()
        asked = urllib.request.Request(f"{store.url}/one.tar", headers={"Range": "bytes=1000-200999"})
        with urllib.request.urlopen(asked) as response:
            assert response.status == 206 and response.headers["Content-Range"] == "bytes 1000-200999/256000"
            assert response.read() == content[1000:201_000]
        assert time.monotonic() - before >= 0.2
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{store.url}/two.tar")
        with urllib.request.urlopen(f"{store.url}/one.tar") as response:
            assert response.read() == content
        traffic = store.reset(delay_ms=0)
        assert (traffic.requests, traffic.megabytes) == (3, 0.456)
        assert store.reset(delay_ms=0).requests == 0


@pytest.mark.slow
def test_a_small_run_of_every_place(tmp_path: Path):
    pytest.importorskip("moto.server")
    for seed in range(8):
        (tmp_path / f"{seed}.jpg").write_bytes(jpeg(seed))
    above = (os.cpu_count() or 1) + 1
    record = tmp_path / "records" / "scaling.txt"
    lines = scale(
        tmp_path,
        images=512,
        rounds=1,
        threads=[1, above],
        beyond_cores=False,
        places=["http", "s3", "local"],
        record=record,
        delays_ms=[0],
        readers=["plain", "ours", "fsspec"],
    )
    assert record.read_text().splitlines() == lines
    # Each store has every reader's line, and all bytes of the set went to each.
    rows = [line.split() for line in lines if line.startswith("0 ")]
    assert [row[1] for row in rows] == ["plain", "ours", "fsspec"] * 2
    assert all(float(number) > 0 for row in rows for number in row[2:5])
    assert any(line.startswith(f"not run: {above} threads") for line in lines)
    assert lines[-1].split()[0] == str(above) and float(lines[-1].split()[1]) > 0  # derived
