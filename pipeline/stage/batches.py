"""A stage's batches: the recipe's order, crops, augmentation and mixing, in the data path's terms."""

from __future__ import annotations

from collections.abc import Collection

import torch

from data_shards.images.decode import PixelLimit
from data_shards.images.rand_augment import RandAugment
from data_shards.images.transforms import EvalTransform, TrainTransform
from data_shards.loading.assemble import Access
from data_shards.loading.device_prefetch import Batches, prefetch_to_device
from data_shards.loading.loader import EvalBatches, Layout, TrainBatches, TrainLoader, eval_batches
from data_shards.loading.mixing import MixupConfig
from data_shards.shards.shard_set import ShardSet
from pipeline.ranks.place import Place
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import StageName
from pipeline.stage.data import StageData, training_order
from pipeline.stage.data_workers import DataWorkers


def train_stream(recipe: Recipe, *, stage: StageName, data: StageData, plan: StagePlan, place: Place) -> TrainBatches:
    """All micro-batches of this rank, by their number."""
    config = recipe.train_stage(stage)
    return TrainBatches(
        access_of(data.train, data=data, recipe=recipe),
        order=training_order(recipe, data=data, plan=plan),
        transform=train_transform(config),
        layout=Layout(
            rank=place.rank,
            world_size=place.world_size,
            micro_batch_size=plan.micro_batch_size,
            accumulation_steps=plan.accumulation_steps,
        ),
        seed=recipe.seed,
        mixup=mixup(config),
    )


def train_loader(
    stream: TrainBatches,
    *,
    start_step: int,
    stop_step: int,
    workers: DataWorkers,
    device: torch.device,
    passed_over: Collection[int] = (),
) -> Batches:
    """The micro-batches from `start_step` on, without those of the steps `passed_over`; on a GPU one ahead."""
    loader = TrainLoader(
        stream,
        start_step=start_step,
        stop_step=stop_step,
        passed_over=passed_over,
        workers=workers.count,
        kind=workers.kind,
    )
    return prefetch_to_device(loader, device=device)


def held_out_loader(part: EvalBatches, *, workers: DataWorkers, device: torch.device) -> Batches:
    """An evaluation's batches; on a GPU one ahead. To be closed."""
    return prefetch_to_device(eval_batches(part, workers=workers.count, kind=workers.kind), device=device)


def held_out(
    recipe: Recipe, *, stage: StageName, data: StageData, shards: ShardSet, plan: StagePlan, place: Place
) -> EvalBatches:
    """This rank's part of one of the held-out sets, padded so that all ranks read equally many batches."""
    return EvalBatches(
        access_of(shards, data=data, recipe=recipe),
        transform=eval_transform(recipe.train_stage(stage)),
        rank=place.rank,
        world_size=place.world_size,
        batch_size=plan.micro_batch_size,
    )


def train_transform(config: TrainStage) -> TrainTransform:
    """A stage's crop, resize, flip and RandAugment."""
    augment, strong = config.augment, config.augment.rand_augment
    return TrainTransform(
        image_size=config.image_size,
        crop=augment.crop,
        crop_area=augment.crop_area,
        crop_ratio=augment.ratio,
        resize_size=augment.resize_size,
        interpolation=augment.interpolation,
        antialias=augment.antialias,
        flip=augment.flip,
        rand_augment=strong and RandAugment(num_ops=strong.num_ops, magnitude=strong.magnitude, ranges=strong.ranges),
    )


def eval_transform(config: TrainStage) -> EvalTransform:
    """The resize and crop of evaluation."""
    return EvalTransform(config.image_size, protocol=config.eval_protocol, crop_share=config.eval_crop_share)


def mixup(config: TrainStage) -> MixupConfig | None:
    """A stage's mixup or CutMix, if any."""
    augment = config.augment
    if not augment.mixup_alpha and not augment.cutmix_alpha:
        return None
    return MixupConfig(
        mixup_alpha=augment.mixup_alpha, cutmix_alpha=augment.cutmix_alpha, switch_share=augment.cutmix_share
    )


def access_of(shards: ShardSet, *, data: StageData, recipe: Recipe) -> Access:
    """How the samples of one of a stage's sets are read."""
    return Access(
        shards,
        store=data.store,
        decoder=recipe.data.decoder,
        pixel_limit=PixelLimit(recipe.data.max_image_pixels),
        on_corrupt="substitute" if recipe.data.max_corrupt_share > 0 else "stop",
    )
