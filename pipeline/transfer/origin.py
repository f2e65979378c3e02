"""Where a model is from: which run, stage and step, how many images it has seen, and where its results are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from data_shards.errors import UserError
from pipeline.checkpoint.identity import read_state_file
from pipeline.recipe.vocabulary import ALL_STAGES, CHECKPOINTS_FOLDER, MODEL_FOLDER, RECIPE_FILE, StageName
from pipeline.runs.run_folder import FOLDER_PREFIX, RunFolder
from pipeline.transfer.results import TRANSFER_FOLDER, file_name


@dataclass(frozen=True)
class ModelOrigin:
    """A model's place; all None: it lies in no run's folder."""

    run: RunFolder | None = None
    stage: StageName | None = None
    step: int | None = None  # a checkpoint's
    images_seen: int | None = None  # by the stage, up to this model; None: not known

    def record_file(self, name: str, *, outside: Path) -> Path:
        """RUN/transfer/NAME-STAGE.json, or -STAGE-step-00000400.json; a file in `outside` where there is no run."""
        if self.run is None:
            return outside / f"{file_name(name)}.json"
        step = "" if self.step is None else f"-{FOLDER_PREFIX}{self.step:08d}"
        return self.run.path / TRANSFER_FOLDER / f"{file_name(name)}-{self.stage}{step}.json"


def model_origin(found: str) -> ModelOrigin:
    """Of the place that `find_model` names: RUN/STAGE/model or RUN/STAGE/checkpoints/step-..., else none."""
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
