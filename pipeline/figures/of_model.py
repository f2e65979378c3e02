"""All of the paper's figures that a model has, one after the other; and why it lacks the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from timm.models.vision_transformer import VisionTransformer

from data_shards.loading.batch import Batch
from model.looking.learnt import first_filters, patch_positions, position_similarity
from model.resnet.bit import BitResnet
from model.saved import SavedModelMeta, build_described
from pipeline.figures.attention import Drawn, draw_distance, draw_maps, draw_rollout
from pipeline.figures.looked import look
from pipeline.figures.weights import draw_filters, draw_positions
from pipeline.find_model import FoundModel


def built(found: FoundModel, *, device: torch.device) -> VisionTransformer | BitResnet:
    """The model, for looking at: in evaluation mode, without gradients. It takes the tensors of `found` as its own."""
    with torch.device("meta"):
        frame = build_described(found.meta)
    buffers = {name: buffer for name, buffer in frame.named_buffers()}
    model = build_described(found.meta) if buffers else frame
    model.load_state_dict(found.state, assign=True)
    return model.requires_grad_(False).eval().float().to(device)


def figures_of_weights(model: VisionTransformer | BitResnet, *, meta: SavedModelMeta) -> Iterator[Drawn]:
    """Those that need no images."""
    yield draw_filters(first_filters(model), meta=meta)
    if isinstance(model, VisionTransformer) and (positions := patch_positions(model)) is not None:
        yield draw_positions(model, position_similarity(positions).numpy(), meta=meta)


def figures_of_attention(
    model: VisionTransformer, batch: Batch, *, meta: SavedModelMeta, classes: Sequence[str] = ()
) -> Iterator[Drawn]:
    """Those that show the model the images of `batch`, at least one; `classes` are those of its labels, if it has
    any."""
    looked = look(model, batch, meta=meta)
    yield draw_rollout(looked, batch, meta=meta, classes=classes)
    yield draw_maps(looked, batch, meta=meta)
    yield draw_distance(looked, meta=meta)


def left_out(meta: SavedModelMeta) -> tuple[str, ...]:
    """Which figures such a model has not, and why, a sentence each."""
    if meta.model.kind == "resnet":
        return ("attention and position embeddings: a ResNet has none; its root's filters are shown",)
    if meta.model.position == "none":
        return ("position_similarity: the model adds no position embeddings",)
    if meta.model.position == "relative":
        return (
            "position_similarity: relative positions belong to pairs of patches, so that no patch has an embedding of "
            "its own to compare",
        )
    return ()
