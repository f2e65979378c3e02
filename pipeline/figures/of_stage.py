"""A finished stage's figures, kept with its pictures: what `drawing` calls at the stage's end."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer

from data_shards.errors import UserError
from data_shards.images.decode import PixelLimit
from data_shards.loading.batch import Batch
from data_shards.opening import open_shards
from model.saved import SavedModelMeta
from pipeline.figures.images import images_of_shards
from pipeline.figures.looked import images_to_look_at
from pipeline.figures.of_model import built, figures_of_attention, figures_of_weights
from pipeline.find_model import find_model
from pipeline.pictures.picture import DrawRequest, keep_picture
from pipeline.stage_data import shards_spec, store_of


def draw_paper_figures(request: DrawRequest) -> None:
    """Those of the model that the stage left, with images of its own held-out set. Raises UserError: the model is gone
    or damaged; or, once the figures without images are kept, the set cannot be opened or none of it is here."""
    found = find_model(request.folder.model(request.stage))
    meta = found.meta
    model = built(found, device=torch.device("cpu"))
    for picture, figure in figures_of_weights(model, meta=meta):
        keep_picture(request.stage_folder, picture, figure=figure, step=request.step)
    if isinstance(model, VisionTransformer):
        batch, classes = _held_out(request, meta=meta)
        for picture, figure in figures_of_attention(model, batch, meta=meta, classes=classes):
            keep_picture(request.stage_folder, picture, figure=figure, step=request.step)


def _held_out(request: DrawRequest, *, meta: SavedModelMeta) -> tuple[Batch, tuple[str, ...]]:
    """Images evenly spread over the held-out set, and the names of its classes; of shards that are not local files
    those alone that this machine has in its cache."""
    recipe, config = request.recipe, request.recipe.train_stage(request.stage)
    if config.eval is None:
        raise UserError(f"stages.{request.stage} names no held-out images")
    store = store_of(recipe, commands="refuse")
    shards = open_shards(shards_spec(config.eval), damaged="report", report=lambda line: None, store=store)
    batch = images_of_shards(
        shards,
        meta=meta,
        count=images_to_look_at(meta),
        store=store,
        limit=PixelLimit(recipe.data.max_image_pixels),
        fetch="never",
    )
    return batch, shards.classes
