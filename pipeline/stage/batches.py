"""Translate a stage's order, crops, augmentation and mixing for `data_shards`."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardvit.data_shards.errors import OwnCodeFailed, UserError
from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.images.rand_augment import RandAugment
from shardvit.data_shards.images.transforms import EvalTransform, TrainTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.erasing import ErasingConfig
from shardvit.data_shards.loading.loader import EvalBatches, Layout, TrainBatches
from shardvit.data_shards.loading.mixing import MixupConfig
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.pipeline.own_code.by_path import OwnCode, load_own, own_traceback, shown
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.stage.stage_data import Stage


@dataclass(frozen=True)
class OwnAugment:
    """The user's augmentation; travels to worker processes as its name, and is loaded there."""

    code: OwnCode

    def __post_init__(self) -> None:
        load_own(self.code)  # a mistake is found before a worker starts

    def __call__(self, image: Pixels, generator: np.random.Generator) -> Pixels:
        function = load_own(self.code)
        try:
            found = function(image, generator)
        except Exception as error:  # noqa: BLE001 - perhaps in a worker process, which would add its own traceback
            raise OwnCodeFailed(own_traceback(error)) from None
        if not isinstance(found, np.ndarray) or found.shape != image.shape or found.dtype != image.dtype:
            got = f"{found.dtype} {[*found.shape]}" if isinstance(found, np.ndarray) else type(found).__name__
            raise UserError(
                f"augment.custom {shown(self.code)}: it gives {got}, not a {image.dtype} array {[*image.shape]}"
            )
        return found


def train_stream(
    stage: Stage,
    *,
    place: Place,
    own_code: Literal["run", "leave out"] = "leave out",
    normalisation: Normalisation = GOOGLES,
) -> TrainBatches:
    """Index a rank's micro-batches by number. Only training runs the user's augmentation: pictures execute nothing."""
    plan, custom = stage.plan, stage.config.augment.custom if own_code == "run" else None
    return TrainBatches(
        access_of(stage, stage.data.train),
        order=stage.order(),
        transform=replace(
            train_transform(stage.config, normalisation=normalisation), own=custom and OwnAugment(custom)
        ),
        layout=Layout(
            rank=place.rank,
            world_size=place.world_size,
            micro_batch_size=plan.micro_batch_size,
            accumulation_steps=plan.accumulation_steps,
        ),
        seed=stage.recipe.seed,
        mixup=mixup(stage.config),
        erasing=erasing(stage.config),
        phases=plan.size_phases,
    )


def held_out(stage: Stage, shards: ShardSet, *, place: Place) -> EvalBatches:
    """Get this rank's part of a held-out set, padded to the same number of batches on every rank."""
    return EvalBatches(
        access_of(stage, shards),
        transform=eval_transform(stage.config),
        rank=place.rank,
        world_size=place.world_size,
        batch_size=stage.plan.micro_batch_size,
    )


def train_transform(config: TrainStage, *, normalisation: Normalisation = GOOGLES) -> TrainTransform:
    """Make the stage's crop, resize, flip and augmentation; AutoAugment fills with the normalisation's mean."""
    augment, strong, policy = config.augment, config.augment.rand_augment, config.augment.auto_augment
    fill = tuple(min(255, round(255 * mean)) for mean in normalisation.mean)
    kernel = "random" if augment.interpolation == "area" else augment.interpolation  # of what timm has
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
        auto_augment=AutoAugment(policy, interpolation=kernel, fill=fill) if policy else None,
        color_jitter=augment.color_jitter and ColorJitter(*augment.color_jitter),
    )


def eval_transform(config: TrainStage) -> EvalTransform:
    """Make the evaluation's resize and crop."""
    return EvalTransform(config.image_size, protocol=config.eval_protocol, crop_share=config.eval_crop_share)


def mixup(config: TrainStage) -> MixupConfig | None:
    """Make the stage's mixup or CutMix, if any."""
    augment = config.augment
    if not augment.mixup_alpha and not augment.cutmix_alpha:
        return None
    shares = {"switch_share": augment.cutmix_share, "mixed_share": augment.mixed_share}
    return MixupConfig(augment.mixup_alpha, augment.cutmix_alpha, **shares)


def erasing(config: TrainStage) -> ErasingConfig | None:
    """Make the stage's random erasing, if any."""
    given = config.augment.random_erasing
    return given and ErasingConfig(given.probability, given.mode, given.count)


def access_of(stage: Stage, shards: ShardSet) -> Access:
    """Describe how to read samples of one of the stage's sets."""
    config = stage.recipe.data
    return Access(
        shards,
        store=stage.data.store,
        decoder=config.decoder,
        pixel_limit=PixelLimit(config.max_image_pixels),
        on_corrupt="substitute" if config.max_corrupt_share > 0 else "stop",
        channels=stage.data.channels,
    )
