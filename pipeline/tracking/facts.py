"""The files through which training and the sender communicate, per stage, pipeline and sweep. Imports no mlflow.

mlflow_facts.json   name, tags, params, data sets and status; written by training when an attempt begins and ends,
                    without passwords in URLs
mlflow.json         run id in the tracking service, and what was sent; written only by the sender
"""

import hashlib
import json
import re
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.safe_paths import read_inside
from shardvit.data_shards.text import parse_json
from shardvit.pipeline.recipe.vocabulary import MLFLOW_FACTS_FILE

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
RunStatus = Literal[FinalStatus, "RUNNING"]
Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]  # of unix time


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set as MLflow shows it; `context` is "train", "eval" or "eval KEY"."""

    name: str
    source: str
    digest: str
    context: str
    images: int | None = None
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything sent for a stage's or pipeline's run except metrics, pictures, files and the model."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    name: str
    description: str = ""  # Markdown
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetInput, ...] = ()
    results: dict[str, tuple[float, Milliseconds]] = field(default_factory=dict)  # value and its time
    kept_rows: tuple[int, ...] = ()  # rows of metrics.jsonl that each attempt of a stage began with
    status: RunStatus = "RUNNING"
    begun_ms: Milliseconds | None = None  # of the first attempt
    ended_ms: Milliseconds | None = None  # of the last attempt

    @property
    def digest(self) -> str:
        """Digest without status and times."""
        text = json.dumps(asdict(replace(self, status="RUNNING", begun_ms=None, ended_ms=None)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def save(self, file: Path) -> None:
        """Replace the file atomically; OSError, also if its folder is missing."""
        replace_text(file, json.dumps(_clean(asdict(self))) + "\n", sync="none")


_FACTS = TypeAdapter(RunFacts)


def now_ms() -> Milliseconds:
    """Return unix time in milliseconds, MLflow's unit."""
    return int(time.time() * 1000)


def load_facts(stage_folder: Path) -> RunFacts | None:
    """Load a stage's facts; None if missing or damaged: they will be rewritten."""
    try:
        return _FACTS.validate_json(read_inside(stage_folder / MLFLOW_FACTS_FILE, folder=stage_folder))
    except (OSError, ValidationError):
        return None


@dataclass
class RunState:
    """mlflow.json. `key` is saved before the run is created and becomes its tag. If a kill or a lost response comes
    before the run id is saved, the key finds the run again, so none is created twice."""

    file: Path
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    attempt: int = 0  # the last whose cut of metrics.jsonl `sent_rows` reflects
    sent_rows: int = 0  # of metrics.jsonl; not an offset, which shifts when a damaged row is dropped
    sent: dict[str, str] = field(default_factory=dict)  # everything else: name -> mark, which changes with the content

    def save(self) -> None:
        """Replace the file atomically; OSError, also if its folder is missing."""
        record = {name: value for name, value in vars(self).items() if name != "file"}
        replace_text(self.file, json.dumps(record) + "\n", sync="none")

    def point_to(self, run_id: str) -> None:
        """Switch to this run; resend everything if it replaces another."""
        if self.run_id not in (None, run_id):
            self.sent_rows, self.sent = 0, {}
        self.run_id = run_id


def load_run_state(file: Path) -> RunState:
    """Read the state, or return a new one if there is no file; ValueError if damaged, OSError if unreadable."""
    try:
        record = parse_json(read_inside(file, folder=file.parent))
    except FileNotFoundError:
        return RunState(file)
    try:
        if not re.fullmatch("[0-9A-Za-z-]+", str(record["key"])):  # used in a query
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
    """Mask `user:password@` in URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)


def _clean(value: Any) -> Any:
    match value:
        case str():
            return without_credentials(value)
        case dict():
            return {key: _clean(each) for key, each in value.items()}
        case list() | tuple():
            return [_clean(each) for each in value]
        case _:
            return value
