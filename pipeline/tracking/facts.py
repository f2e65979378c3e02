"""mlflow_facts.json: what an MLflow run is to know, apart from metrics.jsonl, pictures and models. Imports no mlflow.

Written before anything is sent, so that `shardvit sync` can send it after an outage, or from a cluster without a way
out. Passwords of URLs are taken out before.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data_shards.durable import replace_text
from data_shards.safe_paths import read_inside
from pipeline.tracking.tracking_thread import FinalStatus, without_credentials

Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]  # of unix time
RunStatus = Literal[FinalStatus, "RUNNING"]


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set as MLflow shows it; `context` is train or eval."""

    name: str
    source: str
    digest: str
    context: str
    images: int | None = None
    classes: int | None = None


@dataclass(frozen=True)
class FinalValue:
    """A metric without steps, and when it was known, in unix milliseconds: MLflow keeps the same point once."""

    value: Annotated[float, Field(allow_inf_nan=True)]
    time_ms: int


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the run of a pipeline or a stage is to know; `files` are artifacts, relative to the pipeline's folder."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    name: str
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetInput, ...] = ()
    metrics: dict[str, FinalValue] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    status: RunStatus = "RUNNING"
    begun_ms: Milliseconds | None = None  # of the first attempt
    ended_ms: Milliseconds | None = None  # of the last one

    @property
    def digest(self) -> str:
        """Changes with what is to be known, without status, times and files."""
        text = json.dumps(
            asdict(replace(self, status="RUNNING", files=(), begun_ms=None, ended_ms=None)), sort_keys=True
        )
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def with_metrics(self, values: Mapping[str, float]) -> RunFacts:
        """With these values; an unchanged one keeps the time at which it was first known."""
        now = now_ms()
        metrics = {
            name: known
            if (known := self.metrics.get(name)) is not None and known.value == value
            else FinalValue(value, now)
            for name, value in values.items()
        }
        return replace(self, metrics=metrics)

    def save(self, file: Path) -> None:
        """Replace the file atomically. Raises OSError; a missing folder is not made again."""
        replace_text(file, json.dumps(_clean(asdict(self))) + "\n", sync="none")


_FACTS = TypeAdapter(RunFacts)


def now_ms() -> Milliseconds:
    """What MLflow tells time by."""
    return int(time.time() * 1000)


def load_facts(file: Path) -> RunFacts | None:
    """None: there are none, or they are damaged and will be written again."""
    try:
        return _FACTS.validate_json(read_inside(file, folder=file.parent))
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
