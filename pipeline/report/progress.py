"""Show training's progress as a bar on a terminal or as plain lines in a file, with the same content.

A line: `pretrain step 400/1000 (40.0%) | loss 0.2513 | 512.3 images/s | ETA 1:33 min | lr 3.00e-04 | data wait 2.1% |
25,600 images | elapsed 1:02 min`. The ETA follows the last minute's speed, evaluations and checkpoints included. If the
job's time limit comes first, it reads `ETA 5:02 h, 3 requeues left`. Costs about 20 microseconds an update (a terminal
at most every 0.1 s, a file every 10 s).
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from shardvit.data_shards.progress_line import open_bar
from shardvit.data_shards.text import counted, printable, show_duration
from shardvit.pipeline.ranks.stopping import TimeLimit, requeues_needed

_SPEED_WINDOW_SECONDS = 60.0
_LINE_SECONDS = 10.0


class TrainingProgress:
    """Display of one stage, resumed from `start_step`."""

    def __init__(
        self,
        stage: str,
        *,
        total_steps: int,
        start_step: int,
        images_per_step: int,
        limit: TimeLimit | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._total_steps = total_steps
        self._images_per_step = images_per_step
        self._stream = stream or sys.stderr  # resolved now, not at import
        self._clock = clock
        self._started = clock()
        self._limit = limit
        self._speed = RecentSpeed(_SPEED_WINDOW_SECONDS)
        self._printed_at = -math.inf
        self._unprinted = ""
        self._bar = None
        if not self._stream.closed and self._stream.isatty():
            self._bar = open_bar(
                self._stream,
                total=total_steps,
                initial=start_step,
                desc=stage,
                miniters=1,
                bar_format="{desc} {percentage:3.0f}%|{bar:5}| {n_fmt}/{total_fmt}{postfix}",
            )

    def update(self, step: int, *, loss: float, lr: float, images_per_second: float, waits: str) -> None:
        now = self._clock()
        self._speed.add(step, now)
        # Most important first: a narrow terminal cuts off the right end.
        values = (
            f"loss {loss:.4f} | {images_per_second:.1f} images/s | ETA {self._eta()} | lr {lr:.2e} | {waits} | "
            f"{step * self._images_per_step:,} images | elapsed {show_duration(now - self._started)}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(values, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        self._unprinted = f"{self._stage} {format_count(step, self._total_steps)} | {values}"
        if now - self._printed_at >= _LINE_SECONDS or step >= self._total_steps:
            self._print_waiting_line(now)

    def note(self, text: str) -> None:
        """Print a separate line without breaking the bar. Thread-safe."""
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Print a pending update. Idempotent."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        else:
            self._print_waiting_line(self._clock())

    def _eta(self) -> str:
        seconds = self._speed.seconds_left(self._total_steps)
        text = show_duration(seconds)
        limit = self._limit
        if limit is None or math.isnan(seconds):
            return text
        requeues = requeues_needed(seconds, left_seconds=limit.ends_at - time.time(), limit_seconds=limit.seconds)
        return f"{text}, {counted(requeues, 'requeue')} left" if requeues else text

    def _print_waiting_line(self, now: float) -> None:
        if self._unprinted:
            self._print(self._unprinted)
            self._unprinted, self._printed_at = "", now

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RecentSpeed:
    """Steps per second over the last `window_seconds`."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[tuple[int, float]] = deque()

    def add(self, step: int, now: float) -> None:
        """Record `step` as done at `now`, in seconds of any clock; an earlier step restarts the window."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((step, now))
        # Keep one mark outside the window: steps longer than the window still give a speed.
        while len(self._seen) > 2 and now - self._seen[1][1] >= self._window_seconds:
            self._seen.popleft()

    def seconds_left(self, total_steps: int) -> float:
        """Seconds until `total_steps`; NaN while the speed is unknown."""
        if not self._seen:
            return math.nan
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        if last >= total_steps:
            return 0.0
        return (total_steps - last) * (ended - began) / (last - first) if last > first and ended > began else math.nan


def format_count(step: int, total_steps: int) -> str:
    """Format `step 400/1000 (40.0%)`; never 100.0% before the last step."""
    percent = min(100.0 * step / total_steps, 99.9) if step < total_steps else 100.0
    return f"step {step}/{total_steps} ({percent:.1f}%)"
