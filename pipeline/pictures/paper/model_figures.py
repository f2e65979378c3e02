"""Draw all of the paper's figures that a model supports, and say why others are missing."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from timm.models.vision_transformer import VisionTransformer

from shardvit.data_shards.loading.batch import Batch
from shardvit.model.inspection import first_filters, patch_positions, position_similarity
from shardvit.model.resnet import BitResnet
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from shardvit.pipeline.pictures.held_out_images import held_out_access
from shardvit.pipeline.pictures.paper.attention_figures import draw_distance, draw_maps, draw_rollout
from shardvit.pipeline.pictures.paper.attention_inputs import SeenAttention, images_of_shards, images_to_look_at, look
from shardvit.pipeline.pictures.paper.weight_figures import draw_filters, draw_positions
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.recipe.vocabulary import OWN_SET
from shardvit.pipeline.runs.pictures import DrawRequest
from shardvit.pipeline.using.find_model import FoundModel, find_model


def built(found: FoundModel, *, device: torch.device) -> VisionTransformer | BitResnet:
    """Build the model in evaluation mode, without gradients, on the tensors of `found` (no copy)."""
    with torch.device("meta"):
        frame = build_described(found.meta)
    model = build_described(found.meta) if any(True for _ in frame.buffers()) else frame
    model.load_state_dict(found.state, assign=True)
    return model.requires_grad_(False).eval().float().to(device)


def figures_of_weights(model: VisionTransformer | BitResnet, *, meta: SavedModelMeta) -> Iterator[Drawn]:
    """Draw the figures that need no images."""
    yield draw_filters(first_filters(model), meta=meta)
    if isinstance(model, VisionTransformer) and (positions := patch_positions(model)) is not None:
        yield draw_positions(model, position_similarity(positions).numpy(), meta=meta)


def figures_of_attention(
    attention: SeenAttention, batch: Batch, *, meta: SavedModelMeta, classes: Sequence[str] = ()
) -> Iterator[Drawn]:
    """Draw what `look` found in `batch`; `classes`: names for its labels, if it has any."""
    yield draw_rollout(attention, batch, meta=meta, classes=classes)
    yield draw_maps(attention, batch, meta=meta)
    yield draw_distance(attention, meta=meta)


def numbers_of(model: VisionTransformer | BitResnet, attention: SeenAttention | None) -> dict[str, NDArray[Any]]:
    """Return the figures' arrays by figure name."""
    numbers: dict[str, NDArray[Any]] = {"embedding_filters": first_filters(model).filters.numpy()}
    if isinstance(model, VisionTransformer) and (positions := patch_positions(model)) is not None:
        numbers["position_similarity"] = position_similarity(positions).numpy()
    if attention is not None:
        numbers |= {
            "attention_rollout": attention.rollout.numpy(),
            "attention_maps": attention.maps.numpy(),
            "attention_distance": attention.distances.numpy(),
        }
    return numbers


def left_out(meta: SavedModelMeta) -> tuple[str, ...]:
    """Explain, one sentence each, which figures this model cannot have."""
    if meta.model.custom is not None:
        return ("attention, filters and position embeddings: the model is own code, whose inside is unknown",)
    if meta.model.kind == "resnet":
        return ("attention and position embeddings: a ResNet has none; its root's filters are shown",)
    reasons = {
        "none": "the model adds no position embeddings",
        "relative": "relative positions belong to pairs of patches, so that no patch has an embedding of its own to "
        "compare",
    }
    reason = reasons.get(meta.model.position)
    return () if reason is None else (f"position_similarity: {reason}",)


def draw_paper_figures(request: DrawRequest) -> Iterator[Drawn]:
    """Draw the stage's model with images of its own held-out set. UserError if the model is missing or damaged; or,
    after the figures of weights, if the set cannot be opened or read here."""
    found = find_model(request.folder.model(request.stage))
    meta = found.meta
    model = built(found, device=torch.device("cpu"))
    yield from figures_of_weights(model, meta=meta)
    if isinstance(model, VisionTransformer):
        held_out = held_out_access(request, set_name=OWN_SET)
        batch = images_of_shards(held_out, meta=meta, count=images_to_look_at(meta), fetch="never")
        attention = look(model, batch, meta=meta)
        yield from figures_of_attention(attention, batch, meta=meta, classes=held_out.shards.classes)
