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
from pipeline.recipe.stage import TrainStage
from pipeline.stage.data_workers import DataWorkers
from pipeline.stage.stage_data import Stage


def train_stream(stage: Stage, *, place: Place) -> TrainBatches:
    """All micro-batches of a rank, by their number."""
    config, plan = stage.config, stage.plan
    return TrainBatches(
        access_of(stage, stage.data.train),
        order=stage.order(),
        transform=train_transform(config),
        layout=Layout(
            rank=place.rank,
            world_size=place.world_size,
            micro_batch_size=stage.plan.micro_batch_size,
            accumulation_steps=plan.accumulation_steps,
        ),
        seed=stage.recipe.seed,
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


def held_out(stage: Stage, shards: ShardSet, *, place: Place) -> EvalBatches:
    """This rank's part of one of the held-out sets, padded so that all ranks read equally many batches."""
    return EvalBatches(
        access_of(stage, shards),
        transform=eval_transform(stage.config),
        rank=place.rank,
        world_size=place.world_size,
        batch_size=stage.plan.micro_batch_size,
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


def access_of(stage: Stage, shards: ShardSet) -> Access:
    """How the samples of one of a stage's sets are read."""
    config = stage.recipe.data
    return Access(
        shards,
        store=stage.data.store,
        decoder=config.decoder,
        pixel_limit=PixelLimit(config.max_image_pixels),
        on_corrupt="substitute" if config.max_corrupt_share > 0 else "stop",
    )
