"""Start a stage from weights (`stages.STAGE.init`): compare them with the recipe, and fit them to the stage's model.

Positions are interpolated to the stage's image size. The head stays where the classes are the same: their number, and
their names in order where both sides know them. Reads the weights once in each process, on the CPU; a resume reads its
checkpoint instead, and the stage's record. An own model's code is built only once it is known to be the recipe's.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.formats.first_convolution import with_channels
from shardvit.model.own.custom import resized_own_state
from shardvit.model.positions.embedding import starting_numbers
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vocabulary import SELF_SUPERVISED
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import StageStart, check_same_model, check_same_size
from shardvit.pipeline.using.find_model import FoundModel, find_model, find_record, fitted_state
from shardvit.pipeline.using.hub import local_weights

_SIZES = ("width", "depth", "heads", "mlp_dim", "patch_size")


def check_weights(recipe: Recipe, *, stage: StageName) -> None:
    """UserError if the weights of `init` are missing or another model's; reads them only where no record tells."""
    source = recipe.train_stage(stage).init_weights
    assert source is not None
    if (record := _record(source, stage=stage)) is None:
        record = _found(recipe, source, stage=stage).meta
    _compare(recipe, record, stage=stage)


def load_weights(
    recipe: Recipe, *, stage: StageName, run: RunFolder, model: nn.Module, outputs: Sequence[str]
) -> StageStart:
    """Load the weights of `init` into the stage's initialised model, unless a checkpoint will. UserError as
    `check_weights`, and if they do not fit."""
    record, config = run.peek(stage), recipe.train_stage(stage)
    # Past a checkpoint, the stage goes on from one or is refused.
    if record.last_saved_step > 0 and record.model and "weights" in record.inputs:
        meta = SavedModelMeta.model_validate(record.model)
        return StageStart(record.inputs["weights"], Normalisation(mean=meta.mean, std=meta.std))
    source = config.init_weights
    assert source is not None
    if (described := _record(source, stage=stage)) is not None:
        _compare(recipe, described, stage=stage)  # before an own model's code is run
    found = _found(recipe, source, stage=stage)
    _compare(recipe, found.meta, stage=stage)
    meta, into = found.meta, dict(model.state_dict())
    if meta.head == "masked_autoencoder":  # its trunk, with the positions that swap_head would give it
        state = {name: each for name, each in found.state.items() if not name.startswith("decoder.")}
        found = replace(found, state=state | starting_numbers(meta.model, image_size=meta.image_size))
    why = _why_new_head(meta, into=into, found=found, outputs=outputs, head=config.head_kind)
    kept = {name: each for name, each in found.state.items() if not (why and name.startswith("head."))}
    try:
        if recipe.model.custom is None:
            kept = with_channels(kept, config=meta.model, channels=recipe.model.channels)
            state = fitted_state(replace(found, state=kept), image_size=config.image_size, into=into)
        else:
            sizes = {"from_image_size": meta.image_size, "to_image_size": config.image_size}
            state = into | resized_own_state(model, kept, **sizes)
        model.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"stages.{stage}.init: {found.origin} does not fit: {error}") from None
    normalisation = Normalisation(mean=meta.mean, std=meta.std)
    notes = _notes(found, into=into, why=why, image_size=config.image_size)
    if (theirs_of := meta.model.channels) != (ours := recipe.model.channels):
        notes += (f"init fitted the first convolution from {theirs_of} channels to {ours}",)
    return StageStart(state_digest(found.state), normalisation, notes=notes)


def _record(source: str, *, stage: StageName) -> SavedModelMeta | None:
    try:
        return find_record(Path(source))
    except UserError as error:
        raise UserError(f"stages.{stage}.init: {error}") from None


def _found(recipe: Recipe, source: str, *, stage: StageName) -> FoundModel:
    """Read the weights; sizes that a file does not tell, such as heads, are the recipe's, but no semantics."""
    try:
        sizes, path = None, local_weights(source)  # from elsewhere: brought here once
        with suppress(UserError):
            return find_model(path)
        if recipe.model.custom is None and recipe.model.kind == "vit" and recipe.model.sizes.resnet_layers is None:
            sizes = ModelConfig.model_validate(
                {name: each for name, each in asdict(recipe.model.sizes).items() if name in _SIZES and each is not None}
            )
        with suppress(UserError):
            return find_model(path, sizes=sizes)
        found = find_model(path, sizes=sizes, num_classes=1)  # a trunk alone gets a head, which is not kept
    except UserError as error:
        raise UserError(f"stages.{stage}.init: {error}") from None
    return replace(found, state={name: each for name, each in found.state.items() if not name.startswith("head.")})


def _compare(recipe: Recipe, meta: SavedModelMeta, *, stage: StageName) -> None:
    source = redacted(str(recipe.train_stage(stage).init_weights))
    check_same_model(recipe, meta, key=f"stages.{stage}.init", source=source)
    check_same_size(recipe, meta, stage=stage, source=source)


def _why_new_head(
    meta: SavedModelMeta, *, into: Mapping[str, Tensor], found: FoundModel, outputs: Sequence[str], head: str
) -> str:
    """Say why the head of the weights does not stay; "" if it does."""
    if {head, meta.head} & {*SELF_SUPERVISED}:
        return "a stage without labels takes and gives the trunk alone"
    if not any(name.startswith("head.") for name in found.state):
        return "it has no head"
    if meta.num_classes != len(outputs):
        return f"it has {meta.num_classes:,} classes, and the stage {len(outputs):,}"
    theirs, ours = ([name.removeprefix("LABEL_") for name in names] for names in (meta.class_names, outputs))
    numbers = [str(number) for number in range(len(ours))]  # names that tell nothing, also transformers' LABEL_0
    if theirs != ours and numbers not in (theirs, ours):
        return "its classes have other names, or another order, than the stage's"
    heads = [{name: each.shape for name, each in of.items() if name.startswith("head.")} for of in (found.state, into)]
    return "" if heads[0] == heads[1] else f"it is {meta.head}, and the stage's is {head} (key head)"


def _notes(found: FoundModel, *, into: Mapping[str, Tensor], why: str, image_size: int) -> tuple[str, ...]:
    """Say what was loaded, left and made, a line each, after what was assumed."""
    loaded = [name for name in found.state if name in into and not (why and name.startswith("head."))]
    left = [name for name in found.state if name not in loaded]
    made, meta = [name for name in into if name not in loaded], found.meta
    resized = ""
    if meta.image_size != image_size:
        resized = f", positions interpolated from {meta.image_size} to {image_size} px"
    head = "" if why else f", with its head of {meta.num_classes:,} classes"
    return (
        *found.notes,
        f"init loaded {_counted(loaded, found.state)} of {found.origin}{head}{resized}",
        f"init left {_counted(left, found.state)}" + (f": {why}" if why else ""),
        f"init made {_counted(made, into)}" + (", as at a random start" if made else ""),
    )


def _counted(names: Sequence[str], state: Mapping[str, Tensor]) -> str:
    parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"{sum(state[name].numel() for name in names):,} parameters ({parts})" if names else "nothing"


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Digest names and values, whatever the format they came in."""
    digest = hashlib.blake2b(digest_size=16)
    for name, each in sorted(state.items()):
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
        digest.update(each.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
