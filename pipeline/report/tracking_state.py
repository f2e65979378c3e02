"""What a run folder remembers of its MLflow runs: the id, and how far the store has the curves (mlflow.json).

The key is drawn and kept before the run exists, and put on the run as a tag: when a kill, or a lost answer,
comes between the making of the run and the writing of its id, the key finds the run again and none is made
twice. Knows nothing of mlflow.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_shards.durable import replace_text
from pipeline.report.metrics_log import MetricRow


@dataclass(frozen=True)
class SentMark:
    """How far a store has the rows of metrics.jsonl: all below `step`, and the first `rows` rows at
    `step`."""

    step: int = -1
    rows: int = 0

    def after(self, rows: Sequence[MetricRow]) -> SentMark:
        """The mark once `rows`, which follow it, are confirmed."""
        mark = self
        for row in rows:
            mark = SentMark(step=row.step, rows=mark.rows + 1 if row.step == mark.step else 1)
        return mark

    def rewound(self, resume_step: int) -> SentMark:
        """The mark when training goes on from `resume_step`: what came after it is computed and sent
        again."""
        # A later step was sent, so every row at resume_step was.
        return SentMark(step=resume_step, rows=sys.maxsize) if self.step > resume_step else self

    def unsent(self, rows: Iterable[MetricRow]) -> Iterator[MetricRow]:
        """Those rows of the file (given from its beginning, steps never falling) that lie beyond the mark."""
        at_mark = 0
        for row in rows:
            at_mark += row.step == self.step
            if row.step > self.step or (row.step == self.step and at_mark > self.rows):
                yield row


@dataclass
class RunState:
    """mlflow.json of one run, the pipeline's or a stage's. `attempt` counts the openings of a stage."""

    file: Path
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    attempt: int = 0
    sent: SentMark = SentMark()

    def save(self) -> None:
        """Replace the file atomically. Raises OSError; a folder that is gone is not made again."""
        record = {
            "key": self.key,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "sent_step": self.sent.step,
            "sent_rows_at_step": self.sent.rows,
        }
        replace_text(self.file, json.dumps(record) + "\n", sync="none")


def load_run_state(file: Path) -> RunState:
    """The state in `file`, or a fresh one when there is none. Raises ValueError (what is in it is damaged),
    OSError."""
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        return RunState(file)
    try:
        return RunState(
            file,
            key=str(record["key"]),
            run_id=None if record["run_id"] is None else str(record["run_id"]),
            attempt=int(record["attempt"]),
            sent=SentMark(step=int(record["sent_step"]), rows=int(record["sent_rows_at_step"])),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a run's state") from error
