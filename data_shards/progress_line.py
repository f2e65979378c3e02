"""Show progress over images: a tqdm bar on a terminal, otherwise a line every few seconds."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TextIO

from shardvit.data_shards.text import show_duration

LINE_SECONDS = 5.0


class Progress(AbstractContextManager["Progress"]):
    """Count images, across threads; show images/s (without `done_images`) and the time left."""

    def __init__(
        self, total_images: int, report: Callable[[str], None], *, status: str = "packing", done_images: int = 0
    ) -> None:
        self._total = total_images
        self._report = report
        self._status = status
        self._lock = threading.Lock()
        self._before = self._done = done_images
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = open_bar(
                sys.stderr, total=total_images, initial=done_images, unit="img", desc=status, leave=False
            )

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_images: int) -> None:
        with self._lock:
            self._done += num_images
            if self._bar is not None:
                self._bar.update(num_images)
                return
            now = time.monotonic()
            if now - self._last_line >= LINE_SECONDS and self._before < self._done < self._total:
                self._last_line = now
                speed = (self._done - self._before) / (now - self._start)
                left = show_duration((self._total - self._done) / speed)
                self._report(
                    f"{self._status}: {self._done:,} of {self._total:,} images, {speed:,.0f} images/s, {left} left"
                )


def open_bar(terminal: TextIO, *, total: int, initial: int, **options: Any) -> Any:
    """Open a tqdm bar on a terminal; `initial` of `total` steps are done, `options` are tqdm's."""
    from tqdm import tqdm

    try:
        # Some terminals (containers, CI, `script`) report 0 columns or lines, for which tqdm would draw nothing.
        sized = min(os.get_terminal_size(terminal.fileno())) > 0
    except (OSError, ValueError):
        sized = False
    size = {"dynamic_ncols": True} if sized else {"ncols": 120, "nrows": 24}
    # tqdm's thread redraws bars that stall; without it there is no thread to disturb a fork.
    bar = type("Bar", (tqdm,), {"monitor_interval": 0})
    return bar(total=total, initial=initial, file=terminal, **size, **options)
