"""The file of what happened: it survives kills and damage, keeps all attempts, and never stops training."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runs.logs import EVENT_KINDS, Event, EventsLog, read_events

TEXTS = st.text(st.characters(), max_size=30)


def written(path: Path, *texts: str) -> list[Event]:
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


def test_a_later_attempt_adds_to_the_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path, "a", "b")
    assert [each.text for each in written(path, "c")] == ["a", "b", "c"]


@given(cut=st.floats(0, 1))
def test_cut_anywhere_it_loses_the_torn_line_alone(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    path = tmp_path_factory.mktemp("stage") / "events.jsonl"
    whole = written(path, "a", "b", "c")
    content = path.read_bytes()
    path.write_bytes(content[: round(cut * len(content))])
    left = read_events(path)
    assert left == whole[: len(left)] and len(left) >= path.read_bytes().count(b"\n")
    assert written(path, "new")[: len(left)] == left
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
    (first,) = written(path, "a")
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
