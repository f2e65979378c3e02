"""mlflow_facts.json: what a stage's run in MLflow is to know apart from metrics, pictures and model. Imports no mlflow.

Training writes it at the beginning and the end of an attempt; the sender reads it, now or later (`shardvit sync`).
Passwords of URLs are taken out before.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data_shards.durable import replace_text
from data_shards.safe_paths import read_inside
from pipeline.recipe.vocabulary import MLFLOW_FACTS_FILE
from pipeline.tracking.run_state import without_credentials

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
RunStatus = Literal[FinalStatus, "RUNNING"]
Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]  # of unix time


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set as MLflow shows it; `context` is train or eval."""

    name: str
    source: str
    digest: str
    context: str
    images: int | None = None
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts for the MLflow run of a stage or of a pipeline."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    name: str
    description: str = ""  # Markdown
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetInput, ...] = ()
    results: dict[str, tuple[float, Milliseconds]] = field(default_factory=dict)  # of a pipeline: value, when known
    kept_rows: tuple[int, ...] = ()  # of a stage: how many rows of metrics.jsonl each attempt began with
    status: RunStatus = "RUNNING"
    begun_ms: Milliseconds | None = None  # of the first attempt
    ended_ms: Milliseconds | None = None  # of the last one

    @property
    def digest(self) -> str:
        """Digest of the facts, without status and times."""
        text = json.dumps(asdict(replace(self, status="RUNNING", begun_ms=None, ended_ms=None)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def save(self, file: Path) -> None:
        """Replace the file atomically. Raises OSError; a missing folder is not made again."""
        replace_text(file, json.dumps(_clean(asdict(self))) + "\n", sync="none")


_FACTS = TypeAdapter(RunFacts)


def now_ms() -> Milliseconds:
    """MLflow's clock."""
    return int(time.time() * 1000)


def load_facts(stage_folder: Path) -> RunFacts | None:
    """None: there are none, or they are damaged and will be written again."""
    try:
        return _FACTS.validate_json(read_inside(stage_folder / MLFLOW_FACTS_FILE, folder=stage_folder))
    except (OSError, ValidationError):
        return None


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
