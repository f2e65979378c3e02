"""Transfer results as files, for pictures and for comparing runs.

RUN/transfer/COMMAND-NAME-DIGEST-STAGE.json, where DIGEST is that of both sets; a table's has none:

    {"format": 1,
     "command": "fewshot" | "probe" | "knn" | "transfer",
     "name": NAME,
     "model": "runs/x/pretrain/model",         where it was found
     "model_digest": "...",                    of its weights
     "run": "x", "stage": "pretrain", "step": null or 400 (a checkpoint's),      all null for a model from elsewhere
     "images_seen": 51200,                     by that stage, up to this model; null: not known
     "layer": "pre_logits" | "pooled",
     "data_sets": [{"name": "pets", "group": "natural" or null, "train": SHARDS, "eval": SHARDS, "train_digest": "...",
                    "eval_digest": "...", "num_classes": 37, "train_images": 185, "eval_images": 3669,
                    "damaged_images": 0}],
     "results": [{"data_set": "pets", "group": "natural" or null, "method": "fewshot" | "probe" | "knn",
                  "metric": "top1", "settings": {"shots": 5, "l2": 1024.0, "seeds": 3}, "value": 0.71,
                  "values": [0.7, 0.71, 0.72]}],
     "mean": 0.71,
     "asked": {"pets": "..."}}

`train_images` counts the images learned from, `eval_images` the readable ones; `value` is the mean of `values`, one per
seed. The first metric of a data set is top-1; all but "loss" are shares of 1. Only for tables: "mean", over each data
set's first top-1 as in VTAB (null until all are measured), and "asked", a digest of each data set's settings.
Written atomically; `transfer_records` skips files that are broken or of another format.
"""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import is_inside, read_inside
from shardvit.pipeline.checkpoint.identity import read_state_file
from shardvit.pipeline.recipe.vocabulary import (
    ALL_STAGES,
    CHECKPOINTS_FOLDER,
    MODEL_FOLDER,
    RECIPE_FILE,
    FeatureLayer,
    StageName,
)
from shardvit.pipeline.runs.run_folder import FOLDER_PREFIX, RunFolder

TRANSFER_FOLDER = "transfer"  # in the run's folder

Command = Literal["fewshot", "probe", "knn", "transfer"]
Method = Literal["fewshot", "probe", "knn"]
SetGroup = Literal["natural", "specialized", "structured"]  # VTAB's (arXiv 1910.04867)
Setting = int | float | str | list[int] | list[float]

_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class UsedSet:
    """A data set that was transferred to."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    train: str
    eval: str
    train_digest: str
    eval_digest: str
    num_classes: _Count
    train_images: _Count
    eval_images: _Count
    damaged_images: _Count = 0
    group: SetGroup | None = None

    @property
    def digest(self) -> str:
        """8 hex digits; tell apart sets of the same name."""
        return hashlib.blake2b(f"{self.train_digest} {self.eval_digest}".encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class TransferScore:
    """One number; see the module docstring."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    data_set: str
    method: Method
    metric: str
    value: float
    values: tuple[float, ...]
    settings: dict[str, Setting] = field(default_factory=dict)
    group: SetGroup | None = None


@dataclass(frozen=True)
class TransferRecord:
    """One file; see the module docstring."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    command: Command
    name: str
    model: str
    model_digest: str
    layer: FeatureLayer
    run: str | None = None
    stage: str | None = None
    step: _Count | None = None
    images_seen: _Count | None = None
    data_sets: tuple[UsedSet, ...] = ()
    results: tuple[TransferScore, ...] = ()
    mean: float | None = None
    asked: dict[str, str] = field(default_factory=dict)
    format: Literal[1] = 1


_RECORD = TypeAdapter(TransferRecord)


def save_record(file: Path, record: TransferRecord) -> None:
    """Write a record atomically, creating its folder but no parents; OSError if the disk fails."""
    file.parent.mkdir(exist_ok=True)
    # ASCII: names from tars need not be UTF-8
    replace_text(file, json.dumps(asdict(record), indent=1) + "\n")


def load_record(file: Path) -> TransferRecord:
    """Read a record; ValueError if the file is missing or no transfer result."""
    try:
        return _RECORD.validate_json(read_inside(file, folder=file.parent))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file} is no result of a transfer ({where}: {first['msg']})") from None


def transfer_records(run: Path) -> list[TransferRecord]:
    """Read a run's records by name, skipping unreadable ones; sets that share a name get their digest appended."""
    found: list[TransferRecord] = []
    for file in sorted((run / TRANSFER_FOLDER).glob("*.json")):
        if file.name.startswith(".") or not is_inside(file, folder=run):
            continue
        try:
            found.append(load_record(file))
        except ValueError:
            continue
    digests: dict[str, set[str]] = defaultdict(set)
    for used in (used for record in found for used in record.data_sets):
        digests[used.name].add(used.digest)
    return [_told_apart(record, {name for name in digests if len(digests[name]) > 1}) for record in found]


def _told_apart(record: TransferRecord, names: set[str]) -> TransferRecord:
    new = {used.name: f"{used.name}_{used.digest}" if used.name in names else used.name for used in record.data_sets}
    sets = tuple(replace(used, name=new[used.name]) for used in record.data_sets)
    scores = tuple(replace(score, data_set=new.get(score.data_set, score.data_set)) for score in record.results)
    return replace(record, data_sets=sets, results=scores)


def file_name(name: str) -> str:
    """Make a file name: keep letters, digits, '.', '_' and '-'; the rest becomes '-'."""
    return re.sub("[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "unnamed"


def metrics_of(record: TransferRecord) -> dict[str, float]:
    """Metrics by MLflow name, as METRICS of `pipeline.recipe.vocabulary`."""
    mean = {} if record.mean is None else {"val/transfer_mean": record.mean}
    return {f"val/{score_name(each)}": each.value for each in record.results} | mean


def score_name(score: TransferScore) -> str:
    """Return a metric name such as "fewshot_pets_5shot", "probe_pets_top1" or "knn_pets_20nn_top5"."""
    match score.method:
        case "fewshot":
            return few_shot_name(score.data_set, shots=int(str(score.settings["shots"])))
        case "knn":
            return f"knn_{score.data_set}_{score.settings['k']}nn_{score.metric}"
        case "probe":
            return f"probe_{score.data_set}_{score.metric}"


def few_shot_name(data_set: str, *, shots: int) -> str:
    """Few-shot metric name, without the "val/" of metrics.jsonl."""
    return f"fewshot_{data_set}_{shots}shot"


@dataclass(frozen=True)
class ModelOrigin:
    """Origin of a model; all None if it is not from a run folder."""

    run: RunFolder | None = None
    stage: StageName | None = None
    step: int | None = None  # the checkpoint's
    images_seen: int | None = None  # by the stage, up to this model; None if unknown

    def record_file(self, name: str, *, outside: Path) -> Path:
        """RUN/transfer/NAME-STAGE.json, or -STAGE-step-00000400.json; without a run, a file in `outside`."""
        if self.run is None:
            return outside / f"{file_name(name)}.json"
        step = "" if self.step is None else f"-{FOLDER_PREFIX}{self.step:08d}"
        return self.run.path / TRANSFER_FOLDER / f"{file_name(name)}-{self.stage}{step}.json"


def model_origin(found: str) -> ModelOrigin:
    """Origin of the model at `FoundModel.origin`: RUN/STAGE/model, RUN/STAGE/checkpoints/step-..., or none."""
    place = Path(found).absolute()
    if place.name == MODEL_FOLDER:
        stage_folder, step = place.parent, None
    elif place.parent.name == CHECKPOINTS_FOLDER and place.name.startswith(FOLDER_PREFIX):
        stage_folder, step = place.parent.parent, int(place.name.removeprefix(FOLDER_PREFIX))
    else:
        return ModelOrigin()
    run = RunFolder(runs_root=stage_folder.parent.parent, name=stage_folder.parent.name)
    if stage_folder.name not in ALL_STAGES or not (run.path / RECIPE_FILE).is_file():
        return ModelOrigin()
    stage = cast(StageName, stage_folder.name)
    return ModelOrigin(run, stage, step, _images_seen(run, stage, checkpoint=None if step is None else place))


def _images_seen(run: RunFolder, stage: StageName, *, checkpoint: Path | None) -> int | None:
    try:
        if checkpoint is None:
            return run.record(stage).images_seen or None
        return int(read_state_file(checkpoint)["state"]["images_seen"])
    except (OSError, UserError, ValueError, KeyError, TypeError):
        return None
