"""The model that swap_head starts from: an earlier stage's, or a folder that the recipe names. No torch here, so that
`launch` asks before it starts any process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from data_shards.errors import UserError
from model.config import ModelConfig
from model.saved import read_meta
from pipeline.recipe import Recipe


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """The folder that stages.swap_head.model names; None where it names none.

    Raises:
        UserError: the folder holds no model, or another one than the recipe's; says what to change.
    """
    config = recipe.stages.swap_head
    if config is None or config.model is None:
        return None
    folder = Path(config.model)
    try:
        meta = read_meta(folder)
    except ValueError as error:
        raise UserError(f"stages.swap_head.model: {error}") from None
    theirs, ours = _resolved(meta.model), _resolved(recipe.model)
    different = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
    if different:
        shown = ", ".join(f"{key} {theirs.get(key)} (not {ours.get(key)})" for key in different)
        raise UserError(
            f"stages.swap_head.model: {folder} is another model than the recipe's; under model, set {shown}"
        )
    return folder


def _resolved(config: ModelConfig) -> dict[str, object]:
    """What a configuration comes to, however it was written."""
    sizes = asdict(config.sizes if config.kind == "vit" else config.resnet)
    return sizes | config.model_dump(exclude={"variant", *sizes})
