"""Signal handlers for as long as something lasts. In the main thread, as Python wants it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def under_nohup(number: signal.Signals) -> bool:
    """Whether this is the signal of a terminal that is gone, and somebody wants it ignored."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Within it these signals go to `handler`; afterwards to whom they went before. What nohup ignores stays so."""
    numbers = [number for number in numbers if not under_nohup(number)]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)
