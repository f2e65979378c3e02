"""A finished stage's figures, kept with its pictures: what `drawing` calls at the stage's end."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer

from pipeline.pictures.held_out_images import held_out_access
from pipeline.pictures.paper.attention_inputs import images_to_look_at, look
from pipeline.pictures.paper.images import images_of_shards
from pipeline.pictures.paper.model_figures import built, figures_of_attention, figures_of_weights
from pipeline.pictures.style import keep_picture
from pipeline.recipe.vocabulary import OWN_SET
from pipeline.runs.pictures import DrawRequest
from pipeline.using.find_model import find_model


def draw_paper_figures(request: DrawRequest) -> None:
    """Those of the model that the stage left, with images of its own held-out set. Raises UserError: the model is gone
    or damaged; or, once the figures without images are kept, the set cannot be opened or none of it is here."""
    found = find_model(request.folder.model(request.stage))
    meta = found.meta
    model = built(found, device=torch.device("cpu"))
    for picture, figure in figures_of_weights(model, meta=meta):
        keep_picture(request.stage_folder, picture, figure=figure, step=request.step)
    if isinstance(model, VisionTransformer):
        held_out = held_out_access(request, set_name=OWN_SET)
        batch = images_of_shards(held_out, meta=meta, count=images_to_look_at(meta), fetch="never")
        for picture, figure in figures_of_attention(
            look(model, batch, meta=meta), batch, meta=meta, classes=held_out.shards.classes
        ):
            keep_picture(request.stage_folder, picture, figure=figure, step=request.step)
