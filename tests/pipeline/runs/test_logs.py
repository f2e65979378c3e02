"""metrics.jsonl and events.jsonl: exact, whole after kills and damage, and never a reason to stop training."""

import json
import math
import struct
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.runs.logs import (
    EVENT_KINDS,
    Event,
    EventsLog,
    MetricsLog,
    iter_metrics,
    read_events,
    read_metrics,
)

VALUES = st.dictionaries(st.text(max_size=5), st.floats(allow_subnormal=True), max_size=4)
STEPS = st.lists(st.integers(0, 20), max_size=8).map(sorted)


def write(path: Path, steps: list[int]) -> None:
    with MetricsLog(path, resume_step=-1) as log:
        for step in steps:
            log.append(step=step, images_seen=64 * step, metrics={"loss": step / 3})


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("d", value)


@given(st.lists(VALUES, max_size=5))
def test_every_float_reads_back_to_the_same_bits(rows: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with MetricsLog(path, resume_step=-1) as log:
            written = [log.append(step=n, images_seen=n, metrics=row) for n, row in enumerate(rows)]
        back = read_metrics(path)
    assert [(r.step, r.images_seen, r.time) for r in back] == [(r.step, r.images_seen, r.time) for r in written]
    for row, read in zip(rows, back, strict=True):
        assert {name: bits(value) for name, value in row.items()} == {n: bits(v) for n, v in read.metrics.items()}


@given(STEPS, st.integers(-1, 20))
def test_opening_keeps_the_rows_up_to_the_step_resumed_from(steps: list[int], resume_step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        kept = [row for row in read_metrics(path) if row.step <= resume_step]
        with MetricsLog(path, resume_step=resume_step) as log:
            assert (log.kept_rows, log.dropped_broken_rows) == (len(kept), 0)
            assert log.last_step == max(steps, default=0)
            new = log.append(step=99, images_seen=1, metrics={})
        assert read_metrics(path) == [*kept, new]
        assert [file.name for file in Path(folder).iterdir()] == ["metrics.jsonl"]


@given(STEPS, st.floats(0, 1))
def test_a_file_cut_anywhere_opens_with_every_row_that_is_whole(steps: list[int], share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        rows, whole = read_metrics(path), path.read_bytes()
        cut = round(share * len(whole))
        path.write_bytes(whole[:cut])
        # A row whose newline alone is lost is whole.
        ends = [len(b"".join(whole.splitlines(True)[: n + 1])) - 1 for n in range(len(rows))]
        kept = [row for row, end in zip(rows, ends, strict=True) if end <= cut]
        assert read_metrics(path) == list(iter_metrics(path)) == kept
        with MetricsLog(path, resume_step=1000) as log:
            new = log.append(step=99, images_seen=1, metrics={"x": 1.0})
        assert read_metrics(path) == [*kept, new]


def test_what_is_left_whole_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    inode = path.stat().st_ino
    MetricsLog(path, resume_step=2).close()
    assert path.stat().st_ino == inode
    MetricsLog(path, resume_step=1).close()
    assert path.stat().st_ino != inode


@pytest.mark.parametrize(
    "line", [b"\0\0\0\n", b"[]\n", b'{"step": 1}\n', b'{"step": Infinity}\n', b"\xff\n", b'{"step": 1, "metrics": 3}\n']
)
def test_a_damaged_line_is_dropped_and_counted_on_opening_and_refused_on_reading(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + second)
    assert [row.step for row in iter_metrics(path)] == [1, 2]
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    with MetricsLog(path, resume_step=5) as log:
        assert log.dropped_broken_rows == 1
    assert [row.step for row in read_metrics(path)] == [1, 2]


TEXTS = st.text(st.characters(), max_size=30)


def told(path: Path, *texts: str) -> list[Event]:
    with EventsLog(path) as log:
        for step, text in enumerate(texts):
            log.append("note", text, step=step, images_seen=8 * step)
    return read_events(path)


@given(st.lists(st.tuples(st.sampled_from(EVENT_KINDS), TEXTS), max_size=6))
def test_what_is_written_is_read_back_whatever_the_text(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple]
) -> None:
    path = tmp_path_factory.mktemp("stage") / "events.jsonl"
    with EventsLog(path) as log:
        for step, (kind, text) in enumerate(said):
            log.append(kind, text, step=step, images_seen=8 * step)
    found = read_events(path)
    assert [(each.kind, each.text, each.step, each.images_seen) for each in found] == [
        (kind, text, step, 8 * step) for step, (kind, text) in enumerate(said)
    ]
    assert [each.time for each in found] == sorted(each.time for each in found)


@given(cut=st.floats(0, 1))
def test_cut_anywhere_it_loses_the_torn_line_alone(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    path = tmp_path_factory.mktemp("stage") / "events.jsonl"
    whole = told(path, "a", "b", "c")
    content = path.read_bytes()
    path.write_bytes(content[: round(cut * len(content))])
    left = read_events(path)
    assert left == whole[: len(left)] and len(left) >= path.read_bytes().count(b"\n")
    assert told(path, "new")[: len(left)] == left
    assert [each.text for each in read_events(path)] == [*(each.text for each in left), "new"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00",
        b"[1]",
        b"[" * 100_000,
        json.dumps({"time": 1.0, "step": 1, "images_seen": 8, "kind": "party", "text": ""}).encode(),
        json.dumps({"time": float("nan"), "step": 1, "images_seen": 8, "kind": "note", "text": ""}).encode(),
        json.dumps({"time": 1.0, "step": 1e400, "images_seen": 8, "kind": "note", "text": ""}).encode(),
        json.dumps({"time": 1.0, "step": 1, "images_seen": 8, "kind": ["note"], "text": ""}).encode(),
        json.dumps({"time": 1.0, "step": 1, "images_seen": 8, "kind": "note", "text": {}}).encode(),
    ],
)
def test_lines_that_are_no_events_are_left_out(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    (first,) = told(path, "a")
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert read_events(path) == [first]


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventsLog(path) as log:
        threads = [
            threading.Thread(target=lambda: [log.append("note", "x" * 500, step=n, images_seen=0) for n in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_events(path)) == 200 == path.read_bytes().count(b"\n")


def test_a_file_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with EventsLog(Path("/dev/full"), say=said.append) as log:
        log.append("note", "a", step=1, images_seen=8)
        log.append("note", "b", step=2, images_seen=16)
    assert len(said) == 1 and "/dev/full" in said[0]
    with EventsLog(tmp_path / "no folder" / "events.jsonl", say=said.append) as log:
        log.append("note", "a", step=1, images_seen=8)
    assert len(said) == 2
    assert read_events(tmp_path / "no folder" / "events.jsonl") == []
