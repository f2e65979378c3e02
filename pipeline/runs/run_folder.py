"""The run folder: track which stages are done and from which inputs, and refuse a changed recipe.

    RUNS/NAME/recipe.yaml                 the resolved recipe
    RUNS/NAME/own_code/                   the user's own files as they were, to read: never executed from here
    RUNS/NAME/recipe_difference.txt       to its parent, see `recipe.io.difference_to_parent`
    RUNS/NAME/STAGE/stage.json            state, images seen, digests of inputs, results
    RUNS/NAME/STAGE/data.json             the shards it began with, see `stage.data_record`
    RUNS/NAME/STAGE/checkpoints/step-*/   see `checkpoint`
    RUNS/NAME/STAGE/ranks/                heartbeats, see `ranks.watch`
    RUNS/NAME/STAGE/metrics.jsonl         and events.jsonl, see `logs`
    RUNS/NAME/STAGE/evaluations/          see `evaluations`
    RUNS/NAME/STAGE/pictures/             see `pictures`; the drawing process logs to RUNS/NAME/pictures.log
    RUNS/NAME/STAGE/model/                the result: safetensors and config.json
    RUNS/NAME/transfer/                   few-shot, probe and kNN results of its models, see `transfer.results`
    RUNS/NAME/mlflow*.json, tracking/     facts for MLflow and what was sent, also in each stage, see `tracking`
    RUNS/NAME/report.html                 the report page, written after each stage and by `shardvit report`
    RUNS/NAME/compiled/                   torch's compiled kernels, see `kernels.cache`; may be deleted at any time

Finished stages never run again; interrupted ones resume. Nothing is deleted: `--restart` moves stages aside.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import is_inside, read_inside
from shardvit.data_shards.text import one_line
from shardvit.pipeline.own_code.by_path import copies
from shardvit.pipeline.recipe.io import differences, dump_recipe, flatten, parse_recipe, without_free_keys
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import (
    ALL_STAGES,
    CHECKPOINTS_FOLDER,
    DIFFERENCE_FILE,
    MODEL_FOLDER,
    RANKS_FOLDER,
    RECIPE_FILE,
    REPLACED_FOLDER,
    STAGE_FILE,
    SWEEP_FILE,
    StageName,
)

OWN_CODE_FOLDER = "own_code"
FOLDER_PREFIX = "step-"  # of a checkpoint
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class StageRecord:
    """stage.json; a wrong type or an unknown key makes it invalid."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    state: Literal["new", "running", "done"] = "new"
    last_saved_step: Count = 0
    images_seen: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    inputs: dict[str, str] = field(default_factory=dict)  # name -> digest
    results: dict[str, float] = field(default_factory=dict)
    model_digest: str = ""  # of the final weights
    total_steps: Count = 0  # 0: not begun, or written by an old version
    lanes: Count = 0  # of the sample order; 0: as above
    model: dict[str, Any] = field(default_factory=dict)  # record of the model being trained
    data_digest: str = ""  # of the shards in data.json
    passed_over: list[Count] = field(default_factory=list)  # steps, from 0, whose batches a rollback skips
    rollbacks: Count = 0


_RECORD = TypeAdapter(StageRecord)


class BrokenRecord(UserError):
    """Invalid stage.json at `path`."""

    def __init__(self, path: Path, *, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(
            f"{path} is broken ({why}): `shardvit run` with the run's recipe makes it again from the checkpoints"
        )


@dataclass(frozen=True)
class RunFolder:
    """Paths and records of one run."""

    runs_root: Path  # folder of all runs and the MLflow database, or a sweep's folder in it
    name: str  # the recipe's

    @property
    def path(self) -> Path:
        return self.runs_root / self.name

    @property
    def sweep(self) -> Path | None:
        return self.runs_root if (self.runs_root / SWEEP_FILE).is_file() else None

    @property
    def boundary(self) -> Path:
        """Folder that readers must not leave: the run's, or its sweep's, whose points share stages."""
        return self.sweep or self.path

    def leads_out(self, name: StageName) -> bool:
        return not is_inside(self.stage(name), folder=self.boundary)

    def stage(self, name: StageName) -> Path:
        return self.path / name

    def checkpoints(self, name: StageName) -> Path:
        return self.stage(name) / CHECKPOINTS_FOLDER

    def is_begun(self) -> bool:
        files = [self.path / RECIPE_FILE, *(self.stage(name) / STAGE_FILE for name in ALL_STAGES)]
        return any(file.is_file() for file in files)

    def ranks(self, name: StageName) -> Path:
        return self.stage(name) / RANKS_FOLDER

    def model(self, name: StageName) -> Path:
        return self.stage(name) / MODEL_FOLDER

    def record(self, name: StageName) -> StageRecord:
        """Read a stage's record, or return a new one; BrokenRecord if invalid, UserError if unreadable."""
        path = self.stage(name) / STAGE_FILE
        try:
            return _RECORD.validate_json(read_inside(path, folder=path.parent), strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return StageRecord()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise BrokenRecord(path, why=f"{where}: {first['msg']}" if where else first["msg"]) from None

    def peek(self, name: StageName, *, notes: list[str] | None = None) -> StageRecord:
        """Read the record, but treat a broken one as begun: it is mended when the stage runs. UserError if it is
        unreadable; with `notes`, problems are appended there instead."""
        try:
            return self.record(name)
        except BrokenRecord as error:
            if notes is not None:
                notes.append(one_line(f"{error.path} is broken ({error.why})"))
            return StageRecord(state="running")
        except UserError as error:
            if notes is None:
                raise
            notes.append(one_line(str(error)))
            return StageRecord()

    def update(self, name: StageName, **changes: object) -> StageRecord:
        """Change fields of a stage's record on disk. OSError if the disk is full or fails, or the run folder is gone:
        it is never recreated."""
        record = replace(self.record(name), **changes)
        self.write(name, record)
        return record

    def write(self, name: StageName, record: StageRecord) -> None:
        """Replace a stage's record; OSError as `update`."""
        self.stage(name).mkdir(exist_ok=True)
        replace_text(self.stage(name) / STAGE_FILE, json.dumps(asdict(record), indent=1) + "\n")

    def note_difference(self, text: str) -> None:
        """Write the text of `difference_to_parent`, unless empty; OSError if the disk is full or fails."""
        if text:
            replace_text(self.path / DIFFERENCE_FILE, text)

    def check_recipe(self, recipe: Recipe, *, restart: StageName | None = None) -> None:
        """Raise UserError with the differences if the recipe is not the run's; writes nothing. `restart` permits
        changes that affect only that stage and later ones."""
        path = self.path / RECIPE_FILE
        if not path.exists():
            if self.path.is_dir() and any(self.stage(name).exists() for name in ALL_STAGES):
                raise UserError(f"{path} is missing, but its stages are there: bring it back, or give another name")
            return
        changed = differences(parse_recipe(path), recipe)
        if restart is not None:
            again = ALL_STAGES[ALL_STAGES.index(restart) :]
            # Keys of the stages that are kept must not change; if none is kept, anything may.
            has_kept = any(name not in again and self.peek(name).state != "new" for name in ALL_STAGES)
            changed = {key: text for key, text in changed.items() if has_kept and not _is_of(key, again)}
        if changed:
            lines = "".join(f"\n  {key}: {text}" for key, text in changed.items())
            raise UserError(
                f"the recipe differs from the one that {self.path} was started with; continue with the old values, "
                f"give the run another name, or begin a stage again with --restart STAGE:{lines}"
            )

    def open(self, recipe: Recipe, *, restart: StageName | None = None) -> list[str]:
        """Prepare the folder for an already checked recipe; returns notes on what was moved aside."""
        notes: list[str] = []
        if restart is not None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            # Last stage first: a kill must not leave a stage without its predecessor.
            for name in reversed(ALL_STAGES[ALL_STAGES.index(restart) :]):
                if self.stage(name).exists():
                    aside = self.path / REPLACED_FOLDER / f"{name}-{stamp}"
                    aside.parent.mkdir(parents=True, exist_ok=True)
                    number = 1
                    while aside.exists():  # two restarts within a second
                        number += 1
                        aside = aside.with_name(f"{name}-{stamp}.{number}")
                    self.stage(name).rename(aside)
                    notes.append(f"moved {self.stage(name)} aside to {aside}")
        self.path.mkdir(parents=True, exist_ok=True)
        for name, text in copies(recipe.model_dump(mode="json")):
            (self.path / OWN_CODE_FOLDER).mkdir(exist_ok=True)
            replace_text(self.path / OWN_CODE_FOLDER / name, text)
        replace_text(self.path / RECIPE_FILE, dump_recipe(recipe))
        return notes

    def is_complete(self, recipe: Recipe) -> bool:
        return all(self.record(name).state == "done" for name in recipe.stages.names)


def checkpoint_folders(root: Path) -> list[Path]:
    """List committed checkpoints below `root`, newest first; skips a user's renamed copies."""
    paths = root.glob(f"{FOLDER_PREFIX}*")
    found = [path for path in paths if path.name.removeprefix(FOLDER_PREFIX).isdecimal() and path.is_dir()]
    return sorted(found, reverse=True)


def recipe_digest(recipe: Recipe, *, stage: StageName) -> str:
    """Digest the keys that affect a stage: without free keys, later stages and keys at their defaults. So new keys with
    defaults keep old digests valid, but defaults must never change."""
    later = ALL_STAGES[ALL_STAGES.index(stage) + 1 :]
    lines = [
        f"{key}={value}"
        for key, value in without_free_keys(flatten(recipe, keys="changed")).items()
        if key != "name" and not _is_of(key, later)
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _is_of(key: str, stages: Sequence[StageName]) -> bool:
    return any(f"{key}.".startswith(f"stages.{name}.") for name in stages)


def check_inputs(folder: RunFolder, *, stage: StageName, inputs: Mapping[str, str]) -> None:
    """Raise UserError if the stage began from other data or weights."""
    before = folder.peek(stage).inputs  # a broken record is mended before the stage runs
    changed = [name for name, digest in inputs.items() if name in before and before[name] != digest]
    if changed:
        raise UserError(
            f"{folder.stage(stage)} was begun with other {' and '.join(changed)} than there are now: bring the old "
            f"ones back, or begin again with --restart {stage}"
        )


def weights_digest(model_folder: Path) -> str:
    """Digest a saved model's weights."""
    with (model_folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check_model(folder: RunFolder, *, stage: StageName) -> Path:
    """Return a finished stage's model folder; UserError if its weights are missing or not those recorded."""
    model = folder.model(stage)
    try:
        digest = weights_digest(model)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): {_again(stage)}") from None
    if digest != folder.record(stage).model_digest:
        raise UserError(f"the weights in {model} are not those that {stage} left: {_again(stage)}")
    return model


def _again(stage: StageName) -> str:
    return f"bring the old ones back, or begin again with --restart {stage}"
