"""Progress: lines with speed and time left, now and then, and across threads."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardvit.data_shards import progress_line as pack_progress
from shardvit.data_shards.progress_line import LINE_SECONDS, Progress
from tests.terminal import terminal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(pack_progress, "LINE_SECONDS", LINE_SECONDS)  # which is out of reach in this folder
    clock = Clock()
    monkeypatch.setattr(pack_progress, "time", clock)  # not the one of the whole process: other threads have clocks
    return clock


def test_a_line_every_few_seconds_with_speed_and_time_left(clock: Clock):
    lines: list[str] = []
    with Progress(10_000, lines.append) as progress:
        for _ in range(10):
            clock.now += 1
            progress.add(100)
    assert lines == [
        "packing: 500 of 10,000 images, 100 images/s, 1:35 min left",
        "packing: 1,000 of 10,000 images, 100 images/s, 1:30 min left",
    ]


def test_what_was_done_before_does_not_count_for_the_speed(clock: Clock):
    lines: list[str] = []
    with Progress(10_000, lines.append, status="looking", done_images=9_000) as progress:
        clock.now += 10
        progress.add(500)
    assert lines == ["looking: 9,500 of 10,000 images, 50 images/s, 10.0 s left"]


def test_nothing_is_said_at_the_end_or_without_progress(clock: Clock):
    lines: list[str] = []
    with Progress(100, lines.append) as progress:
        clock.now += 10
        progress.add(0)
        progress.add(100)
    assert lines == []


def test_threads_lose_no_count(clock: Clock):
    lines: list[str] = []
    with Progress(10**9, lines.append) as progress, ThreadPoolExecutor(8) as pool:
        list(pool.map(progress.add, [1] * 5_000))
        clock.now += 10
        progress.add(0)
    assert re.match(r"packing: 5,000 of", lines[0])


@pytest.mark.parametrize(("lines", "columns"), [(24, 80), (24, 0), (0, 100), (0, 0)])
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, lines: int, columns: int):
    said: list[str] = []
    with terminal(lines=lines, columns=columns) as (stream, shown):
        monkeypatch.setattr("sys.stderr", stream)
        with Progress(100, said.append, done_images=40) as progress:
            progress.add(10)
        monkeypatch.undo()
    assert b"packing:  40%|" in shown and b"40/100" in shown and said == []
