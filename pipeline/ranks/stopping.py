"""Make all ranks stop or save after the same step when one of them is asked to.

A signal to any rank makes all finish the step, save and exit; rank 0's clock requests checkpoints. A request made
before the optimizer moves in step s travels with the gradient norm and takes effect after step s+1. A second Ctrl-C
ends the process immediately; what is on disk is always complete.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Literal, NamedTuple


class Stopped(Exception):
    """Training was asked to stop and has saved; the process exits with `EXIT_STOPPED`."""


class StopOrSave(NamedTuple):
    """One rank's requests, or their OR over ranks."""

    stop: bool = False
    save: bool = False
    is_saving: bool = False  # no request: its part of a save in flight is unfinished


class Requests:
    """The ranks' requests, exchanged by the engine in each step. `saved_step` is the last checkpoint's; a checkpoint is
    requested once that is `save_minutes` old (0: never)."""

    def __init__(self, stop: StopFlag, *, saved_step: int, save_minutes: float = 0.0) -> None:
        self.saved_step = saved_step
        self._stop = stop
        self._save_seconds = save_minutes * 60
        self._saved_at = time.monotonic()
        self._asked_to_save = False
        self._heard: dict[int, StopOrSave] = {}

    def ask(self, what: Literal["stop", "save"], why: str) -> None:
        """Request it on behalf of the user's own code on this rank."""
        if what == "stop":
            self._stop.request(why)
        else:
            self._asked_to_save = True

    @property
    def mine(self) -> StopOrSave:
        age_seconds = time.monotonic() - self._saved_at
        is_old = self._save_seconds > 0 and age_seconds >= self._save_seconds
        return StopOrSave(stop=self._stop.reason is not None, save=self._asked_to_save or is_old)

    def heard(self, step: int, requested: StopOrSave) -> None:
        self._heard[step] = requested

    def agreed(self, step: int) -> StopOrSave:
        """Return what all ranks must do after `step`: the requests of the step before."""
        requested = self._heard.pop(step - 1, StopOrSave())
        # If the step before saved, its clock's request is done.
        return requested._replace(save=requested.save and self.saved_step < step - 1)

    def saved(self, step: int) -> None:
        self._saved_at, self._asked_to_save = time.monotonic(), False
        self.saved_step = step


class StopFlag:
    """Set by SIGTERM, SIGINT, SIGUSR1, SIGHUP (terminal closed) or `request`."""

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
        if number == signal.SIGINT and self.reason == "SIGINT":  # only SIGINT: launchers repeat SIGTERM
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.request(signal.Signals(number).name)


@dataclass(frozen=True)
class TimeLimit:
    """This job's time limit."""

    ends_at: float  # unix seconds
    seconds: float  # of one job; more than zero


def requeues_needed(eta_seconds: float, *, left_seconds: float, limit_seconds: float) -> int:
    """Count the further jobs needed to finish, ignoring start-up and saving."""
    return math.ceil(max(0.0, eta_seconds - max(0.0, left_seconds)) / limit_seconds)
