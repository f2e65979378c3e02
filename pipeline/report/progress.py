"""How far a stage is: one bar on a terminal, plain lines in a file, with the same content.

A line: `pretrain step 400/1000 (40.0%) | loss 0.2513 | 512.3 images/s | ETA 1:33 min | lr 3.00e-04 | data wait
2.1% | 25,600 images | elapsed 1:02 min`. The ETA leaves out start-up: it is measured from the first update on,
over the last minute, so evaluations and checkpoints count as they come, and a slow first step does not.

Costs about 20 microseconds per update; the terminal is redrawn ten times a second at most, a file gets one
line per `every_seconds`. It computes nothing: loss and speed are handed in as plain floats (reading them from
a GPU is the caller's cost, so call it at the logging interval). Only rank 0 has one.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TextIO

from data_shards.progress_line import knows_its_size
from data_shards.text import printable, show_duration

_SPEED_WINDOW_SECONDS = 60.0


class TrainingProgress:
    """The display of one stage. `start_step` is the step resumed from, `images_per_step` the global batch."""

    def __init__(
        self,
        stage: str,
        *,
        total_steps: int,
        start_step: int,
        images_per_step: int,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        display: Literal["auto", "bar", "lines"] = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._total_steps = total_steps
        self._images_per_step = images_per_step
        # sys.stderr as it is now, not as it was when this file was imported
        self._stream: TextIO = sys.stderr if stream is None else stream
        self._every_seconds = every_seconds
        self._clock = clock
        self._started = clock()
        self._speed = RecentSpeed(_SPEED_WINDOW_SECONDS)
        self._printed_at: float | None = None
        self._unprinted: str | None = None
        self._shown_step = start_step
        self._bar: Any = None
        if display == "bar" or (display == "auto" and _is_terminal(self._stream)):
            self._bar = _open_bar(stage, total_steps=total_steps, start_step=start_step, stream=self._stream)

    def update(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        images_per_second: float,
        data_wait_share: float,
    ) -> None:
        """Show that `step` steps are done (of the whole stage, not of this attempt)."""
        now = self._clock()
        self._speed.add(step, now)
        values = " | ".join(
            (
                # What matters most comes first: a narrow terminal cuts the bar's line off at its right end.
                f"loss {loss:.4f}",
                f"{images_per_second:.1f} images/s",
                f"ETA {show_duration(self._speed.seconds_left(self._total_steps))}",
                f"lr {lr:.2e}",
                f"data wait {data_wait_share:.1%}",
                f"{step * self._images_per_step:,} images",
                f"elapsed {show_duration(now - self._started)}",
            )
        )
        if self._bar is not None:
            self._bar.set_postfix_str(values, refresh=False)
            self._bar.update(step - self._shown_step)
            self._shown_step = step
            return
        self._unprinted = f"{self._stage} {format_count(step, self._total_steps)} | {values}"
        due = self._printed_at is None or now - self._printed_at >= self._every_seconds
        if due or step >= self._total_steps:
            self._print_waiting_line(now)

    def note(self, text: str) -> None:
        """Print a line of its own (evaluation result, checkpoint saved) without breaking the bar. Thread-
        safe."""
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen; the last update is always printed. Closing twice is
        harmless."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        else:
            self._print_waiting_line(self._clock())

    def _print_waiting_line(self, now: float) -> None:
        if self._unprinted is not None:
            self._print(self._unprinted)
            self._unprinted = None
            self._printed_at = now

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RecentSpeed:
    """Steps per second over the last `window_seconds`, from the first step added on."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[tuple[int, float]] = deque()

    def add(self, step: int, now: float) -> None:
        """Step `step` was done at `now` (seconds of any clock). A step that goes back (a rollback) starts
        anew."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((step, now))
        # Keep one mark from beyond the window, so that steps longer than the window still give a speed.
        while len(self._seen) > 2 and now - self._seen[1][1] >= self._window_seconds:
            self._seen.popleft()

    def seconds_left(self, total_steps: int) -> float:
        """Seconds until `total_steps`; NaN while there is no speed to reckon with."""
        if not self._seen:
            return math.nan
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        left = max(total_steps - last, 0)
        if left == 0:
            return 0.0
        if last == first or ended <= began:
            return math.nan
        return left * (ended - began) / (last - first)


def format_count(step: int, total_steps: int) -> str:
    """`step 400/1000 (40.0%)`; never 100.0% before the last step."""
    percent = 100.0 * step / total_steps if total_steps else 100.0
    if step < total_steps:
        percent = min(percent, 99.9)
    return f"step {step}/{total_steps} ({percent:.1f}%)"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no such method, or already closed
        return False


def _open_bar(stage: str, *, total_steps: int, start_step: int, stream: TextIO) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):
        # tqdm's watching thread redraws bars that stall; without it there is no thread to trouble a fork.
        monitor_interval = 0

    sized = knows_its_size(stream)
    return Bar(
        total=total_steps,
        initial=start_step,
        desc=stage,
        file=stream,
        dynamic_ncols=sized,
        ncols=None if sized else 120,
        nrows=None if sized else 24,
        miniters=1,
        bar_format="{desc} {percentage:3.0f}%|{bar:5}| {n_fmt}/{total_fmt}{postfix}",
    )
