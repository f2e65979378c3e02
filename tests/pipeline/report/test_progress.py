import io
import math
import re
import threading
import time
from pathlib import Path

import pytest

from shardvit.pipeline.ranks.stopping import TimeLimit
from shardvit.pipeline.report.progress import RecentSpeed, TrainingProgress, format_count
from tests.terminal import terminal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_progress(stream: io.StringIO, clock: Clock, *, total: int = 100, start: int = 0) -> TrainingProgress:
    return TrainingProgress(
        "pretrain", total_steps=total, start_step=start, images_per_step=64, stream=stream, clock=clock
    )


def update(progress: TrainingProgress, step: int, *, loss: float = 0.5) -> None:
    progress.update(step, loss=loss, lr=3e-4, images_per_second=512.34, waits="data wait 2.1%")


def test_the_last_step_alone_is_a_hundred_percent() -> None:
    assert format_count(400, 1000) == "step 400/1000 (40.0%)"
    assert format_count(99_999, 100_000) == "step 99999/100000 (99.9%)"
    assert format_count(100_000, 100_000) == "step 100000/100000 (100.0%)"


def test_time_left_follows_the_recent_speed_and_not_the_start() -> None:
    speed = RecentSpeed(60.0)
    assert math.isnan(speed.seconds_left(100))
    speed.add(1, 500.0)  # the first step came after a long start
    assert math.isnan(speed.seconds_left(100))
    speed.add(11, 510.0)
    assert speed.seconds_left(100) == pytest.approx(89.0)
    for tick in range(1, 101):  # half as fast from here on
        speed.add(11 + tick, 510.0 + 2 * tick)
    assert speed.seconds_left(211) == pytest.approx(200.0)
    speed.add(50, 1000.0)  # a rollback
    speed.add(60, 1005.0)
    assert speed.seconds_left(100) == pytest.approx(20.0)
    assert speed.seconds_left(60) == 0.0


@pytest.mark.parametrize(
    ("left_seconds", "says"),
    [
        (10_000.0, "ETA 15:00 min |"),
        (600.0, "ETA 15:00 min, 1 requeue left |"),
        (200.0, "ETA 15:00 min, 2 requeues left |"),
    ],
)
def test_an_eta_beyond_the_jobs_time_limit_says_how_often_it_is_requeued(left_seconds: float, says: str) -> None:
    stream, clock = io.StringIO(), Clock()
    limit = TimeLimit(ends_at=time.time() + 20 + left_seconds, seconds=500.0)
    progress = TrainingProgress(
        "pretrain", total_steps=100, start_step=0, images_per_step=64, limit=limit, stream=stream, clock=clock
    )
    update(progress, 9)
    clock.now += 10.0  # 10 seconds a step: 900 are left
    update(progress, 10)
    progress.close()
    assert says in stream.getvalue().splitlines()[-1]


def test_a_file_gets_plain_lines_with_everything() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = lines_progress(stream, clock)
    clock.now += 30
    update(progress, 1)
    progress.note("checkpoint saved")
    clock.now += 10
    update(progress, 11, loss=0.25126)
    progress.close()
    assert stream.getvalue().splitlines()[1:] == [
        "checkpoint saved",
        "pretrain step 11/100 (11.0%) | loss 0.2513 | 512.3 images/s | ETA 1:29 min | lr 3.00e-04 | data wait 2.1% | "
        "704 images | elapsed 40.0 s",
    ]
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize("total", [35, 100])  # to the end, or interrupted
def test_a_file_gets_a_line_every_ten_seconds_and_the_first_and_the_last(total: int) -> None:
    stream, clock = io.StringIO(), Clock()
    progress = lines_progress(stream, clock, total=total)
    for step in range(1, 36):
        clock.now += 1
        update(progress, step)
    progress.close()
    progress.close()
    assert re.findall(r"step (\d+)/", stream.getvalue()) == ["1", "11", "21", "31", "35"]


@pytest.mark.parametrize(("lines", "columns"), [(24, 0), (24, 80), (24, 200), (0, 100), (0, 0)])
def test_a_terminal_gets_one_bar_that_notes_do_not_break(
    monkeypatch: pytest.MonkeyPatch, lines: int, columns: int
) -> None:
    with terminal(lines=lines, columns=columns) as (stream, shown):
        monkeypatch.setattr("sys.stderr", stream)  # tqdm asks this one for its size even if it is told one
        progress = TrainingProgress("finetune", total_steps=20, start_step=10, images_per_step=64, stream=stream)
        for step in range(11, 21):
            update(progress, step, loss=1 / step)
            if step == 15:
                progress.note("held-out top-1 0.9")
        progress.close()
        monkeypatch.undo()
    text = shown.decode()
    assert max(len(part) for part in re.split("[\r\n]", text)) <= (columns if columns and lines else 120)
    assert re.search(r"finetune 100%\|.*20/20, loss 0.0500 \| 512.3 images/s \| ETA 0.0 s", text)
    assert re.search(r"(^|[\r\n])held-out top-1 0.9\r\n", text)
    assert not any(thread.name.startswith("TMonitor") for thread in threading.enumerate())


def test_a_closed_stream_is_no_terminal(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    stream.close()
    TrainingProgress("x", total_steps=1, start_step=0, images_per_step=1, stream=stream).close()
