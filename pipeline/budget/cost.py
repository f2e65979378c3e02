"""Count FLOPs and memory per image of a stage; checked against torch's MemTracker (test_memory_tracker.py).

Extends `model.counting` (bf16, no dropout) by the masked-patch head, dropout masks, float32, autocast and temporaries
of the backward pass.
"""

from dataclasses import dataclass
from typing import Literal, cast

from shardvit.data_shards.images.size_phases import size_at
from shardvit.model.config import ModelConfig
from shardvit.model.counting.cost import VALUE_BYTES, linear
from shardvit.model.counting.flops import account, account_autoencoder
from shardvit.model.vocabulary import COLOURS, HeadKind
from shardvit.pipeline.recipe.schema import EngineConfig, Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import StageName

# Autocast (accelerate) keeps norms' inputs in float32: 36 two-byte values for bf16's 32 (measured: 36.2 for B/16).
_AUTOCAST = 36 / 32
# Memory on top of the kept activations when the backward pass begins, as a share of the last block's hidden layer
# (measured: 3.1 to 3.3 of 4 for B/16 and L/16, 224 and 384 px, bf16 and float32).
_WORKING_SHARE = 0.85
_WORKING_SHARE_OF_CONVOLUTIONS = 0.08  # of the kept activations (measured: 8 % for R50+B/16)


@dataclass(frozen=True)
class StageCost:
    """Cost of one image in a stage."""

    parameters: int  # trained, head included
    training_flops: int  # forward and backward
    tokens: int  # in the blocks; 0 in a pure ResNet
    depth: int  # blocks; units of a pure ResNet
    activation_bytes: int  # kept per image until its backward pass
    checkpointed_activation_bytes: int  # with activation checkpointing: of all blocks, or every k-th as in the recipe
    working_bytes: int  # temporary in the backward pass, on top of either

    def image_bytes(self, activations: Literal["all", "checkpointed"]) -> int:
        kept = self.activation_bytes if activations == "all" else self.checkpointed_activation_bytes
        return kept + self.working_bytes


def phase_costs(recipe: Recipe, *, stage: StageName, plan: StagePlan, num_classes: int) -> dict[int, StageCost]:
    """Count the cost of one image in each phase of a stage, by first step: images may grow, and patch dropout end."""
    config = recipe.train_stage(stage)
    ends = {plan.patch_dropout_steps} if 0 < plan.patch_dropout_steps < plan.total_steps else set[int]()

    def cost(step: int) -> StageCost:
        size = size_at(plan.size_phases, step=step)
        rate = config.patch_dropout if step < plan.patch_dropout_steps else 0.0
        changes = {"patch_dropout": rate, "image_size": size or config.image_size}
        as_then = config.model_copy(update=changes)
        return stage_cost(recipe.model, stage=as_then, engine=recipe.engine, num_classes=num_classes)

    return {step: cost(step) for step in sorted({0, *ends, *(each.first_step for each in plan.size_phases)})}


def stage_cost(model: ModelConfig, *, stage: TrainStage, engine: EngineConfig, num_classes: int) -> StageCost:
    """Count the cost of one image in `stage`."""
    head, every = stage.head_kind, engine.checkpointed_every or 1
    masked = head == "masked_patch"
    if isinstance(stage, MaskedAutoencoderStage):
        counted = account_autoencoder(
            model,
            image_size=stage.image_size,
            decoder=stage.decoder,
            mask_ratio=stage.mask_ratio,
            checkpointed_every=every,
        )
    else:
        counted = account(
            model.model_copy(update={"pool": "gap"}) if masked and model.pool == "map" else model,
            image_size=stage.image_size,
            num_classes=len(COLOURS) if masked else num_classes,
            head=cast("HeadKind", "linear" if masked else head),
            patch_dropout=stage.patch_dropout,
            checkpointed_every=every,
        )
    parameters, flops = counted.parameters, counted.training_flops
    kept, checkpointed = counted.activation_bytes, counted.checkpointed_activation_bytes
    depth = model.num_blocks if model.kind == "resnet" else model.sizes.depth
    if masked:
        patches, width = model.grid_size(stage.image_size) ** 2, model.sizes.width
        more = linear(patches // 2 - 1, width, len(COLOURS))  # the head sees half of the patches, not one row
        parameters += width  # the mask's embedding
        corruption = 2 * patches * (patches + 1) * width  # the choice of patches has no gradient: one product, not two
        flops += 3 * more.flops + 2 * corruption
        # the corrupting matrix, and embeddings of the chosen patches
        added = more.saved_bytes + VALUE_BYTES * patches * (patches + 1)
        kept, checkpointed = kept + added, checkpointed + added
    if stage.dropout and stage.dropout_masks == "process":  # masks by sample are redrawn, not kept
        # A byte per value under dropout: after attention and twice in the MLP of each block, once before the blocks.
        sizes = model.sizes
        masks = counted.tokens * (sizes.width + sizes.depth * (2 * sizes.width + sizes.mlp_dim))
        whole = max(1, depth - -(-depth // every))  # blocks that keep masks; at least the recomputed one
        kept, checkpointed = kept + masks, checkpointed + masks * whole // max(1, depth)
    factor = 2.0 if engine.precision == "fp32" else _AUTOCAST if engine.backend == "accelerate" else 1.0
    hidden = 0 if model.kind == "resnet" else VALUE_BYTES * counted.tokens * model.sizes.mlp_dim
    if isinstance(stage, MaskedAutoencoderStage):  # the decoder's blocks are the last
        tokens = model.prefix_tokens + model.grid_size(stage.image_size) ** 2
        hidden = VALUE_BYTES * tokens * 4 * stage.decoder.width
    convolutions = model.kind == "resnet" or model.sizes.resnet_layers is not None
    working = _WORKING_SHARE_OF_CONVOLUTIONS * checkpointed if convolutions else 0
    return StageCost(
        parameters=parameters,
        training_flops=flops,
        tokens=counted.tokens,
        depth=depth,
        activation_bytes=int(kept * factor),
        checkpointed_activation_bytes=int(checkpointed * factor),
        working_bytes=int((_WORKING_SHARE * hidden + working) * (2 if engine.precision == "fp32" else 1)),
    )
