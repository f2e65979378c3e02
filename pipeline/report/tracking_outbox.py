"""Rows on their way to a tracking store: a bounded, thread-safe queue that knows when it has lost some.

What it drops, whole steps at a time, stands in metrics.jsonl and is read from there when the store is back.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass

from pipeline.report.metrics_log import MetricRow


@dataclass(frozen=True)
class Waiting:
    """The head of an outbox. Rows of steps below `gap_below_step` have to be read from the file first."""

    gap_below_step: int | None
    rows: list[MetricRow]
    last_number: int


class Outbox:
    """Rows on their way to the store, `max_rows` at most; the oldest make way, by whole steps. Thread-
    safe."""

    def __init__(self, *, max_rows: int, gap_below_step: int) -> None:
        self._max_rows = max_rows
        self._gap_below_step: int | None = gap_below_step
        self._numbered: deque[tuple[int, MetricRow]] = deque()
        self._next_number = 0
        self._lock = threading.Lock()

    def put(self, row: MetricRow) -> None:
        """Add a row, at the end."""
        with self._lock:
            self._numbered.append((self._next_number, row))
            self._next_number += 1
            oldest_step = self._numbered[0][1].step
            # The newest step stays whole: rows of it may be still to come, and would be sent twice.
            if len(self._numbered) > self._max_rows and oldest_step < row.step:
                while self._numbered[0][1].step == oldest_step:
                    self._numbered.popleft()
                self._gap_below_step = oldest_step + 1

    def head(self, max_rows: int) -> Waiting:
        """What to send next; the rows stay until `sent`."""
        with self._lock:
            numbered = list(itertools.islice(self._numbered, max_rows))
            return Waiting(self._gap_below_step, [row for _, row in numbered], numbered[-1][0] if numbered else -1)

    def sent(self, last_number: int) -> None:
        """The rows up to that number are confirmed."""
        with self._lock:
            while self._numbered and self._numbered[0][0] <= last_number:
                self._numbered.popleft()

    def gap_filled(self, below_step: int) -> None:
        """The rows below that step have been sent from the file; a gap that has grown meanwhile stays."""
        with self._lock:
            if self._gap_below_step == below_step:
                self._gap_below_step = None
