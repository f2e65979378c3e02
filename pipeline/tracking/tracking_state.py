"""mlflow.json: which MLflow run this is (its id), and how much of it was sent. Knows nothing of mlflow.

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
    """mlflow.json of one run, the pipeline's or a stage's."""

    file: Path
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    attempt: int = 0  # how often the stage was opened
    sent_rows: int = 0  # of metrics.jsonl; a count, because bytes shift when a damaged row is dropped
    sent: dict[str, str] = field(default_factory=dict)  # what else: its name, and what it changes with

    def save(self) -> None:
        """Replace the file atomically. Raises OSError; a missing folder is not made again."""
        record = {name: value for name, value in vars(self).items() if name != "file"}
        replace_text(self.file, json.dumps(record) + "\n", sync="none")


def forget_run(state: RunState) -> None:
    """Its run is not in the store: everything is to be sent to another one."""
    state.run_id, state.sent_rows, state.sent = None, 0, {}


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
