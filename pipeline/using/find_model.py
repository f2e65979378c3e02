"""Find the model at a path: a run, a stage, a checkpoint, or any file of weights. Reads weights on the CPU.

RUNS/NAME                                  the model of its last finished training stage
RUNS/NAME/STAGE                            that stage's model; until it is done, its newest whole checkpoint
RUNS/NAME/STAGE/checkpoints/step-00000400  that checkpoint, assembled from its shards
FOLDER or FILE                             a model of ours, or of any format that `model.formats` reads
hf-hub:OWNER/NAME, https://.../FILE        the same, brought here first (`hub`)

A checkpoint of a stage with EMA has two models: the caller chooses, by default the stage's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.data_shards.errors import UserError
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import CONFIG_FILE, SavedModelMeta, build_described, load_model, read_meta
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import (
    ALL_STAGES,
    CHECKPOINTS_FOLDER,
    RECIPE_FILE,
    STAGE_FILE,
    StageName,
    WeightsKind,
)
from shardvit.pipeline.runs.run_folder import FOLDER_PREFIX, RunFolder, checkpoint_folders
from shardvit.pipeline.using.hub import local_weights

if TYPE_CHECKING:
    from torch import Tensor

    Reader = Callable[[Path], tuple[SavedModelMeta, dict[str, Tensor]]]

_SHOWN: dict[WeightsKind, str] = {"weights": "the weights as trained", "ema": "their moving average"}


@dataclass(frozen=True)
class FoundModel:
    """A model and where it was found."""

    meta: SavedModelMeta
    state: dict[str, Tensor]  # under our names, on the CPU
    origin: str  # its path
    notes: tuple[str, ...] = ()  # assumptions, a sentence each


def find_model(
    path: Path, *, weights: WeightsKind | None = None, sizes: ModelConfig | None = None, num_classes: int | None = None
) -> FoundModel:
    """Find the model at `path`; UserError if it is missing, broken, or lacks `weights` (None: the stage's choice).
    `sizes`: those of a file that does not tell them; `num_classes`: of a head of zeros for a file without one."""
    from shardvit.model.formats.detect import import_file

    reader = partial(import_file, config=sizes, num_classes=num_classes)
    found = _find(local_weights(path), weights=weights, reader=reader)
    if weights is not None and weights != _kind(found.meta):
        here, wanted = _SHOWN[_kind(found.meta)], _SHOWN[weights]
        raise UserError(
            f"--weights {weights}: {found.origin} holds {here}, not {wanted}: only the checkpoints of a stage with "
            "ema, RUN/STAGE/checkpoints/step-..., hold both"
        )
    return found


def refuse_own_model(path: Path, *, command: str) -> None:
    """UserError if the model at `path` is own code, of which this command needs more than its logits."""
    record = find_record(path)
    if record is not None and record.model.custom is not None:
        raise UserError(
            f"{path} is a model of own code, of which only its logits are known, and {command} needs its inside: use "
            "predict or eval, which run it with --trust PATH of its file; its weights are in model.safetensors"
        )


def find_record(path: Path) -> SavedModelMeta | None:
    """Read the record at `path` without torch; None if only the weights tell. UserError without a model."""
    path = local_weights(path)
    place = _there(path).absolute()
    if (path / RECIPE_FILE).is_file() and place.parent.name != CHECKPOINTS_FOLDER:  # a checkpoint has a recipe, too
        place = _model_of_run(path)
    stage = place.parent.parent if place.parent.name == CHECKPOINTS_FOLDER else place
    try:
        if stage.name in ALL_STAGES and (stage.parent / RECIPE_FILE).is_file():
            return SavedModelMeta.model_validate(_run(stage.parent).record(stage.name).model)
        return read_meta(place)
    except ValueError:
        return None


def fitted_state(found: FoundModel, *, image_size: int, into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole state for `image_size`, with the head of `into` unless that of the weights fits. UserError if a
    part of the trunk is missing, ValueError if its positions cannot be interpolated."""
    from shardvit.model.positions.interpolation import resize_state

    meta = found.meta
    state = resize_state(found.state, config=meta.model, from_image_size=meta.image_size, to_image_size=image_size)
    heads = [{name: each.shape for name, each in of.items() if name.startswith("head.")} for of in (state, into)]
    trunk = {name: each for name, each in state.items() if not name.startswith("head.") or heads[0] == heads[1]}
    if missing := [
        name for name in into if name not in trunk and not name.startswith(("head.", "mask_token", "decoder."))
    ]:
        raise UserError(f"{found.origin} lacks {missing[0]}: fine-tune it first")
    return {**into, **{name: each for name, each in trunk.items() if name in into}}


def _kind(meta: SavedModelMeta) -> WeightsKind:
    return "weights" if meta.ema_decay is None else "ema"


def _run(path: Path) -> RunFolder:
    return RunFolder(runs_root=path.parent, name=path.name)


def _there(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path} is not there: give a run's folder, a checkpoint, or a file of weights")
    return path


def _find(path: Path, *, weights: WeightsKind | None, reader: Reader) -> FoundModel:
    place = _there(path).absolute()  # handles "." and a bare stage name inside a run
    if (
        place.name.startswith(FOLDER_PREFIX) and place.parent.name == CHECKPOINTS_FOLDER
    ):  # checked first: it has a recipe too
        from shardvit.pipeline.checkpoint.store import damage_of

        if damage := damage_of(path):
            raise UserError(f"checkpoint {path} is damaged ({damage}): take another one")
        return _of_checkpoint(path, weights=weights)
    if (path / RECIPE_FILE).is_file():
        return _read(_model_of_run(path), load_model)
    if place.name in ALL_STAGES and (place.parent / RECIPE_FILE).is_file():
        return _of_stage(path.parent if path.name else place.parent, stage=place.name, weights=weights)
    if (path / CONFIG_FILE).is_file():
        try:
            read_meta(path)
        except ValueError:
            pass  # timm's or transformers': below
        else:
            return _read(path, load_model)
    return _read(path, reader)


def _read(path: Path, reader: Reader) -> FoundModel:
    try:
        meta, state = reader(path)
    except ValueError as error:
        raise UserError(str(error)) from None
    return FoundModel(meta, state, origin=str(path))


def _model_of_run(path: Path) -> Path:
    run = _run(path)
    done: list[StageName] = [name for name in ALL_STAGES if name != "swap_head" and run.record(name).state == "done"]
    if done:
        return run.model(done[-1])
    begun = [name for name in ALL_STAGES if checkpoint_folders(run.checkpoints(name))]
    advice = f"give {path / begun[-1]} for its newest checkpoint" if begun else "run it first"
    raise UserError(f"{path}: none of its stages is done: {advice}")


def _of_stage(path: Path, *, stage: StageName, weights: WeightsKind | None) -> FoundModel:
    from shardvit.pipeline.checkpoint.store import damage_of

    run = _run(path)
    if run.record(stage).state == "done":
        return _read(run.model(stage), load_model)
    damaged: list[str] = []
    for checkpoint in checkpoint_folders(run.checkpoints(stage)):
        damage = damage_of(checkpoint)
        if not damage:
            found = _of_checkpoint(checkpoint, weights=weights)
            which = f"{stage} is not done: this is its checkpoint {checkpoint.name}"
            return replace(found, notes=(which, *damaged, *found.notes))
        damaged.append(f"{checkpoint} is damaged ({damage})")
    why = f" ({'; '.join(damaged)})" if damaged else ""
    raise UserError(f"{path / stage} is not done and has no whole checkpoint{why}: run it first")


def _of_checkpoint(checkpoint: Path, *, weights: WeightsKind | None) -> FoundModel:
    import torch

    from shardvit.pipeline.checkpoint.store import checkpoint_weights

    stage_folder = checkpoint.absolute().parent.parent
    path, stage = stage_folder.parent, stage_folder.name
    if stage not in ALL_STAGES or not (path / RECIPE_FILE).is_file():
        raise UserError(f"{checkpoint} is not in a run's folder RUNS/NAME/STAGE/checkpoints: its recipe.yaml is needed")
    file, described = stage_folder / STAGE_FILE, _run(path).record(stage).model
    if not described:
        raise UserError(f"{file} does not say what its model is: run the recipe again, which writes it down")
    try:
        meta = SavedModelMeta.model_validate(described)
    except ValueError as error:
        raise UserError(f"{file}: its model cannot be understood: {'; '.join(str(error).splitlines())}") from None
    if weights is not None and weights != _kind(meta):
        ema = parse_recipe(path / RECIPE_FILE).train_stage(stage).ema
        if ema is None:
            raise UserError(
                f"--weights ema: {checkpoint} has no moving average: stages.{stage} was trained without ema"
            )
        meta = meta.model_copy(update={"ema_decay": ema.decay if weights == "ema" else None})
    with torch.device("meta"):
        model = build_described(meta)
    state = checkpoint_weights(checkpoint, model=model, of=_kind(meta))
    return FoundModel(meta, state, origin=str(checkpoint))
