"""mlflow.json: which run of a tracking service this is, and what of it was sent. Only the sender writes it.

The key is drawn and saved before the run exists, and is a tag of it: if a kill or a lost answer comes before its id is
written, the key finds the run, so that none is created twice.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from data_shards.durable import replace_text
from data_shards.safe_paths import read_inside
from data_shards.text import parse_json


@dataclass
class RunState:
    """mlflow.json of one run, a sweep's, a pipeline's or a stage's."""

    file: Path
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    attempt: int = 0  # the last one whose cut of metrics.jsonl was taken into account
    sent_rows: int = 0  # of metrics.jsonl; a count, because bytes shift when a damaged row is dropped
    sent: dict[str, str] = field(default_factory=dict)  # what else: its name, and a mark that changes with it

    def save(self) -> None:
        """Replace the file atomically. Raises OSError; a missing folder is not made again."""
        record = {name: value for name, value in vars(self).items() if name != "file"}
        replace_text(self.file, json.dumps(record) + "\n", sync="none")

    def point_to(self, run_id: str) -> None:
        """Point to this run; if it is another one than before, everything is sent again."""
        if self.run_id not in (None, run_id):
            self.sent_rows, self.sent = 0, {}
        self.run_id = run_id


def load_run_state(file: Path) -> RunState:
    """The state in `file`, or a fresh one if there is none. Raises ValueError (it is damaged), OSError."""
    try:
        record = parse_json(read_inside(file, folder=file.parent))
    except FileNotFoundError:
        return RunState(file)
    try:
        if not re.fullmatch("[0-9A-Za-z-]+", str(record["key"])):  # it stands in a query
            raise ValueError(f"{file} has no key of a run")
        return RunState(
            file,
            key=str(record["key"]),
            run_id=None if record["run_id"] is None else str(record["run_id"]),
            attempt=int(record["attempt"]),
            sent_rows=int(record["sent_rows"]),
            sent={str(name): str(mark) for name, mark in record.get("sent", {}).items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not the state of a run") from error


def without_credentials(text: str) -> str:
    """The text without the `user:password@` of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)
