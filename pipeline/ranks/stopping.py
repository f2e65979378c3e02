"""What any rank may wish of all of them, and all then do after the same step: stop in good order, or save.

A signal on any rank makes all ranks finish the same step, save and leave; rank 0's clock asks for a checkpoint. The
wishes travel once a step over the host group, without waiting: asked for after step s, answered after step s+1. A
second Ctrl-C ends the process at once; what is on disk is whole at any time.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType

from pipeline.ranks.group import Agreement, Ranks

EXIT_STOPPED = 75  # BSD's EX_TEMPFAIL: run the same command again


class Stopped(Exception):
    """Training was asked to stop and has saved; the process exits with `EXIT_STOPPED`."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks do after this step."""

    stop: bool
    save: bool


class SaveClock:
    """Says when the last checkpoint is too old, by a clock that nobody sets.

    Args:
        minutes: the age; 0: never.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = minutes * 60
        self._start = time.monotonic()

    def due(self) -> bool:
        """Whether it is."""
        return self._seconds > 0 and time.monotonic() - self._start >= self._seconds

    def restart(self) -> None:
        """A checkpoint was written."""
        self._start = time.monotonic()


class StopFlag:
    """Raised by SIGTERM, SIGINT, SIGUSR1 or SIGHUP (a terminal that is gone), or by `request`."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._pending: Agreement | None = None

    def listen(self) -> None:
        """Install the handlers; in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                signal.signal(number, self._on_signal)

    def request(self, reason: str) -> None:
        """Ask for a stop from any thread."""
        self.reason = self.reason or reason

    def agreed(self, ranks: Ranks, *, save: bool) -> Agreed:
        """What all ranks do now; collective, once a step. Answers what was asked one step ago.

        Args:
            ranks: the processes.
            save: this rank would like a checkpoint.
        """
        stop_now, save_now = self._pending.result() if self._pending is not None else (False, False)
        self._pending = ranks.start_any(self.reason is not None, save)
        return Agreed(stop=stop_now, save=save_now)

    def settle(self) -> None:
        """Take in the last pending answer, so that no exchange is left open at the end."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":  # launchers repeat SIGTERM by themselves
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.request(signal.Signals(number).name)
