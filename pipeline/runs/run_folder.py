"""The run folder: which stages are done, what went into them, and whether the recipe is still the same.

    RUNS/NAME/recipe.yaml                 the resolved recipe
    RUNS/NAME/recipe_difference.txt       to its parent, see `recipe.io.difference_to_parent`
    RUNS/NAME/STAGE/stage.json            state, images seen, digests of what went in, results
    RUNS/NAME/STAGE/data.json             the shards that it began with, see `data_record`
    RUNS/NAME/STAGE/checkpoints/step-*/   see `checkpoint`
    RUNS/NAME/STAGE/ranks/                see `watch`
    RUNS/NAME/STAGE/metrics.jsonl         see `metrics_log`
    RUNS/NAME/STAGE/events.jsonl          see `report.events`
    RUNS/NAME/STAGE/evaluations/          see `evaluation.result`
    RUNS/NAME/STAGE/pictures/             see `pictures.picture`; what drew them says so in RUNS/NAME/pictures.log
    RUNS/NAME/STAGE/model/                the result: safetensors and config.json
    RUNS/NAME/transfer/                   few-shot, probe and kNN of its models, see `transfer.results`
    RUNS/NAME/mlflow*.json, tracking/     what MLflow is to know and was told, also in each stage, see `tracking`
    RUNS/NAME/report.html                 all of this as a page, after each stage and by `shardvit report`
    RUNS/NAME/compiled/                   what torch has compiled, see `kernels.cache`; may be deleted at any time

A finished stage is not run again; an interrupted one goes on; a changed recipe is refused with the difference shown.
Nothing is deleted: what `--restart` begins again is moved aside. No torch here.
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
from data_shards.errors import UserError
from data_shards.safe_paths import is_inside, read_inside
from pipeline.recipe.io import differences, dump_recipe, flatten, parse_recipe, without_free_keys
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import (
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

FOLDER_PREFIX = "step-"  # of a checkpoint
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class StageRecord:
    """stage.json; a wrong type or an unknown key makes it broken."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    state: Literal["new", "running", "done"] = "new"
    last_saved_step: Count = 0
    images_seen: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    inputs: dict[str, str] = field(default_factory=dict)  # name -> digest
    results: dict[str, float] = field(default_factory=dict)
    model_digest: str = ""  # of the weights that the stage left
    total_steps: Count = 0  # 0: not begun, or begun before this was written down
    lanes: Count = 0  # of the order of its samples; 0 likewise
    model: dict[str, Any] = field(default_factory=dict)  # the record that its model will have, since it began
    data_digest: str = ""  # of what data.json says of its shards
    passed_over: list[Count] = field(default_factory=list)  # steps, from 0, whose batches a rollback does without
    rollbacks: Count = 0


_RECORD = TypeAdapter(StageRecord)


class BrokenRecord(UserError):
    """stage.json at `path` is broken, because of `why`."""

    def __init__(self, path: Path, *, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(
            f"{path} is broken ({why}): `shardvit run` with the run's recipe makes it again from the checkpoints"
        )


@dataclass(frozen=True)
class RunFolder:
    """Paths and records of one run."""

    runs_root: Path  # folder of all runs, where the MLflow database lies too; or of a sweep's runs, within it
    name: str  # the recipe's name

    @property
    def path(self) -> Path:
        return self.runs_root / self.name

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that this run belongs to, if it does."""
        return self.runs_root if (self.runs_root / SWEEP_FILE).is_file() else None

    @property
    def boundary(self) -> Path:
        """The folder that readers do not leave: the run's; of a sweep's run the sweep's, since points share stages."""
        return self.sweep or self.path

    def leads_out(self, name: StageName) -> bool:
        """True if a stage's folder is a link that leads outside."""
        return not is_inside(self.stage(name), folder=self.boundary)

    def stage(self, name: StageName) -> Path:
        return self.path / name

    def checkpoints(self, name: StageName) -> Path:
        return self.stage(name) / CHECKPOINTS_FOLDER

    def is_begun(self) -> bool:
        """True if there is a run here."""
        return (self.path / RECIPE_FILE).is_file() or any(
            (self.stage(name) / STAGE_FILE).is_file() for name in ALL_STAGES
        )

    def ranks(self, name: StageName) -> Path:
        return self.stage(name) / RANKS_FOLDER

    def model(self, name: StageName) -> Path:
        return self.stage(name) / MODEL_FOLDER

    def record(self, name: StageName) -> StageRecord:
        """A stage's record, or a new one; BrokenRecord: it is broken, UserError: it cannot be read."""
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

    def peek(self, name: StageName) -> StageRecord:
        """Read the record as `record` does, but take a broken one as begun: it is mended when the stage runs."""
        try:
            return self.record(name)
        except BrokenRecord:
            return StageRecord(state="running")

    def update(self, name: StageName, **changes: object) -> StageRecord:
        """Change fields of a stage's record, on disk and at once; OSError: the disk is full or fails, or the run
        folder, which is not made again, is gone."""
        record = replace(self.record(name), **changes)
        self.write(name, record)
        return record

    def write(self, name: StageName, record: StageRecord) -> None:
        """Replace a stage's record. Raises as `update`."""
        self.stage(name).mkdir(exist_ok=True)
        replace_text(self.stage(name) / STAGE_FILE, json.dumps(asdict(record), indent=1) + "\n")

    def note_difference(self, text: str) -> None:
        """Keep what `difference_to_parent` said; nothing said: what is there stays. OSError: the disk is full or
        fails."""
        if text:
            replace_text(self.path / DIFFERENCE_FILE, text)

    def check_recipe(self, recipe: Recipe, *, restart: StageName | None = None) -> None:
        """Refuse (UserError, with the differences) a recipe other than the run's; changes nothing on disk.
        With `restart`, changes that affect only that stage and later ones are accepted."""
        path = self.path / RECIPE_FILE
        if not path.exists():
            if self.path.is_dir() and any(self.stage(name).exists() for name in ALL_STAGES):
                raise UserError(f"{path} is missing, but its stages are there: bring it back, or give another name")
            return
        changed = differences(parse_recipe(path), recipe)
        if restart is not None:
            again = ALL_STAGES[ALL_STAGES.index(restart) :]
            # What the earlier stages were made from must stay; if none is kept, anything may change.
            kept = [name for name in ALL_STAGES if name not in again and self.peek(name).state != "new"]
            changed = {
                key: text
                for key, text in changed.items()
                if kept and not any(f"{key}.".startswith(f"stages.{name}.") for name in again)
            }
        if changed:
            lines = "".join(f"\n  {key}: {text}" for key, text in changed.items())
            raise UserError(
                f"the recipe differs from the one that {self.path} was started with; go on with the old values, "
                f"give the run another name, or begin a stage again with --restart STAGE:{lines}"
            )

    def open(self, recipe: Recipe, *, restart: StageName | None = None) -> list[str]:
        """Make the folder ready for `recipe`, already checked; returns what was moved aside."""
        notes: list[str] = []
        if restart is not None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            # The last one first, so that a kill in between leaves no stage whose predecessor is gone.
            for name in reversed(ALL_STAGES[ALL_STAGES.index(restart) :]):
                if self.stage(name).exists():
                    aside = self.path / REPLACED_FOLDER / f"{name}-{stamp}"
                    aside.parent.mkdir(parents=True, exist_ok=True)
                    number = 1
                    while aside.exists():  # two restarts in one second
                        number += 1
                        aside = aside.with_name(f"{name}-{stamp}.{number}")
                    self.stage(name).rename(aside)
                    notes.append(f"moved {self.stage(name)} aside to {aside}")
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / RECIPE_FILE, dump_recipe(recipe))
        return notes

    def is_complete(self, recipe: Recipe) -> bool:
        return all(self.record(name).state == "done" for name in recipe.stages.names)


def checkpoint_folders(root: Path) -> list[Path]:
    """The committed checkpoints below `root`, newest first; a user's renamed copies are ignored."""
    paths = root.glob(f"{FOLDER_PREFIX}*")
    found = [path for path in paths if path.name.removeprefix(FOLDER_PREFIX).isdecimal() and path.is_dir()]
    return sorted(found, reverse=True)


def recipe_digest(recipe: Recipe, *, stage: StageName) -> str:
    """A digest of the recipe's keys that affect one stage; free keys, later stages and keys at their defaults are left
    out, so that a key that a later version adds changes no digest, and a default must never change."""
    later = ALL_STAGES[ALL_STAGES.index(stage) + 1 :]
    lines = [
        f"{key}={value}"
        for key, value in without_free_keys(flatten(recipe, keys="changed")).items()
        if key != "name" and not any(f"{key}.".startswith(f"stages.{name}.") for name in later)
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def check_inputs(folder: RunFolder, *, stage: StageName, inputs: Mapping[str, str]) -> None:
    """Refuse other data or weights than the stage began with; UserError names what has changed."""
    before = folder.record(stage).inputs
    changed = [name for name, digest in inputs.items() if name in before and before[name] != digest]
    if changed:
        raise UserError(
            f"{folder.stage(stage)} was begun with other {' and '.join(changed)} than there are now: bring the old "
            f"ones back, or begin again with --restart {stage}"
        )


def weights_digest(model_folder: Path) -> str:
    """Digest of a saved model's weights."""
    with (model_folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check_model(folder: RunFolder, *, stage: StageName) -> Path:
    """A finished stage's model; UserError if its weights are gone or are not those that it recorded."""
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
