"""One rank's requests that all ranks carry out after the same step: stop cleanly, or save.

A signal on any rank makes all ranks finish the step, save and exit; rank 0's clock requests checkpoints. Requests made
after step s are exchanged asynchronously and carried out after step s+1. A second Ctrl-C ends the process at once; what
is on disk is always complete.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType

from pipeline.ranks.group import Agreement, Ranks


class Stopped(Exception):
    """Training was asked to stop and has saved; the process exits with `EXIT_STOPPED`."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks do after this step."""

    stop: bool
    save: bool


class Requests:
    """What any rank requests of all of them, exchanged once a step.

    Args:
        stop: this rank's signals.
        saved_step: of the last checkpoint.
        save_minutes: age of the last checkpoint, by the monotonic clock, at which one is requested; 0: never.
    """

    def __init__(self, stop: StopFlag, *, ranks: Ranks, saved_step: int, save_minutes: float = 0.0) -> None:
        self.saved_step = saved_step
        self._stop = stop
        self._ranks = ranks
        self._save_seconds = save_minutes * 60
        self._saved_at = time.monotonic()
        self._pending: Agreement | None = None

    def agreed(self, step: int) -> Agreed:
        """What all ranks do after `step`, as requested one step ago; collective."""
        stop, save = self._pending.result() if self._pending is not None else (False, False)
        self._pending = self._ranks.start_any(self._stop.reason is not None, self._save_is_due())
        # What the clock requested a step ago is done if that step saved.
        return Agreed(stop=stop, save=save and self.saved_step < step - 1)

    def saved(self, step: int) -> None:
        self._saved_at = time.monotonic()
        self.saved_step = step

    def wait(self) -> None:
        """Wait for the pending exchange, at the end."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _save_is_due(self) -> bool:
        return self._save_seconds > 0 and time.monotonic() - self._saved_at >= self._save_seconds


class StopFlag:
    """Set by SIGTERM, SIGINT, SIGUSR1 or SIGHUP (the terminal was closed), or by `request`."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self) -> None:
        """Install the handlers; in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":  # launchers repeat SIGTERM by themselves
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.request(signal.Signals(number).name)
