"""Calls on a tracking server that end in time: a client's own time-out counts from byte to byte, not for an answer.

A call without a whole answer is left behind in its thread, and its result is thrown away: whoever calls tries again.
Costs a thread for each call, and a few threads that wait on a server which answers a byte a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_MOST_LEFT_BEHIND = 4
_POLL_SECONDS = 0.25


class NoAnswer(Exception):
    """A call had no whole answer in time."""


class BoundedCalls:
    """Makes calls one after the other, each with a time-out for all of it.

    Args:
        timeout_seconds: of a call; None: none, and calls are made in the calling thread.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._left_behind: list[threading.Thread] = []
        self._deadline = float("inf")
        self.is_answered = True

    def end_by(self, deadline: float) -> None:
        """Also the call that is on its way ends by then (`time.monotonic`); callable from another thread."""
        self._deadline = deadline

    def __call__(self, call: Callable[[], Result]) -> Result:
        """What `call` returns or raises.

        Raises:
            NoAnswer: it took too long, or several earlier ones are still on their way.
        """
        if self._timeout_seconds is None:
            return call()
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= _MOST_LEFT_BEHIND:
            raise NoAnswer(f"{len(self._left_behind)} calls have no whole answer yet")
        results: list[Result] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)
            finally:
                done.set()

        end = time.monotonic() + self._timeout_seconds
        thread = threading.Thread(target=run, name="tracking call", daemon=True)
        thread.start()
        while not done.wait(_POLL_SECONDS):
            if time.monotonic() > min(end, self._deadline):
                self._left_behind.append(thread)
                self.is_answered = False
                raise NoAnswer(f"the server's answer was not whole after {self._timeout_seconds:g} s, or at the end")
        self.is_answered = True
        if errors:
            raise errors[0]
        return results[0]
