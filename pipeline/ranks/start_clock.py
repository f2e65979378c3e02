"""Show where the time before a stage's first step goes, and what slow commands wait for.

    pretrain: opening the engine ...                            (only if it takes longer than a second)
    probe: fitting, C 0.1, 5 of 8: 300 iterations ...           (repeated with its progress)
    pretrain: first step after 3.4 s (2.9 s of CPU): libraries 1.9, shards 0.2, the engine 0.6, ...

Costs a few clock reads, and a thread that ends with the first step. On a GPU the first step counts once submitted, not
once done. No torch here: it runs while torch is imported.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_TOLD_SECONDS = 1.0  # shorter parts are not shown while they last
_AGAIN_SECONDS = 5.0
_LEAST_SECONDS = 0.05  # shorter parts are left out of the summary


def seconds_since_start() -> float:
    """Age of this process, to 0.01 s; 0 if the clock was set back."""
    from shardvit.pipeline.ranks.process import process_started

    started, now = process_started(os.getpid()) or 0.0, time.time()
    if sys.platform == "linux":  # in ticks since the boot, whose own time psutil knows to a second
        started, now = started / os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, now - started)


class StartClock:
    """Splits the time up to a stage's first step into parts. `say` is also called from a thread; None: silent."""

    def __init__(
        self,
        what: str = "",
        *,
        say: Callable[[str], None] | None = None,
        part: str = "starting Python",
        earlier_seconds: float = 0.0,
        earlier_cpu_seconds: float = 0.0,
    ) -> None:
        self.say = say
        self._what = what
        self._earlier_seconds, self._earlier_cpu_seconds = earlier_seconds, earlier_cpu_seconds
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self._part, self._part_began, self._far = part, self._began - earlier_seconds, ""
        self._tell_after = _TOLD_SECONDS
        self._seconds: dict[str, float] = {}
        self._over = threading.Event()
        if say is not None:
            threading.Thread(target=self._report_slow_parts, daemon=True, name="start-clock").start()

    def set_status(self, part: str, far: str = "") -> None:
        """Start a part, or update its progress (`far`); free after the first step."""
        self._far = far
        if self._over.is_set() or part == self._part:
            return
        self._part_began, self._tell_after = self._add_part(), _TOLD_SECONDS
        self._part = part

    def _add_part(self) -> float:
        now = time.monotonic()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._part_began
        return now

    def first_step_done(self) -> None:
        """Report, once, how long the start took, and where."""
        if self._over.is_set():
            return
        self._add_part()
        self.close()
        if self.say is not None:
            self.say(self.describe())

    def close(self) -> None:
        self._over.set()

    def describe(self) -> str:
        """One line: the total, then its larger parts in order."""
        cpu_seconds = time.process_time() - self._cpu_began + self._earlier_cpu_seconds
        parts = ", ".join(
            f"{part} {seconds:.1f}" for part, seconds in self._seconds.items() if seconds > _LEAST_SECONDS
        )
        return (
            f"{self._what}: first step after {sum(self._seconds.values()):.1f} s ({cpu_seconds:.1f} s of CPU): {parts}"
        )

    def _report_slow_parts(self) -> None:
        while not self._over.wait(_TOLD_SECONDS / 4):
            lasts = time.monotonic() - self._part_began
            if lasts >= self._tell_after and self.say is not None:
                self._tell_after = lasts + max(_AGAIN_SECONDS, 0 if self._far else lasts)
                with suppress(OSError, ValueError):  # the reader is gone
                    self.say(f"{self._what}: {self._part}{self._far and ', '}{self._far} ...")
